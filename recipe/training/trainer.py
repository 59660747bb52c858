"""Builds the Lightning Trainer for a recipe, for the swarm and for the baseline."""

import logging
import re
import warnings
from collections.abc import Iterable
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger

from recipe.config import Recipe
from recipe.errors import InputError
from recipe.run_folder import RunFolder
from recipe.training.callbacks import PacedCompute, StepMetrics, StopAtAccuracy, ValidateEverySteps
from recipe.training.heap import keep_heap
from recipe.training.loggers import JsonlLogger, PatientTensorBoardLogger
from recipe.training.pacing import paced_samples_per_second

_QUIET_LINES = re.compile(r"[GTH]PU available|💡|`Trainer.fit` stopped|LOCAL_RANK|Using bfloat16|Tensor Cores")
_QUIET_WARNINGS = (
    ".*does not have many workers.*",  # small images are in memory
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",  # Lightning's own use of torch
)


def build_trainer(
    recipe: Recipe,
    folder: RunFolder,
    *,
    callbacks: Iterable[L.Callback] = (),
    max_steps: int | None = None,
    target_accuracy: float | None = None,
    loggers: Iterable[Logger] | None = None,
    step_metrics: StepMetrics | None = None,
    **lightning: Any,
) -> L.Trainer:
    """A trainer that logs to the run folder and counts, validates and stops in global updates.

    Args:
        recipe: gives precision, clipping, validation interval and length of the training.
        folder: run folder for TensorBoard files and `metrics.jsonl`.
        callbacks: further callbacks; checkpoints are written only if one of these does it.
        max_steps: global updates after which to stop; None for the recipe's `total_steps`.
        target_accuracy: `val/top1` from 0 to 1 at which to stop; None for no such limit.
        loggers: loggers beside `metrics.jsonl`; None for TensorBoard in the run folder.
        step_metrics: the callback that logs each update; None for one with the standard metrics.
        lightning: further arguments of Lightning's Trainer, such as `strategy`, `devices` or `plugins`. One that is not
            None takes precedence over the recipe. Strategies that accumulate by themselves leave
            `accumulate_grad_batches` out.

    Raises:
        InputError: a limit is out of range.
    """
    _silence_lightning()
    keep_heap()
    stop = [] if target_accuracy is None else [StopAtAccuracy(_checked_accuracy(target_accuracy))]
    rate = paced_samples_per_second()
    paced = [] if rate is None else [PacedCompute(rate)]
    log = step_metrics or StepMetrics()
    validate = ValidateEverySteps(recipe.validate_every_steps)  # first: the log asks whether a validation comes now
    callbacks = [validate, log, *paced, *stop, *callbacks]
    usual = {
        "devices": 1,
        "precision": recipe.precision,
        "gradient_clip_val": recipe.clip_norm,
        "max_epochs": -1,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,  # every process already has its own order
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder.path,
    }
    return L.Trainer(
        **usual | {name: value for name, value in lightning.items() if value is not None},
        logger=[*([tensorboard_logger(folder)] if loggers is None else loggers), JsonlLogger(folder.metrics)],
        callbacks=callbacks,
        max_steps=recipe.total_steps if max_steps is None else _checked_steps(max_steps),
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
    )


def tensorboard_logger(folder: RunFolder, resumed_step: int | None = None) -> PatientTensorBoardLogger:
    """Lightning's TensorBoard logger for the run folder.

    Args:
        folder: the run folder.
        resumed_step: the step from which the run resumes; lines of later steps are not shown. None for a new run.
    """
    again = {} if resumed_step is None else {"purge_step": resumed_step + 1}
    return PatientTensorBoardLogger(folder.tensorboard, name="", version="", default_hp_metric=False, **again)


def _checked_steps(max_steps: int) -> int:
    if max_steps < 1:
        raise InputError(f"{max_steps} steps are no training: set --max-steps to 1 or more.")
    return max_steps


def _checked_accuracy(target: float) -> float:
    if not 0.0 < target <= 1.0:
        raise InputError(f"The accuracy {target} cannot be reached: set --target-accuracy between 0 and 1.")
    return target


def _silence_lightning() -> None:
    """Hides messages of Lightning that come in every run and need no action; all others stay."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.accelerators.cuda"):
        logger = logging.getLogger(name)
        if _is_worth_reading not in logger.filters:
            logger.addFilter(_is_worth_reading)
    for message in _QUIET_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


def _is_worth_reading(record: logging.LogRecord) -> bool:
    return not _QUIET_LINES.search(record.getMessage())
