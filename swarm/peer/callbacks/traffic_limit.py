"""Counts what a peer sends and receives, and makes it leave when its owner's limit is reached."""

from __future__ import annotations

import os
import threading

from swarm.runtime.line_use import LineUse
from swarm.training.limits import Limit

_EARLIER = "SWARM_TRAFFIC_BYTES"
"""Environment variable: of the lives before, for a peer that starts itself again."""


class TrafficLimit(Limit):
    """Leaves when it is reached, and no round is under way: the others would have to make it again.

    Args:
        line: of this peer
        max_gb: 10⁹ bytes that it may carry; None for no limit
        stop_requested: set to leave
    """

    def __init__(self, line: LineUse, max_gb: float | None, stop_requested: threading.Event):
        self._line, self._max_gb, self._stop_requested = line, max_gb, stop_requested
        self._earlier, self._step = int(os.environ.get(_EARLIER, 0)), None
        self.has_stopped = False
        """Whether this peer leaves because of it."""

    @property
    def num_bytes(self) -> int:
        """Sent and received since the start."""
        return self._earlier + self._line.num_bytes

    def keep(self) -> None:
        """For this peer's next life, before it starts again; only then, since each value takes memory for good."""
        os.environ[_EARLIER] = str(self.num_bytes)

    def look(self, trainer) -> None:
        coordinator = trainer.strategy.coordinator
        has_just_ended, self._step = coordinator.step != self._step, coordinator.step
        is_between_rounds = has_just_ended or not coordinator.is_averaging
        if self._max_gb is not None and self.num_bytes >= self._max_gb * 1e9 and is_between_rounds:
            self.has_stopped = True
            self._stop_requested.set()
