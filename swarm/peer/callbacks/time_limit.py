"""Makes a peer leave when the time that its owner gives is over."""

from __future__ import annotations

from datetime import timedelta

import lightning as L

from swarm.peer.startup_timer import seconds_since_command
from swarm.runtime.timeouts import seconds_since_boot
from swarm.training.limits import Limit


class TimeLimit(Limit):
    """Ends the training this long after the command, whatever the peer has done since: joined, computed, or paused.

    Args:
        limit: time from the command to the end
    """

    def __init__(self, limit: timedelta):
        self._ends_at = seconds_since_boot() + limit.total_seconds() - seconds_since_command()

    def look(self, trainer: L.Trainer) -> None:
        if seconds_since_boot() >= self._ends_at:
            trainer.should_stop = True
