"""A round in the background ends, also when the process that runs it does not."""

from concurrent.futures import Future

import pytest

from recipe.errors import InputError
from swarm import pending
from swarm.pace import Work
from swarm.pending import PendingRound
from swarm.rounds import LINEAGE_BYTES, CollaborationOptions, Ticket


class StoppedAverager:
    """Takes a round and never says anything about it."""

    is_killed = False

    def run_round(self, *_) -> Future:
        return Future()

    def kill(self) -> None:
        self.is_killed = True

    def check_alive(self) -> None:
        if self.is_killed:
            raise InputError("The averaging process has died")


def test_an_averaging_process_that_is_stopped_is_ended(monkeypatch):
    monkeypatch.setattr(pending, "HANGS_SECONDS", 0.1)
    averager = StoppedAverager()
    options = CollaborationOptions(averaging_timeout_seconds=0.1)
    waiting = PendingRound(averager, Ticket(0, 32, False, 1.0, bytes(LINEAGE_BYTES)), [], options, Work())
    with pytest.raises(InputError, match="has died"):
        waiting.wait(members=list, should_stop=lambda: False)
