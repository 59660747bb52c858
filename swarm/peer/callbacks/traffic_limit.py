"""Counts what a peer sends and receives, and makes it leave when its owner's limit is reached."""

from __future__ import annotations

import threading

import lightning as L


class TrafficLimit(L.Callback):
    """Looks after each micro-batch.

    Args:
        max_gb: 10⁹ bytes that this peer may send and receive; None for no limit
        stop_requested: set to leave
    """

    def __init__(self, max_gb: float | None, stop_requested: threading.Event):
        self._max_gb, self._stop_requested = max_gb, stop_requested
        self.num_bytes = 0
        """Sent and received since the start."""

    @property
    def is_used_up(self) -> bool:
        """Whether the limit is reached."""
        return self._max_gb is not None and self.num_bytes >= self._max_gb * 1e9

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self._count(trainer)
        if self.is_used_up:
            self._stop_requested.set()

    def on_train_end(self, trainer, pl_module) -> None:
        self._count(trainer)

    def _count(self, trainer: L.Trainer) -> None:
        self.num_bytes = trainer.strategy.coordinator.averager.line.num_bytes
