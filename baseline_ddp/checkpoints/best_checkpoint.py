"""Copies the best checkpoint to any fsspec address in the background."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from recipe.remote_file import RemoteCopy
from recipe.training.checkpoint_io import BEST


class BestCheckpointCopy(Checkpoint):
    """Follows Lightning's `ModelCheckpoint`, and copies each new best checkpoint.

    It has to come after `best` in the trainer's list of callbacks. It acts in the first process only.

    Args:
        copy: the copy to keep up to date.
        best: the callback that writes the best checkpoint.
    """

    def __init__(self, copy: RemoteCopy, best: ModelCheckpoint) -> None:
        self.copy, self.best = copy, best
        self._score: Any = None

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hands a new best checkpoint to the thread that copies."""
        score = self.best.best_model_score
        if not trainer.is_global_zero or score is None or score == self._score:
            return
        self._score = score
        self.copy.submit(Path(self.best.best_model_path))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Copies the existing best checkpoint if this run made none: a resumed run may end without a validation."""
        left = Path(self.best.dirpath) / BEST
        if trainer.is_global_zero and self._score is None and left.exists():
            self.copy.submit(left)
