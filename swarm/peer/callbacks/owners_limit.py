"""Makes a peer leave when its owner wants that, but not within a round: its members would have to repeat the round."""

from __future__ import annotations

import threading

import lightning as L

from swarm.training.limits import Limit


class OwnersLimit(Limit):
    """A limit that a round which is under way may still exceed.

    Args:
        stop_requested: set to leave
    """

    def __init__(self, stop_requested: threading.Event):
        self._stop_requested, self._step = stop_requested, None
        self.has_stopped = False
        """Whether this peer leaves because of this limit."""

    def is_reached(self, trainer: L.Trainer) -> bool:
        """Whether this peer has to leave as soon as it can; asked at each look."""
        raise NotImplementedError

    def look(self, trainer: L.Trainer) -> None:
        coordinator = trainer.strategy.coordinator
        has_just_ended, self._step = coordinator.step != self._step, coordinator.step
        if self.is_reached(trainer) and (has_just_ended or not coordinator.is_averaging):
            self.has_stopped = True
            self._stop_requested.set()
