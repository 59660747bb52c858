"""A joiner on a slow line, and how many updates it makes up for with averages; both patch the calling process."""

import asyncio
import time

from swarm.state_sync.pull import Pull
from swarm.training.coordinator import Coordinator
from swarm.training.island import channel
from swarm.training.joining.update_replay import UpdateReplay

SLOW_SECONDS = 1.5
"""Duration of some updates of a swarm that needs 0.2 s for each."""
MEANWHILE, AT_MOST_SECONDS = 5, 60.0


def download_states_slowly(newest=None) -> None:
    """Delay downloads of states, but not of averages.

    Args:
        newest: the swarm's step, a shared number: a download lasts for some updates, however fast they are
    """
    pull = Pull.run

    async def pull_slowly(self):
        await pull(self)
        if self.download.request.average_of is not None:
            return
        if newest is None:
            await asyncio.sleep(SLOW_SECONDS)
            return
        until, step = time.monotonic() + AT_MOST_SECONDS, newest.value + MEANWHILE
        while newest.value < step and time.monotonic() < until:
            await asyncio.sleep(0.05)

    Pull.run = pull_slowly


def join_slowly(silent_seconds: float) -> None:
    """Let the first process take longer to join than the other processes wait for a message of it."""
    channel.SILENT_SECONDS, channel.PULSE_SECONDS = silent_seconds, silent_seconds / 10
    join = Coordinator.join

    def join_late(self):
        time.sleep(1.5 * silent_seconds)
        join(self)

    Coordinator.join = join_late


def count_followed_updates() -> list[int]:
    """Return a list that grows by the number of updates each time that this peer makes up for some with averages."""
    followed, replay = [], UpdateReplay.replay_updates

    def count_updates(self, *arguments):
        followed.append((yield from replay(self, *arguments)))
        return followed[-1]

    UpdateReplay.replay_updates = count_updates
    return followed
