"""Measure what the swarm's machinery costs one peer: a plain Trainer and a swarm of one peer take turns.

    swarm bench
    swarm bench --pairs 60 --batch-size 32
    swarm bench --device cuda --model vit_base_patch16_224 --image-size 224 --precision bf16-mixed --batch-size 64

Both train the same recipe on the same samples, each in a process of its own. While one makes its updates, the other
waits. A machine whose speed drifts slows both alike, so the ratio of two neighbouring turns is what matters, not their
seconds. The swarm's other processes slow both turns, so the ratio does not show them: the last line of the table says
how many cores they take. OUTPUT_DIR/bench-TIME/bench.json holds every turn, the machine, the commit and the command.
"""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Literal

import lightning as L
import numpy as np
import torch
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scipy import stats

from recipe.command_line import arg, at_least, exit_status, read_options
from recipe.config import Recipe
from recipe.errors import InputError
from recipe.overrides import RecipeOverrides, apply_overrides
from recipe.presets import preset
from recipe.registry import build_data, build_task
from recipe.run_folder import RunFolder, make_writable, write_json
from recipe.training.compiler import check_compiler
from recipe.training.environment import describe_environment
from recipe.training.trainer import build_trainer
from swarm.cli.demo import wide_console
from swarm.network.dht_options import NetworkOptions, start_dht, stop_dht
from swarm.runtime.processes import descendants, die_with_parent
from swarm.training.averaging_mode import Averaging
from swarm.training.strategy import SwarmStrategy

WARM_UP_UPDATES = 3
PLAIN, SWARM = "plain Trainer", "one-peer swarm"


@dataclass(frozen=True)
class BenchOptions:
    """Measure what the swarm costs one peer: compare a plain Trainer with a swarm of one peer."""

    recipe: str = "synthetic"
    """Name of the preset that both train."""
    pairs: int = 40
    """Number of turns of each of the two."""
    updates: int = 2
    """Global updates per turn."""
    batch_size: int = 16
    """Samples per micro-batch."""
    micro_batches: int = 4
    """Micro-batches per global update."""
    threads: int = 1
    """Threads with which torch computes, in each of the two."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device on which both compute."""
    compile: bool = False
    """Compile the model with torch.compile in both."""
    output_dir: Annotated[Path, arg("FOLDER")] = Path("runs")
    """Folder for bench-TIME/bench.json, the result."""
    overrides: Annotated[RecipeOverrides, tyro.conf.arg(name="recipe"), tyro.conf.FlagConversionOff] = field(
        default_factory=RecipeOverrides
    )
    """Changes to the preset. The target batch size is always --batch-size times --micro-batches."""

    def check(self) -> None:
        """Raises InputError: a value cannot work."""
        at_least(self, 2, "pairs")
        at_least(self, 1, "updates", "batch_size", "micro_batches", "threads")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InputError("torch finds no GPU: leave --device cuda out, or install a driver.")
        if self.compile:
            check_compiler()
        self.trained()

    def trained(self) -> Recipe:
        """The recipe that both train.

        Raises:
            InputError: there is no such preset, or its fields cannot be these
        """
        recipe = apply_overrides(preset(self.recipe), self.overrides)
        return replace(recipe, target_batch_size=self.batch_size * self.micro_batches)


@dataclass
class Turns:
    """What was measured.

    Args:
        seconds: what each turn took, by contestant, shape [pairs]
        cores_beside: cores that the peer's other processes took, beside the one that trains
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: {PLAIN: [], SWARM: []})
    cores_beside: float = 0.0

    @property
    def ratios(self) -> np.ndarray:
        """Speed of the swarm over that of the plain Trainer, shape [pairs]."""
        return np.array(self.seconds[PLAIN]) / np.array(self.seconds[SWARM])

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the mean of the ratios: its two ends."""
        ratios = self.ratios
        low, high = stats.t.interval(0.95, len(ratios) - 1, loc=ratios.mean(), scale=stats.sem(ratios))
        return float(low), float(high)


class TakeTurns(L.Callback):
    """Lets a contestant train only in its turns, and sends the seconds that each turn took.

    Args:
        line: pipe to the process that measures
        options: of the benchmark
    """

    def __init__(self, line: Connection, options: BenchOptions) -> None:
        self._line, self._updates = line, options.updates
        self._ends_at, self._last = WARM_UP_UPDATES, WARM_UP_UPDATES + options.pairs * options.updates
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step != self._ends_at:
            return
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()  # what a GPU still has to do belongs to this turn
        self._line.send(time.perf_counter() - self._began)
        self._ends_at += self._updates
        if self._ends_at <= self._last:
            self._line.recv()
            self._began = time.perf_counter()


def contest(contestant: str, options: BenchOptions, folder: Path, line: Connection) -> None:
    """Train in this process, turn by turn. An `InputError` is sent in place of a turn's seconds.

    Args:
        contestant: `PLAIN` or `SWARM`
        folder: for run folders
        line: pipe to the process that measures
    """
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that measures gets Ctrl-C as well, and closes the line
    torch.set_num_threads(options.threads)
    dht = None
    try:
        if contestant == SWARM:
            dht = start_dht(NetworkOptions(host_maddrs=("/ip4/127.0.0.1/tcp/0",)))
        train(options, folder / contestant, TakeTurns(line, options), dht)
    except (EOFError, ConnectionError):
        pass  # the process that measures has closed the line
    except InputError as error:
        with suppress(ConnectionError):
            line.send(error)
    finally:
        if dht is not None:
            stop_dht(dht)


def train(options: BenchOptions, folder: Path, turns: TakeTurns, dht) -> None:
    """Make all updates, as a swarm of one peer.

    Args:
        dht: of this peer; None: train with a plain Trainer, which accumulates the gradients of the micro-batches
    """
    recipe = options.trained()
    trainer = build_trainer(
        recipe,
        RunFolder.create(folder, "bench", "peer"),
        accelerator=options.device,
        strategy="auto" if dht is None else _strategy(recipe, dht),
        callbacks=[turns],
        max_steps=WARM_UP_UPDATES + options.pairs * options.updates,
        accumulate_grad_batches=options.micro_batches if dht is None else 1,
    )
    trainer.limit_val_batches = 0
    task = build_task(recipe)
    if options.compile:
        task.compile_model(torch.device(options.device))
    trainer.fit(task, build_data(recipe, batch_size=options.batch_size, identity="bench"))


def _strategy(recipe: Recipe, dht) -> SwarmStrategy:
    return SwarmStrategy(recipe.target_batch_size, "bench", dht=dht, averaging=Averaging.of(recipe))


@contextmanager
def contestants(options: BenchOptions) -> Iterator[dict[str, tuple[int, Connection]]]:
    """Process id and pipe of each contestant, until the block ends. A contestant's first message says it is ready."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes, found = [], {}
        try:
            for contestant in (PLAIN, SWARM):
                ours, theirs = spawn.Pipe()
                process = spawn.Process(target=contest, args=(contestant, options, Path(folder), theirs))
                process.start()
                theirs.close()
                processes.append(process)
                found[contestant] = process.pid, ours
            yield found
        finally:
            for _, line in found.values():
                line.close()
            for process in processes:
                process.join(20)
                process.kill()
                process.join()


def compare(options: BenchOptions) -> Turns:
    """Let both contestants train in turns; the order within a pair alternates.

    Raises:
        InputError: a value cannot work, or a contestant died
    """
    options.check()
    turns = Turns()
    with contestants(options) as found, Progress(transient=True, console=Console(stderr=True)) as progress:
        for contestant in found:
            _answer(found, contestant)
        swarm_pid = found[SWARM][0]
        began, cpu_seconds = time.perf_counter(), cpu_seconds_beside(swarm_pid)
        for pair in progress.track(range(options.pairs), description="measuring"):
            for contestant in (PLAIN, SWARM) if pair % 2 == 0 else (SWARM, PLAIN):
                if pair == options.pairs - 1 and contestant == SWARM:  # its last turn: after it the peer leaves
                    used = cpu_seconds_beside(swarm_pid) - cpu_seconds
                    turns.cores_beside = used / (time.perf_counter() - began)
                found[contestant][1].send("go")
                turns.seconds[contestant].append(_answer(found, contestant))
    return turns


def _answer(found: dict[str, tuple[int, Connection]], contestant: str) -> float:
    try:
        answer = found[contestant][1].recv()
    except (EOFError, ConnectionError):
        raise InputError(f"The {contestant} ended early: is there enough memory? Its output is above.") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def cpu_seconds_beside(pid: int) -> float:
    """Seconds of computing that all descendants of a process have used, together.

    Args:
        pid: of that process, which is not counted itself
    """
    return sum(times.user + times.system for times in (process.cpu_times() for process in descendants(pid)))


def result_table(turns: Turns, options: BenchOptions) -> Table:
    """A table of the result.

    It has seconds per update of both, the ratios with the 95 % interval of their mean, and the cores of the swarm's
    other processes.
    """
    ratios, (low, high) = turns.ratios, turns.interval
    micro_batch_ms = 1000 * np.median(turns.seconds[PLAIN]) / (options.updates * options.micro_batches)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    title = (
        f"{options.recipe}, micro-batch {options.batch_size} ({micro_batch_ms:.0f} ms), {options.threads} thread(s), "
        f"{device}, {len(ratios)} turns of {options.updates} update(s) each"
    )
    table = Table(title=title, title_justify="left")
    table.add_column()
    table.add_column("median", justify="right")
    table.add_column("range", justify="right")
    for contestant, seconds in turns.seconds.items():
        each = np.array(seconds) / options.updates
        table.add_row(f"{contestant}, s per update", f"{np.median(each):.3f}", f"{each.min():.3f}–{each.max():.3f}")
    table.add_section()
    table.add_row("speed, ratio of neighbours", f"{np.median(ratios):.3f}", f"{ratios.min():.3f}–{ratios.max():.3f}")
    table.add_row("mean, 95 % interval", f"{ratios.mean():.3f}", f"{low:.3f}–{high:.3f}")
    table.add_section()
    table.add_row("cores of the swarm's other processes", f"{turns.cores_beside:.3f}", "")
    return table


def content(turns: Turns, options: BenchOptions, environment: dict[str, Any]) -> dict[str, Any]:
    """The content of `bench.json`: `seconds` has each turn, and `interval` is that of the mean of the `ratios`.

    Args:
        environment: what `describe_environment` returns
    """
    own = {name: value for name, value in asdict(options).items() if name not in ("recipe", "overrides", "output_dir")}
    found = {"seconds": turns.seconds, "ratios": turns.ratios.tolist(), "mean_ratio": float(turns.ratios.mean())}
    found |= {"interval": turns.interval, "cores_beside": turns.cores_beside}
    return {"options": own, "recipe": asdict(options.trained()), **found, "environment": environment}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, 2 for bad input, 130 after Ctrl-C."""
    options = read_options(BenchOptions, arguments, "swarm bench", description=__doc__)

    def run() -> int:
        output_dir = options.output_dir.expanduser()
        make_writable(output_dir)
        environment = describe_environment()
        turns = compare(options)
        folder = output_dir / f"bench-{time.strftime('%Y%m%d-%H%M%S')}"
        folder.mkdir()
        write_json(folder / "bench.json", content(turns, options, environment))
        wide_console().print(result_table(turns, options))
        print(f"Result: {folder / 'bench.json'}")
        return 0

    return exit_status(run, "Interrupted: nothing was measured to its end.")
