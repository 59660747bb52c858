"""What a peer's owner lets it take. It is asked after each micro-batch, and while the peer joins or waits."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import Timer


class Limit(L.Callback):
    """Makes a peer leave when its owner wishes that."""

    def look(self, trainer: L.Trainer) -> None:
        """Make it leave if that is so now."""
        raise NotImplementedError

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.look(trainer)


def is_to_leave(trainer: L.Trainer) -> bool:
    """Ask all limits, Lightning's own timer too; whether one of them ends the training of a peer that waits."""
    for callback in trainer.callbacks:
        if isinstance(callback, Limit):
            callback.look(trainer)
        elif isinstance(callback, Timer):
            callback.on_train_batch_end(trainer)
    return trainer.should_stop and trainer.fit_loop._can_stop_early
