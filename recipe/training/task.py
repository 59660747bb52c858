"""`ClassificationTask`: a recipe's model, loss and metrics for Lightning, under any strategy."""

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)

from recipe.config import Recipe
from recipe.data.sampler import PADDING
from recipe.optimizer import build_optimizer, build_scheduler
from recipe.training.compiler import try_compiler

Batch = tuple[torch.Tensor, torch.Tensor]

_OF_ONE_PROCESS = {"sync_on_compute": False}
"""Turns off the metrics' own synchronisation, which would make a collective call or two for each of their numbers."""
_OF_LABELS = {"ignore_index": PADDING, "validate_args": False, **_OF_ONE_PROCESS}


class ClassificationTask(L.LightningModule):
    """A classifier of images, texts or other samples: `recipe.registry.build_task` builds it.

    `training_step` only adds to running metrics, which `recipe.training.callbacks.StepMetrics` reads and resets once
    per global update. Validation logs `val/loss`, `val/top1`, `val/top5`, `val/macro_f1`, `val/precision` and
    `val/recall` at the global step at which it ran. The last three are means over classes. Testing logs the same under
    `test/`. With fewer than five classes, "top5" counts the best `num_classes` guesses. Samples with the label
    `PADDING` count for nothing. Metrics of a pass are over all processes.

    After testing, `confusion` holds the int64 counts (num_classes, num_classes), true classes in rows. Checkpoints also
    hold the recipe as JSON, under "recipe".

    Args:
        recipe: the recipe that is trained.
        model: a module that maps inputs to logits (batch, num_classes).
        channels_last: compute on images in torch's channels-last memory format, which is faster for convolutions on
            GPUs.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, channels_last: bool = False) -> None:
        super().__init__()
        self.recipe = recipe
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.model = model.to(memory_format=self.memory_format)
        self.divide: Callable[[L.LightningModule], None] = _leave_whole
        """Shards the parameters over the processes; called once these are connected."""
        self.train_metrics = _running_metrics(recipe.num_classes)
        self.val_metrics = evaluation_metrics(recipe.num_classes)
        self.test_metrics = evaluation_metrics(recipe.num_classes)
        self.val_loss, self.test_loss = MeanMetric(**_OF_ONE_PROCESS), MeanMetric(**_OF_ONE_PROCESS)
        self.test_confusion = MulticlassConfusionMatrix(recipe.num_classes, **_OF_LABELS)
        self.confusion: torch.Tensor | None = None
        self.is_compiled = False

    def compile_model(self, device: torch.device) -> None:
        """Compute with `torch.compile` from now on, with the same random numbers as without it.

        The parameters keep their names.

        Args:
            device: the device that computes.

        Raises:
            InputError: this machine cannot compile for that device.
        """
        try_compiler(device)
        self.model.compile(options={"fallback_random": True})
        self.is_compiled = True

    @property
    def num_parameters(self) -> int:
        """Number of the model's parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def sizes(self) -> dict[str, int]:
        """Number of parameters, and of elements in buffers such as BatchNorm's statistics."""
        return {"parameters": self.num_parameters, "buffers": sum(buffer.numel() for buffer in self.model.buffers())}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits (batch, num_classes) of inputs (batch, ...)."""
        is_images = inputs.ndim == 4  # only batches of images have this format
        return self.model(inputs.contiguous(memory_format=self.memory_format) if is_images else inputs)

    def configure_model(self) -> None:
        """Shards the model; Lightning calls it once the processes are connected."""
        self.divide(self)

    def configure_optimizers(self) -> dict[str, Any]:
        """The optimizer and its scheduler, which advances once per optimizer step, that is once per global update."""
        optimizer = build_optimizer(self.model, self.recipe)
        scheduler = {"scheduler": build_scheduler(optimizer, self.recipe), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Mean cross-entropy of the micro-batch, with label smoothing."""
        inputs, labels = batch
        logits = self(inputs)
        loss = F.cross_entropy(logits, labels, label_smoothing=self.recipe.label_smoothing)
        self.train_metrics["loss"].update(loss.detach(), weight=len(labels))
        for name in ("top1", "top5"):
            self.train_metrics[name].update(logits.detach(), labels)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds one batch to the validation metrics."""
        self._evaluate(batch, self.val_loss, self.val_metrics)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds one batch to the test metrics."""
        self.test_confusion.update(*self._evaluate(batch, self.test_loss, self.test_metrics))

    def on_validation_epoch_end(self) -> None:
        """Logs the validation metrics, except those of Lightning's own trial run."""
        self._log_evaluation("val", self.val_loss, self.val_metrics)

    def on_test_epoch_end(self) -> None:
        """Logs the test metrics and keeps the confusion matrix."""
        self._sum_over_processes([self.test_confusion])
        self.confusion = self.test_confusion.compute().cpu()
        self.test_confusion.reset()
        self._log_evaluation("test", self.test_loss, self.test_metrics)

    def take_test_results(self) -> dict[str, float | int]:
        """Results of the test steps so far; resets their metrics. For passes that Lightning's `test` does not make."""
        images = int(self.test_confusion.compute().sum())
        computed = {"loss": self.test_loss.compute(), **self.test_metrics.compute()}
        for metric in (self.test_confusion, self.test_loss, self.test_metrics):
            metric.reset()
        return {"images": images, **{name: float(value) for name, value in computed.items()}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the recipe, so that a checkpoint can be tested by itself."""
        checkpoint["recipe"] = self.recipe.to_json()

    def _evaluate(self, batch: Batch, loss: MeanMetric, metrics: MetricCollection) -> Batch:
        inputs, labels = batch
        logits = self(inputs)
        num_samples = (labels != PADDING).sum()
        # Without smoothing, so that validation losses can be compared between recipes.
        total = F.cross_entropy(logits, labels, ignore_index=PADDING, reduction="sum")
        loss.update(total / num_samples.clamp(min=1), weight=num_samples)
        metrics.update(logits, labels)
        return logits, labels

    def _log_evaluation(self, part: str, loss: MeanMetric, metrics: MetricCollection) -> None:
        self._sum_over_processes([loss, *metrics.values()])
        computed = {"loss": loss.compute(), **metrics.compute()}
        values = {f"{part}/{name}": value.float() for name, value in computed.items()}
        loss.reset()
        metrics.reset()
        self.log_dict(values, logger=False)
        if not self.trainer.sanity_checking:
            # Lightning would log at the number of micro-batches; all our curves are over global steps.
            for logger in self.trainer.loggers:
                logger.log_metrics({tag: value.item() for tag, value in values.items()}, step=self.trainer.global_step)

    def _sum_over_processes(self, metrics: Iterable[Metric]) -> None:
        """Sums the metrics over all processes in one collective call: over a long line each call takes a round trip.

        The states of these metrics are sums of numbers that float64 represents exactly or nearly so.
        """
        if self.trainer.world_size == 1:
            return
        states = [(metric, name, state) for metric in metrics for name, state in metric.metric_state.items()]
        total = torch.cat([state.flatten().double() for _, _, state in states])
        dist.all_reduce(total)
        sums = total.split([state.numel() for _, _, state in states])
        for (metric, name, state), found in zip(states, sums, strict=True):
            setattr(metric, name, found.reshape(state.shape).to(state.dtype))


def _leave_whole(task: L.LightningModule) -> None:
    """Leaves all parameters on every process."""


def _running_metrics(num_classes: int) -> nn.ModuleDict:
    top5 = min(5, num_classes)
    return nn.ModuleDict(
        {
            # The default looks for NaN in every update, which makes a GPU wait.
            "loss": MeanMetric(nan_strategy="disable", **_OF_ONE_PROCESS),
            "top1": MulticlassAccuracy(num_classes, average="micro", validate_args=False, **_OF_ONE_PROCESS),
            "top5": MulticlassAccuracy(
                num_classes, average="micro", top_k=top5, validate_args=False, **_OF_ONE_PROCESS
            ),
        }
    )


def evaluation_metrics(num_classes: int) -> MetricCollection:
    """Metrics of logits (batch, num_classes) against labels (batch); `PADDING` is ignored; three are means over
    classes.

    They count this process's samples only.
    """
    return MetricCollection(
        {
            "top1": MulticlassAccuracy(num_classes, average="micro", **_OF_LABELS),
            "top5": MulticlassAccuracy(num_classes, average="micro", top_k=min(5, num_classes), **_OF_LABELS),
            "macro_f1": MulticlassF1Score(num_classes, average="macro", **_OF_LABELS),
            "precision": MulticlassPrecision(num_classes, average="macro", **_OF_LABELS),
            "recall": MulticlassRecall(num_classes, average="macro", **_OF_LABELS),
        }
    )
