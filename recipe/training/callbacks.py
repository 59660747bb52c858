"""Lightning callbacks that count in global updates: log each one, validate after every n-th, stop at an accuracy.

`PacedCompute` is for experiments alone.
"""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import lightning as L
import torch
import torch.distributed as dist

from recipe.training.pacing import Pace, computed_samples


class Gauge(Protocol):
    """A quantity that is measured in every process at every global update."""

    per_process: bool
    """Whether to log a value per process, as "rank0/TAG" and so on, instead of the mean over processes."""

    def start(self) -> None:
        """Begin to measure an update."""

    def take(self, seconds: float) -> dict[str, float]:
        """The values since `start`, always with the same tags; NaN is not logged. `seconds` is the training time since
        then."""


class StepMetrics(L.Callback):
    """Logs one line per global update, at `trainer.global_step`, to all of the trainer's loggers.

    `train/loss`, `train/top1` and `train/top5` are means over the trainer's samples since the last update. `train/lr`
    is the learning rate of that update. `perf/samples_per_second` is its training samples over its training time, and
    `perf/step_seconds` is that time, a mean over the trainer's processes. Time of validations, and of checkpoints
    written after one, does not count.

    Several processes exchange their values while the next update is computed, so logging costs them no round trip. The
    line is written when that update ends, or before a validation or checkpoint.

    It needs a module that has `train_metrics` ("loss", "top1", "top5"), such as
    `recipe.training.task.ClassificationTask`.

    Args:
        gauges: further quantities to log.
        wants_to_stop: called in every process at every update. If one process says yes, all stop together at the next
            update, after a last validation.
        is_interrupted: like `wants_to_stop`, but without the last validation, which may take longer than is left until
            the processes are killed. Only a run that has made all its updates is validated nevertheless.
        times: number of processes that compute as much as this one, if the trainer does not know of the others.
    """

    def __init__(
        self,
        gauges: Iterable[Gauge] = (),
        wants_to_stop: Callable[[], bool] = lambda: False,
        is_interrupted: Callable[[], bool] = lambda: False,
        times: int = 1,
    ) -> None:
        self.times = times
        self.gauges = list(gauges)
        self.wants_to_stop, self.is_interrupted = wants_to_stop, is_interrupted
        self.samples = 0
        self.started_at = 0.0
        self.paused_at: float | None = None
        self.logged_step = 0
        self.learning_rate = 0.0
        self._finish: Callable[[], None] = _nothing

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins to measure; a run that resumes from a checkpoint does not log its last step again."""
        self.logged_step, self.paused_at = trainer.global_step, None
        self._restart(pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Lets the clock go on after a validation, and notes the learning rate.

        When the batch ends, the scheduler has already set the learning rate of the next update.
        """
        if self.paused_at is not None:
            self.started_at += time.perf_counter() - self.paused_at
            self.paused_at = None
        self.learning_rate = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measures, if this micro-batch completed an update, and writes the line of the update before."""
        self.samples += len(batch[1])
        if trainer.global_step == self.logged_step:
            return
        self._flush()
        self.logged_step = trainer.global_step
        if pl_module.device.type == "cuda":  # work that the GPU still has to do belongs to this update
            torch.cuda.current_stream(pl_module.device).synchronize()
        seconds = time.perf_counter() - self.started_at
        self._exchange(trainer, pl_module, seconds)
        # A validation that comes now waits for the other processes anyway, and an interrupt of one of them skips it.
        if trainer.world_size == 1 or trainer.val_check_batch == batch_idx + 1:
            self._flush()
        self._restart(pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stops the clock."""
        self._flush()
        self.paused_at = time.perf_counter()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Writes the line of this step, so that a run that resumes from the checkpoint has it."""
        self._flush()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the last line."""
        self._flush()

    def _exchange(self, trainer: L.Trainer, pl_module: L.LightningModule, seconds: float) -> None:
        """Sends this process's values to the others, and sets `_finish`, which writes the line once theirs are here."""
        measured = [(gauge, gauge.take(seconds)) for gauge in self.gauges]
        means = torch.stack([metric.compute().float() for metric in pl_module.train_metrics.values()])
        asked = [float(self.is_interrupted()), float(self.wants_to_stop())]
        others = [seconds, *asked, *(value for _, values in measured for value in values.values())]
        own = torch.cat([means, means.new_tensor(others)])
        everyone, work = own.unsqueeze(0), None
        if trainer.world_size > 1:
            everyone = own.new_empty(trainer.world_size, len(own))
            work = dist.all_gather(list(everyone.unbind()), own, async_op=True)
        names = [f"train/{name}" for name in pl_module.train_metrics]
        step, learning_rate, samples = trainer.global_step, float(self.learning_rate), self.samples * self.times

        def finish() -> None:
            if work is not None:
                work.wait()
            rows = everyone.tolist()
            columns = [list(column) for column in zip(*rows, strict=True)]
            line = {name: _mean(columns.pop(0)) for name in names} | {"train/lr": learning_rate}
            line["perf/step_seconds"] = _mean(columns.pop(0))
            line["perf/samples_per_second"] = samples * len(rows) / line["perf/step_seconds"]
            is_interrupted, is_to_stop = any(columns.pop(0)), any(columns.pop(0))
            trainer.should_stop = trainer.should_stop or is_interrupted or is_to_stop
            if is_interrupted and trainer.global_step < trainer.max_steps:
                trainer.limit_val_batches = 0
            for gauge, values in measured:
                for tag in values:
                    line |= _tagged(tag, columns.pop(0), gauge.per_process)
            for logger in trainer.loggers:
                logger.log_metrics(line, step=step)

        self._finish = finish

    def _flush(self) -> None:
        finish, self._finish = self._finish, _nothing
        finish()

    def _restart(self, pl_module: L.LightningModule) -> None:
        for metric in pl_module.train_metrics.values():
            metric.reset()
        for gauge in self.gauges:
            gauge.start()
        self.samples = 0
        self.started_at = time.perf_counter()


def _nothing() -> None:
    """Stands for `_finish` when no line is pending."""


def _mean(values: list[float]) -> float:
    """The mean over processes. All train on equally many samples, so it is the mean over all samples."""
    return sum(values) / len(values)


def _tagged(tag: str, values: list[float], per_process: bool) -> dict[str, float]:
    """The entries to log for a gauge's tag "kind/name", given the value of each process."""
    if not per_process:
        return {tag: _mean(values)}
    kind, name = tag.split("/")
    return {f"{kind}/rank{rank}/{name}": value for rank, value in enumerate(values) if math.isfinite(value)}


class ValidateEverySteps(L.Callback):
    """Validates after every `every` global updates and after the last one, however many micro-batches an update takes.

    Sometimes it is known only afterwards that an update was the last one, because a run can be ended at its current
    step.

    Lightning counts micro-batches instead: it validates when the number of those in this epoch is a multiple of
    `trainer.val_check_batch`. So this callback sets that to their current number, or to infinity, after each
    micro-batch. A peer that catches up with its swarm may jump over a multiple of `every`; then it validates at the
    step that it reaches.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.last_step = 0
        self.ended_step = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins to count at the step of the checkpoint, if there is one."""
        self.last_step = trainer.global_step
        trainer.val_check_batch = float("inf")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Schedules a validation right after this micro-batch if one is due, or none."""
        step, last_step, self.last_step = trainer.global_step, self.last_step, trainer.global_step
        is_due = step // self.every > last_step // self.every
        is_last = 0 < trainer.max_steps <= step != self.ended_step
        if is_last:  # once, also if the step was validated before it was known to be the last
            self.ended_step = step
        trainer.val_check_batch = batch_idx + 1 if is_due or is_last else float("inf")


class StopAtAccuracy(L.Callback):
    """Stops the training once a validation has reached the accuracy.

    Args:
        target: the `val/top1` to reach, 0 to 1.
    """

    def __init__(self, target: float) -> None:
        self.target = target
        self.reached = False

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Asks the trainer to stop if the accuracy was reached; the first process decides for all."""
        if trainer.sanity_checking:
            return
        if trainer.strategy.broadcast(bool(trainer.callback_metrics["val/top1"] >= self.target)):
            self.reached = True
            trainer.should_stop = True


class PacedCompute(L.Callback):
    """Makes each micro-batch of a module take its share of a pretended device's time, before the backward pass begins.

    DDP's averaging begins within the backward pass, so it overlaps only with the backward pass of the few samples that
    are computed.

    Args:
        samples_per_second: speed of the pretended device.
    """

    def __init__(self, samples_per_second: float) -> None:
        self.pace = Pace(samples_per_second)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Wraps `training_step` in the pace, once."""
        if "training_step" not in vars(pl_module):
            pl_module.training_step = self._paced(pl_module.training_step)

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Notes how late this micro-batch ended, which corrects the next one, unless DDP averaged in it."""
        self.pace.end_backward(averaged=getattr(trainer.model, "require_backward_grad_sync", False))

    def _paced(self, training_step: Any) -> Any:
        def paced_step(batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
            began = time.perf_counter()
            loss = training_step([part[computed_samples()] for part in batch], batch_idx)
            self.pace.sleep_before_backward(began, len(batch[1]))
            return loss

        return paced_step
