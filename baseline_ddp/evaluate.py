"""Measures a checkpoint of the baseline or of a swarm on the official test split."""

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from rich.console import Console
from rich.table import Table

from baseline_ddp.batching import DEFAULT_MICRO_BATCH
from baseline_ddp.measuring.pictures import draw_confusion
from baseline_ddp.options import BaselineOptions
from baseline_ddp.processes import Processes
from recipe.errors import InputError
from recipe.registry import build_data, build_task
from recipe.run_folder import make_writable, write_json
from recipe.training.checkpoint_io import checkpoint_recipe, load_weights, read_checkpoint


@dataclass(frozen=True)
class TestResult:
    """Results on the whole test split, each sample counted once; fractions are from 0 to 1.

    `macro_f1`, `precision` and `recall` are means over classes.
    """

    __test__ = False  # else pytest takes the class for a test

    checkpoint: str
    """File name of the checkpoint."""
    step: int
    """Global updates that the checkpoint had seen."""
    samples: int
    """Size of the test split."""
    loss: float
    """Mean cross-entropy, without label smoothing."""
    top1: float
    """Share of right first guesses."""
    top5: float
    """Share of right answers among the first five guesses."""
    macro_f1: float
    precision: float
    recall: float
    per_class_accuracy: list[float | None]
    """Share of each class's samples that were recognised; None for a class without any."""
    confusion: list[list[int]]
    """Number of samples by true class (rows) and guessed class (columns)."""

    def write(self, numbers: Path, picture: Path) -> None:
        """Writes JSON and the confusion matrix as PNG."""
        write_json(numbers, asdict(self))
        draw_confusion(self.confusion, picture)


def evaluate(checkpoint: Path, data_dir: Path, batch_size: int, device: torch.device) -> TestResult:
    """Measures a Lightning checkpoint of a `ClassificationTask`; needs no process group.

    Args:
        checkpoint: a file that contains its recipe, or lies in a run folder.
        data_dir: folder of the data set.
        batch_size: samples at once.
        device: where to compute.

    Raises:
        InputError: the checkpoint or the data cannot be used.
    """
    content = read_checkpoint(checkpoint)
    recipe = checkpoint_recipe(content, checkpoint)
    task = build_task(replace(recipe, pretrained=False))  # no download of weights that are replaced at once
    load_weights(task, content, checkpoint)
    data = build_data(recipe, data_dir, batch_size)
    data.prepare_data()
    data.setup("test")
    data.test_dataloader()  # raises InputError if there is no test part
    tester = _tester(recipe.precision, device)
    tester.test(task, data, verbose=False)
    return _result(checkpoint.name, content["global_step"], tester.callback_metrics, task.confusion)


def _tester(precision: str, device: torch.device) -> L.Trainer:
    return L.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=[device.index or 0] if device.type == "cuda" else 1,
        precision=precision,
        plugins=[LightningEnvironment()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _result(name: str, step: int, metrics: dict[str, Any], confusion: torch.Tensor) -> TestResult:
    per_class = [
        (row[index] / row.sum()).item() if row.sum() > 0 else None for index, row in enumerate(confusion.double())
    ]
    return TestResult(
        checkpoint=name,
        step=step,
        samples=int(confusion.sum()),
        **{tag.removeprefix("test/"): float(value) for tag, value in metrics.items()},
        per_class_accuracy=per_class,
        confusion=confusion.tolist(),
    )


def result_table(result: TestResult) -> Table:
    """A table of the results."""
    title = f"{result.checkpoint}, step {result.step}: official test split, {result.samples:,} samples"
    table = Table(title=title, title_justify="left")
    for column in ("top-1", "top-5", "macro F1", "precision", "recall", "loss"):
        table.add_column(column, justify="right")
    shares = (result.top1, result.top5, result.macro_f1, result.precision, result.recall)
    table.add_row(*(f"{share:.2%}" for share in shares), f"{result.loss:.4f}")
    return table


def test_checkpoint(options: BaselineOptions) -> int:
    """Runs `--test CHECKPOINT`: prints the table, and writes numbers and picture beside the checkpoint.

    Raises:
        InputError: the checkpoint or the data cannot be used, or its folder cannot be written.
    """
    processes = Processes.from_environment()
    if processes.size > 1:
        raise InputError("One process tests a checkpoint: leave out torchrun.")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    size = options.compute.batch_size if isinstance(options.compute.batch_size, int) else DEFAULT_MICRO_BATCH
    path = options.test.expanduser()
    result = evaluate(path, options.files.data_dir, size, processes.device(options.compute.device))
    make_writable(path.parent)
    numbers, picture = path.with_suffix(".test.json"), path.with_suffix(".confusion.png")
    result.write(numbers, picture)
    Console(soft_wrap=True).print(result_table(result))
    print(f"Per class: {', '.join(_percent(share) for share in result.per_class_accuracy[:20])}")
    print(f"All numbers: {numbers}\nConfusion matrix: {picture}")
    return 0


test_checkpoint.__test__ = False


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
