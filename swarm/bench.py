"""What the swarm's machinery costs one peer: plain Trainer and one-peer swarm, side by side, interleaved.

    python -m swarm.bench
    python -m swarm.bench --rounds 5 --steps 6 --batch-size 16

Both train the same recipe on the same samples; the ratio of their samples per second is what matters, the absolute
figures depend on the machine and on what else it does.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import lightning as L
import torch
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from recipe.config import Recipe
from recipe.data import VisionData
from recipe.errors import InputError
from recipe.presets import preset
from recipe.run_folder import RunFolder
from recipe.task import VisionTask
from recipe.trainer import build_trainer
from swarm.network import NetworkOptions, start_dht, stop_dht
from swarm.strategy import SwarmStrategy


@dataclass(frozen=True)
class BenchOptions:
    """Compare a plain Trainer with a one-peer swarm."""

    recipe: str = "synthetic"
    """Preset to train."""
    rounds: int = 5
    """Repetitions of each, interleaved."""
    steps: int = 5
    """Global updates per repetition; the first is not counted."""
    batch_size: int = 16
    """Micro-batch, in samples."""
    micro_batches: int = 4
    """Micro-batches per global update."""
    threads: int = 1
    """Threads of torch."""


class Clock(L.Callback):
    """Counts training samples and seconds after the first global update."""

    def __init__(self) -> None:
        self.samples, self.began, self.seconds = 0, None, 0.0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if self.began is not None:
            self.samples += len(batch[1])
            self.seconds = time.perf_counter() - self.began
        elif trainer.global_step == 1:
            self.began = time.perf_counter()

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds


def measure(recipe: Recipe, options: BenchOptions, folder: Path, strategy) -> Clock:
    """Train ``options.steps`` updates with a strategy; ``"auto"`` is a plain Trainer that accumulates."""
    clock = Clock()
    trainer = build_trainer(
        recipe,
        RunFolder.create(folder, "bench", "swarm" if strategy != "auto" else "plain"),
        accelerator="cpu",
        strategy=strategy,
        callbacks=[clock],
        max_steps=options.steps,
        accumulate_grad_batches=options.micro_batches if strategy == "auto" else 1,
    )
    trainer.limit_val_batches = 0
    trainer.fit(VisionTask(recipe), VisionData(recipe, batch_size=options.batch_size, identity="bench"))
    return clock


def compare(options: BenchOptions) -> list[tuple[Clock, Clock]]:
    """(plain, swarm) of each repetition; the order within a repetition alternates."""
    target = options.batch_size * options.micro_batches
    recipe = replace(preset(options.recipe), target_batch_size=target)
    results = []
    with tempfile.TemporaryDirectory() as folder, Progress(transient=True) as progress:
        for repetition in progress.track(range(options.rounds), description="measuring"):
            dht = start_dht(NetworkOptions(host_maddrs=("/ip4/127.0.0.1/tcp/0",)))
            try:
                swarm = SwarmStrategy(target, f"bench-{repetition}", dht=dht)
                pair = {}
                for strategy in ("auto", swarm) if repetition % 2 == 0 else (swarm, "auto"):
                    pair[strategy == "auto"] = measure(recipe, options, Path(folder), strategy)
                results.append((pair[True], pair[False]))
            finally:
                stop_dht(dht)
    return results


def result_table(results: list[tuple[Clock, Clock]], options: BenchOptions) -> Table:
    """Samples per second and their ratio, for each repetition and on average."""
    plain_ms = statistics.median(1000 * options.batch_size / plain.samples_per_second for plain, _ in results)
    ratios = [swarm.samples_per_second / plain.samples_per_second for plain, swarm in results]
    title = f"{options.recipe}, micro-batch {options.batch_size} ({plain_ms:.0f} ms), {options.threads} thread(s), CPU"
    table = Table(title=title, title_justify="left")
    for column in ("repetition", "plain Trainer, samples/s", "one-peer swarm, samples/s", "ratio"):
        table.add_column(column, justify="right")
    for number, ((plain, swarm), ratio) in enumerate(zip(results, ratios, strict=True), 1):
        table.add_row(str(number), f"{plain.samples_per_second:.1f}", f"{swarm.samples_per_second:.1f}", f"{ratio:.3f}")
    spread = f"{min(ratios):.3f}–{max(ratios):.3f}"
    table.add_section()
    table.add_row(f"n = {len(ratios)}", "", f"median (range {spread})", f"{statistics.median(ratios):.3f}")
    return table


def main() -> int:
    options = tyro.cli(BenchOptions, prog="python -m swarm.bench")
    torch.set_num_threads(options.threads)
    try:
        results = compare(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Console(width=None if sys.stdout.isatty() else 110).print(result_table(results, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
