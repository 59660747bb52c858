"""Lightning callbacks that count in global updates: log each one, validate after every n-th, stop at an accuracy.

`PacedCompute` is for experiments alone.
"""

import time
from typing import Any

import lightning as L
import torch

from recipe.pacing import SAMPLES, sleep_rest


class StepMetrics(L.Callback):
    """Logs one line per global update, at `trainer.global_step`, to all of the trainer's loggers.

    `train/loss`, `train/top1` and `train/top5` are means over the trainer's samples since the last update, `train/lr`
    is the learning rate of that update, `perf/samples_per_second` counts its training samples over its training time,
    and `perf/step_seconds` is that time. Validation counts for neither. All of a trainer's processes count together.

    It needs a module with `train_metrics` ("loss", "top1", "top5"), such as `recipe.task.VisionTask`.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.started_at = 0.0
        self.paused_at = 0.0
        self.logged_step = 0
        self.learning_rate = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins to measure; a run that goes on from a checkpoint does not log its last step again."""
        self.logged_step = trainer.global_step
        self._restart(pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Notes the learning rate: when the batch ends, the scheduler has already set the next update's."""
        self.learning_rate = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs if this micro-batch completed an update."""
        self.samples += len(batch[1])
        if trainer.global_step == self.logged_step:
            return
        self.logged_step = trainer.global_step
        seconds = time.perf_counter() - self.started_at
        values = _means_over_processes(trainer, pl_module.train_metrics)
        values["train/lr"] = float(self.learning_rate)
        values["perf/samples_per_second"] = self.samples * trainer.world_size / seconds
        values["perf/step_seconds"] = seconds
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
        self._restart(pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stops the clock."""
        self.paused_at = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Lets the clock go on."""
        self.started_at += time.perf_counter() - self.paused_at

    def _restart(self, pl_module: L.LightningModule) -> None:
        for metric in pl_module.train_metrics.values():
            metric.reset()
        self.samples = 0
        self.started_at = time.perf_counter()


def _means_over_processes(trainer: L.Trainer, metrics: Any) -> dict[str, float]:
    """All processes train on equally many samples, so the mean of their means is the mean over all samples."""
    means = torch.stack([metric.compute().float() for metric in metrics.values()])
    if trainer.world_size > 1:
        means = trainer.strategy.reduce(means, reduce_op="mean")
    return {f"train/{name}": value for name, value in zip(metrics.keys(), means.tolist(), strict=True)}


class ValidateEverySteps(L.Callback):
    """Validates after every `every` global updates and after the last one, whatever micro-batches an update takes.

    Lightning counts micro-batches instead: it validates when the number of those in this epoch is a multiple of
    `trainer.val_check_batch`. So that is set to their current number, or to infinity, after each one. A peer that
    catches up with its swarm may jump over a multiple of `every`; it then validates where it lands.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.last_step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins to count at the step of the checkpoint, if there is one."""
        self.last_step = trainer.global_step
        trainer.val_check_batch = float("inf")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Schedules a validation right after this micro-batch, or none."""
        step, last_step, self.last_step = trainer.global_step, self.last_step, trainer.global_step
        is_due = step // self.every > last_step // self.every
        is_last = step > last_step and 0 < trainer.max_steps <= step
        trainer.val_check_batch = batch_idx + 1 if is_due or is_last else float("inf")


class StopAtAccuracy(L.Callback):
    """Stops the training once a validation has reached the accuracy.

    Args:
        target: lowest `val/top1` that is enough, 0 to 1.
    """

    def __init__(self, target: float) -> None:
        self.target = target
        self.reached = False

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Asks the trainer to stop; the first process decides for all."""
        if trainer.sanity_checking:
            return
        if trainer.strategy.broadcast(bool(trainer.callback_metrics["val/top1"] >= self.target)):
            self.reached = True
            trainer.should_stop = True


class PacedCompute(L.Callback):
    """Makes a module's `training_step` take its share of the time before the backward pass begins.

    DDP's averaging, which begins within the backward pass, therefore overlaps with nothing but that.

    Args:
        samples_per_second: speed of the device.
    """

    def __init__(self, samples_per_second: float) -> None:
        self.samples_per_second = samples_per_second

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Puts the pace around `training_step`, once."""
        if "training_step" not in vars(pl_module):
            pl_module.training_step = self._paced(pl_module.training_step)

    def _paced(self, training_step: Any) -> Any:
        def paced_step(batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
            began = time.perf_counter()
            loss = training_step([part[:SAMPLES] for part in batch], batch_idx)
            sleep_rest(began, len(batch[1]), self.samples_per_second)
            return loss

        return paced_step
