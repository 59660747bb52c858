"""Measures how the training scales with the number of processes on this machine: one command, one table, one picture.

    python -m baseline_ddp.scaling                                       # digits in 1 and in 2 processes
    python -m baseline_ddp.scaling --processes 1 2 4 8 --recipe cifar10-vit-tiny --max-steps 200 --repetitions 3
    python -m baseline_ddp.scaling --scaling weak --lr-scaling linear    # the global batch grows with the processes

Each run is a subprocess with its own run folder; all results are computed from the files there.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from baseline_ddp.options import parse_options
from recipe.command_line import exit_status
from recipe.errors import InputError
from recipe.interrupts import status_of
from recipe.run_folder import RunFolder, read_metrics, write_json

ROOT = Path(__file__).resolve().parent.parent

WARMUP_STEPS = 2
"""Number of first updates of a run that do not count: memory is allocated and caches are cold."""


@dataclass(frozen=True)
class ScalingOptions:
    """Train the same recipe with different numbers of processes and compare."""

    processes: tuple[int, ...] = (1, 2)
    """Numbers of processes; the first is what the others are compared with."""
    recipe: str = "digits"
    """Preset, or a recipe.json."""
    scaling: Literal["strong", "weak"] = "strong"
    """strong: the recipe's batch divided among more processes; weak: a batch that grows with them."""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """Rule by which the learning rate grows with the batch."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """Strategy of runs with several processes."""
    batch_size: Annotated[int | None, tyro.conf.arg(metavar="SAMPLES")] = None
    """Micro-batch; the same in all runs."""
    max_steps: int = 40
    """Updates per run."""
    repetitions: int = 1
    """Runs for each number of processes."""
    data_dir: Path = Path("data")
    """Folder of the data set."""
    output_dir: Path = Path("runs")
    """Everything goes to OUTPUT_DIR/RUN_ID."""
    run_id: str | None = None
    """Name of the comparison; by default scaling and the time."""

    def check(self) -> None:
        """Raises InputError for values that cannot work."""
        if not self.processes or min(self.processes) < 1 or len(set(self.processes)) < len(self.processes):
            raise InputError("--processes takes different numbers of at least 1, such as --processes 1 2.")
        if self.max_steps <= WARMUP_STEPS:
            raise InputError(f"The first {WARMUP_STEPS} updates do not count: set --max-steps to more than that.")
        if self.repetitions < 1:
            raise InputError("At least one run each is needed: set --repetitions to 1 or more.")


@dataclass(frozen=True)
class ScalingRow:
    """The results for one number of processes. Throughput is in samples per second of training, without validation."""

    processes: int
    learning_rate: float
    global_batch: int
    steps_per_epoch: float
    throughput: float
    """Median over the repetitions."""
    throughput_range: tuple[float, float]
    epoch_seconds: float
    efficiency: float
    """Throughput over the number of processes times the first row's throughput per process."""
    communication_share: float
    """Part of the training time that communication took, without the warm-up."""
    best_val_loss: float | None
    """The best of all repetitions; None if all have diverged."""
    test_accuracy: float | None
    """Mean of the repetitions that have one."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the comparison; returns the exit status: 0, 2 for input that cannot work, 130 after Ctrl-C."""
    options = tyro.cli(ScalingOptions, args=arguments, prog="python -m baseline_ddp.scaling")

    def run() -> None:
        options.check()
        folder = compare(options)
        rows = [ScalingRow(**row) for row in json.loads((folder / "scaling.json").read_text())["rows"]]
        Console(soft_wrap=True).print(scaling_table(rows, options))
        print(f"Picture: {folder / 'scaling.png'}")

    return exit_status(run)


def compare(options: ScalingOptions) -> Path:
    """Makes all runs, and writes `scaling.json` and `scaling.png` to the returned folder.

    Raises:
        InputError: a run failed; its own message is printed above.
    """
    from baseline_ddp.measuring.pictures import draw_scaling

    run_id = options.run_id or f"scaling-{time.strftime('%Y%m%d-%H%M%S')}"
    folders = {count: [] for count in options.processes}
    for repetition in range(options.repetitions):
        # Forwards and backwards in turn, so that a drift of the machine's speed favours no number.
        for count in options.processes[:: -1 if repetition % 2 else 1]:
            name = f"{count}-processes-{repetition + 1}"
            print(f"{count} process(es), run {repetition + 1} of {options.repetitions} ...", flush=True)
            folders[count].append(_train(options, count, run_id, name))
    rows: list[ScalingRow] = []
    for count in options.processes:
        rows.append(summarise(count, folders[count], rows[0] if rows else None))
    folder = folders[options.processes[0]][0].path.parent
    environment = json.loads(folders[options.processes[0]][0].environment.read_text())
    write_json(folder / "scaling.json", {"rows": [asdict(row) for row in rows], "environment": environment})
    title = f"{options.recipe}, {options.scaling} scaling, n = {options.repetitions}\n{_machine(environment)}"
    draw_scaling(
        list(options.processes),
        [row.throughput for row in rows],
        [row.throughput_range for row in rows],
        folder / "scaling.png",
        title,
    )
    return folder


def summarise(processes: int, folders: list[RunFolder], first: ScalingRow | None) -> ScalingRow:
    """One row of the table from the run folders of all repetitions.

    Args:
        processes: number of processes of each run.
        folders: run folders of the finished runs.
        first: the row to compare with; None if this is the first row.
    """
    summaries = [json.loads(folder.summary.read_text()) for folder in folders]
    lines = [_counted_lines(folder) for folder in folders]
    rates = [statistics.median(line["perf/samples_per_second"] for line in of_run) for of_run in lines]
    rate, one = statistics.median(rates), summaries[0]
    base = first.throughput / first.processes if first else rate / processes
    accuracies = _known(summaries, "test_accuracy")
    return ScalingRow(
        processes=processes,
        learning_rate=one["learning_rate"],
        global_batch=one["global_batch"],
        steps_per_epoch=one["steps_per_epoch"],
        throughput=rate,
        throughput_range=(min(rates), max(rates)),
        epoch_seconds=one["steps_per_epoch"] * one["global_batch"] / rate,
        efficiency=rate / (processes * base),
        communication_share=statistics.mean(map(_communication_share, lines)),
        best_val_loss=min(_known(summaries, "best_val_loss"), default=None),
        test_accuracy=statistics.mean(accuracies) if accuracies else None,
    )


def scaling_table(rows: list[ScalingRow], options: ScalingOptions) -> Table:
    """A table of the rows, with one column for each number of processes."""
    title = f"{options.recipe}, {options.scaling} scaling, {options.max_steps} updates, n = {options.repetitions}"
    table = Table("processes", title=title, title_justify="left")
    for row in rows:
        table.add_column(str(row.processes), justify="right")
    lines: dict[str, Callable[[ScalingRow], str]] = {
        "learning rate": lambda row: f"{row.learning_rate:g}",
        "global batch (samples)": lambda row: f"{row.global_batch:,}",
        "steps per epoch": lambda row: f"{row.steps_per_epoch:.2f}",
        "training samples/s, median": lambda row: f"{row.throughput:,.0f}",
        "samples/s, smallest–largest": lambda row: "–".join(f"{rate:,.0f}" for rate in row.throughput_range),
        "epoch time (s)": lambda row: f"{row.epoch_seconds:.2f}",
        "efficiency": lambda row: f"{row.efficiency:.1%}",
        "time in communication": lambda row: f"{row.communication_share:.1%}",
        "best validation loss": lambda row: "-" if row.best_val_loss is None else f"{row.best_val_loss:.4f}",
        "test accuracy": lambda row: "-" if row.test_accuracy is None else f"{row.test_accuracy:.2%}",
    }
    for name, cell in lines.items():
        table.add_row(name, *[cell(row) for row in rows])
    return table


def _train(options: ScalingOptions, processes: int, run_id: str, name: str) -> RunFolder:
    arguments = {
        "--recipe": options.recipe,
        "--strategy": "single" if processes == 1 else options.strategy,
        "--max-steps": options.max_steps,
        "--data-dir": options.data_dir.absolute(),
        "--output-dir": options.output_dir.absolute(),
        "--run-id": run_id,
        "--name": name,
        "--lr-scaling": options.lr_scaling,
    }
    if options.batch_size is not None:
        arguments["--batch-size"] = options.batch_size
    if options.scaling == "weak":
        target = parse_options(["--recipe", options.recipe]).build_recipe().target_batch_size
        arguments["--target-batch-size"] = target * processes // options.processes[0]
    words = [str(word) for pair in arguments.items() for word in pair]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    script = str(ROOT / "baseline_ddp" / "train.py")
    # A single process must not use the cores of the others, or there would be nothing left to scale to.
    threads = max(1, (os.cpu_count() or 1) // max(options.processes))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, *torchrun, script, *words], env=environment, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise InputError(f"The run with {processes} process(es) failed: see its message above, and change the options.")
    return RunFolder(options.output_dir.absolute() / run_id / name)


def _counted_lines(folder: RunFolder) -> list[dict[str, Any]]:
    """The lines of the updates after the warm-up."""
    lines = read_metrics(folder.metrics)
    return [line for line in lines if "perf/samples_per_second" in line and line["step"] > WARMUP_STEPS]


def _communication_share(lines: list[dict[str, Any]]) -> float:
    parts = {part: sum(line[f"perf/{part}_seconds"] for line in lines) for part in ("data", "compute", "communication")}
    return parts["communication"] / sum(parts.values())


def _known(summaries: list[dict[str, Any]], name: str) -> list[float]:
    """The values of the runs that have one: a run that diverged has no losses and is not tested."""
    return [summary[name] for summary in summaries if summary[name] is not None]


def _machine(environment: dict[str, Any]) -> str:
    return ", ".join(environment["gpus"]) or f"{environment['cpu']}, {environment['cores']} cores"


if __name__ == "__main__":
    sys.exit(status_of(main))
