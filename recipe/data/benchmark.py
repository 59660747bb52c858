"""Tells whether the disk is the limit: samples and MB per second of the loader alone, against what training needs.

    python -m recipe.data.benchmark --recipe digits
    python -m recipe.data.benchmark --recipe imagefolder-vit-small --data-dir /data/imagenet --num-workers 8

The loader's batches are discarded. The training computes one batch, already on its device, again and again.
"""

import math
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from recipe.command_line import exit_status
from recipe.config import Recipe
from recipe.errors import InputError
from recipe.interrupts import status_of
from recipe.overrides import RecipeOverrides, apply_overrides
from recipe.presets import PRESETS, preset

if TYPE_CHECKING:
    import torch

    from recipe.data.peer_data import PeerData

MEGABYTE = 1e6
WARMUP_BATCHES = 2
FILES_TO_WEIGH = 500


@dataclass(frozen=True)
class DataBenchmarkOptions:
    """Measure the speeds of the loader and of the training separately."""

    recipe: Annotated[str, tyro.conf.arg(help=f"Preset: {', '.join(PRESETS)}.")] = "digits"
    data_dir: Path = Path("data")
    """Folder of the data set (not needed for digits)."""
    batch_size: int = 32
    """Micro-batch, in samples."""
    num_workers: int = 0
    """Processes that load images; data sets in memory use none."""
    seconds: float = 10.0
    """How long to measure each."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the training computes."""
    overrides: Annotated[RecipeOverrides, tyro.conf.arg(name="recipe"), tyro.conf.FlagConversionOff] = field(
        default_factory=RecipeOverrides
    )
    """Changes to the recipe."""


@dataclass(frozen=True)
class DataRates:
    """The measured rates per second; MB are 10^6 bytes."""

    loader_samples: float
    """Samples that the loader delivers while nothing is computed."""
    training_samples: float
    """Samples that forward, backward and update process while nothing is loaded."""
    tensor_megabytes: float
    """MB of tensors that the loader delivers to the model."""
    file_megabytes: float | None
    """MB of image files that the loader reads; None if all images are in memory."""

    @property
    def headroom(self) -> float:
        """Speed of the loader over that of the training: below 1, the training has to wait for data."""
        return self.loader_samples / self.training_samples


def measure(recipe: Recipe, options: DataBenchmarkOptions) -> DataRates:
    """Measures both rates on this machine.

    Raises:
        InputError: the data or the device cannot be used.
    """
    import torch

    from recipe.registry import build_data

    wanted, has_gpu = options.device, torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise InputError("There is no CUDA device that torch can use: give --device cpu.")
    device = torch.device("cuda" if has_gpu and wanted != "cpu" else "cpu")
    data = build_data(recipe, options.data_dir, options.batch_size, num_workers=options.num_workers)
    data.prepare_data()
    data.setup("fit")
    loaded, batch = _loader_rate(data, options.seconds)
    sample_bytes = batch[0][0].numel() * batch[0].element_size()
    file_bytes = _mean_file_bytes(data)
    return DataRates(
        loader_samples=loaded,
        training_samples=_training_rate(recipe, batch, device, options.seconds),
        tensor_megabytes=loaded * sample_bytes / MEGABYTE,
        file_megabytes=None if file_bytes is None else loaded * file_bytes / MEGABYTE,
    )


def _loader_rate(data: "PeerData", seconds: float) -> tuple[float, "tuple[torch.Tensor, torch.Tensor]"]:
    """Samples per second of the loader, and a batch; the first batches pay for starting the workers."""
    batches = iter(data.train_dataloader())
    for _ in range(WARMUP_BATCHES):
        batch = next(batches)
    samples, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds:
        batch = next(batches)
        samples += len(batch[1])
    return samples / elapsed, batch


def _training_rate(
    recipe: Recipe, batch: "tuple[torch.Tensor, torch.Tensor]", device: "torch.device", seconds: float
) -> float:
    import torch
    from torch.nn import functional as F

    from recipe.model import build_model
    from recipe.optimizer import build_optimizer

    model = build_model(recipe).to(device)
    optimizer = build_optimizer(model, recipe)
    inputs, labels = (part.to(device) for part in batch)

    def update() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16-mixed"):
            loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for a GPU

    for _ in range(WARMUP_BATCHES):
        update()
    updates, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds:
        update()
        updates += 1
    return updates * len(labels) / elapsed


def _mean_file_bytes(data: "PeerData") -> float | None:
    """Mean size of a sample of the training images' files, evenly spread; None if there are no files."""
    paths = [path for path, _ in getattr(data.splits.train, "samples", [])]
    chosen = paths[:: max(1, len(paths) // FILES_TO_WEIGH)]
    return sum(os.path.getsize(path) for path in chosen) / len(chosen) if chosen else None


def rates_table(rates: DataRates, title: str) -> Table:
    """A table of the rates."""
    table = Table(title=title, title_justify="left")
    for column in ("", "samples/s", "MB/s of tensors", "MB/s of files"):
        table.add_column(column, justify="right")
    files = rates.file_megabytes
    table.add_row(
        "loader alone",
        f"{rates.loader_samples:,.0f}",
        f"{rates.tensor_megabytes:,.1f}",
        "in memory" if files is None else f"{files:,.1f}",
    )
    table.add_row(
        "training's demand",
        f"{rates.training_samples:,.0f}",
        f"{rates.tensor_megabytes / rates.headroom:,.1f}",
        "in memory" if files is None else f"{files / rates.headroom:,.1f}",
    )
    return table


def verdict(rates: DataRates) -> str:
    """A sentence that says whether the training will wait for data, and what to do then."""
    if rates.headroom >= 1.0:
        return f"The loader is {rates.headroom:.1f} times as fast as the training: the data are not the limit."
    return (
        f"The loader reaches {rates.headroom:.0%} of what the training takes: raise --num-workers, or put the images "
        "on a faster disk."
    )


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints; returns the exit status."""
    options = tyro.cli(
        DataBenchmarkOptions,
        args=arguments,
        prog="python -m recipe.data.benchmark",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone),
    )
    return exit_status(lambda: _measure_and_print(options))


def _measure_and_print(options: DataBenchmarkOptions) -> None:
    recipe = apply_overrides(preset(options.recipe), options.overrides)
    if not 0 < options.seconds < math.inf:
        raise InputError("There is no time to measure in: set --seconds to more than 0.")
    rates = measure(recipe, options)
    title = f"{recipe.name}: {recipe.model} on {recipe.dataset}, micro-batch {options.batch_size}"
    Console(soft_wrap=True).print(rates_table(rates, title))
    print(verdict(rates))


if __name__ == "__main__":
    sys.exit(status_of(main))
