"""Limits that a peer's owner sets. They are checked after each micro-batch, and while the peer joins or waits."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import Timer


class Limit(L.Callback):
    """A limit after which a peer leaves."""

    def look(self, trainer: L.Trainer) -> None:
        """Make the peer leave if the limit is reached."""
        raise NotImplementedError

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.look(trainer)


def is_to_leave(trainer: L.Trainer) -> bool:
    """Check all limits, including Lightning's timer; return whether one of them ends the training now."""
    for callback in trainer.callbacks:
        if isinstance(callback, Limit):
            callback.look(trainer)
        elif isinstance(callback, Timer):
            callback.on_train_batch_end(trainer)
    return trainer.should_stop and trainer.fit_loop._can_stop_early
