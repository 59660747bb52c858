"""A peer that was asked to measures the swarm's weights on the test images now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L

from recipe.data.peer_data import PeerData
from recipe.training.loggers import JsonlFile
from recipe.training.task import ClassificationTask


class Evaluation(L.Callback):
    """Follows a validation, while the others know that this peer pauses, and the model has the swarm's weights.

    Nothing is chosen by the test images, or their accuracy would say more than the weights can do on images that nobody
    has looked at. What is best is said by the validation.

    Args:
        every: global updates; the next validation after so many is followed by a pass over the test images
        file: gets a line for each pass
        say: prints a line
    """

    def __init__(self, every: int, file: Path, say: Callable[[str], None]):
        self._every, self._file, self._say = every, JsonlFile(file), say
        self._last_step = 0
        self.best: dict[str, Any] | None = None
        """Of the passes of this peer: that of the weights with the highest validation accuracy."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last_step = trainer.global_step

    def on_validation_end(self, trainer: L.Trainer, pl_module: ClassificationTask) -> None:
        step = trainer.global_step
        is_last = 0 < trainer.max_steps <= step
        if step // self._every <= self._last_step // self._every and not is_last:
            return
        self._last_step = step
        began = time.perf_counter()
        result = evaluate(trainer, pl_module, trainer.datamodule)
        line = {"step": step, "val_top1": float(trainer.callback_metrics["val/top1"]), **result}
        line["seconds"] = time.perf_counter() - began
        self._file.append(line)
        if self.best is None or line["val_top1"] >= self.best["val_top1"]:
            self.best = line
        self._say(
            f"Test images at step {step}: {100 * line['top1']:.1f} % right, {100 * line['top5']:.1f} % among the first "
            f"five, loss {line['loss']:.3f}; {line['images']:,} images in {line['seconds']:.1f} s."
        )


def evaluate(trainer: L.Trainer, task: ClassificationTask, data: PeerData) -> dict[str, float | int]:
    """One pass over the test images with the weights that the model has now; it has to be in evaluation mode.

    Returns:
        images, loss, top1 and top5
    """
    for index, batch in enumerate(data.test_dataloader()):
        moved = trainer.strategy.batch_to_device(data.on_before_batch_transfer(batch, 0), task.device)
        with trainer.precision_plugin.test_step_context():
            task.test_step(moved, index)
    found = task.take_test_results()
    return {name: found[name] for name in ("images", "loss", "top1", "top5")}
