"""Makes a peer leave for as long as its machine is to be spared."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from swarm.network.home.sparing import LOOK_SECONDS
from swarm.training.limits import Limit


class HomePause(Limit):
    """Looks every few seconds, and leaves when no round is under way: the others would have to make it again.

    Args:
        why: says why this machine is to be spared now, with nothing where it is not
        stop_requested: set to leave
    """

    def __init__(self, why: Callable[[], str], stop_requested: threading.Event):
        self._why, self._stop_requested = why, stop_requested
        self._looked_at, self._step = time.monotonic(), None
        self._reason = ""
        self.has_stopped = False
        """Whether this peer leaves because of it."""

    def look(self, trainer) -> None:
        if time.monotonic() - self._looked_at >= LOOK_SECONDS:
            self._looked_at = time.monotonic()
            self._reason = self._why()
        coordinator = trainer.strategy.coordinator
        has_just_ended, self._step = coordinator.step != self._step, coordinator.step
        is_between_rounds = has_just_ended or not coordinator.is_averaging
        ends_anyway = self._stop_requested.is_set() or trainer.global_step >= trainer.max_steps
        if self._reason and is_between_rounds and not ends_anyway:
            self.has_stopped = True
            self._stop_requested.set()
