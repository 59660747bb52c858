"""A newcomer whose line is slow, and how much it makes up for with averages; of the process that calls these."""

import asyncio
import time

from swarm.state_sync.pull import Pull
from swarm.training.coordinator import Coordinator
from swarm.training.island import channel
from swarm.training.joining.update_replay import UpdateReplay

SLOW_SECONDS = 1.5
"""Some updates of a swarm that needs 0.2 s for each."""
MEANWHILE, AT_MOST_SECONDS = 5, 60.0


def download_states_slowly(newest=None) -> None:
    """Averages come as fast as ever.

    Args:
        newest: shared number, the step of the swarm: a download lasts for some updates, however fast they are
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
    """The first process takes longer to join than the others wait for a word of it."""
    channel.SILENT_SECONDS, channel.PULSE_SECONDS = silent_seconds, silent_seconds / 10
    join = Coordinator.join

    def join_late(self):
        time.sleep(1.5 * silent_seconds)
        join(self)

    Coordinator.join = join_late


def count_followed_updates() -> list[int]:
    """How many updates this peer makes with averages of others, each time that it does so."""
    followed, replay = [], UpdateReplay.replay_updates

    def count_updates(self, *arguments):
        followed.append((yield from replay(self, *arguments)))
        return followed[-1]

    UpdateReplay.replay_updates = count_updates
    return followed
