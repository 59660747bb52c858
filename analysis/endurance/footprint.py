"""Measures what a peer costs its computer beside the training: processor time and memory, against a plain process.

    python -m analysis footprint                                                  # two peers, five minutes
    python -m analysis footprint --peers 8 --target-batch-size 4096 --averaging local --codec fp16

The peers of a swarm and one plain training process run at the same time on this machine. All are paced to the same
device (`recipe.training.pacing`), so all compute the same. The excess of a peer is the price of the swarm. Memory that
the processes of a peer share counts once. So do the libraries that they have open, as if the peer were alone.
Measurements are windows of one run: their spread says nothing about another run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import tyro
from rich.console import Console
from rich.table import Table

from analysis.campaigns.measure import steps_done
from analysis.campaigns.peer_processes import has_ended, last_words, parts, started
from analysis.program import environment_from_outside, options_of_result
from recipe.command_line import arg, at_least, exit_status
from recipe.errors import InputError
from recipe.run_folder import make_writable, write_json
from recipe.training.pacing import VARIABLE

WARM_UP_STEPS = 2
START_SECONDS = 400.0
ALL, PLAIN, BESIDE = "all", "plain process", "beside the training"
COLUMNS = ("process", "cores", "MB")
FILES = "footprint-*.json"
_ROOT = Path(__file__).parents[2]
_NOTHING = np.zeros(2)
"""Processor time and megabytes of a kind of process that is not there."""


@dataclass(frozen=True)
class FootprintOptions:
    """Measure what a peer costs beside the training. Nearly any option of python -m swarm.peer can be given as well."""

    peers: int = 2
    """Number of peers in the swarm."""
    recipe: str = "synthetic"
    """Preset that all train."""
    target_batch_size: int = 1024
    """Samples per update of the swarm, and of the plain process."""
    samples_per_second: float = 40.0
    """Speed of each pretended device, in samples per second."""
    batch_size: int = 16
    """Micro-batch, in samples."""
    seconds: float = 60.0
    """How long each window of the run lasts."""
    repeat: int = 3
    """Number of windows, one after the other."""
    output_dir: Annotated[Path, arg("FOLDER")] = Path("runs/footprint")
    """Folder for the run folders and footprint-PEERS.json."""

    def check(self) -> None:
        """Raises InputError: a value cannot work."""
        at_least(self, 1, "peers", "target_batch_size", "batch_size", "repeat")
        if not (self.samples_per_second > 0 and self.seconds > 0):
            raise InputError("--samples-per-second and --seconds have to be more than 0.")


def measure(options: FootprintOptions, peer_options: Sequence[str], console: Console) -> dict[str, Any]:
    """Runs all peers and the plain process; returns the content of `footprint-PEERS.json`.

    Raises:
        InputError: a process ended before the end of the measurement.
    """
    run_id = f"footprint-{os.getpid()}"
    folders = [options.output_dir / run_id / name for name in (PLAIN.split()[0], *_names(options))]
    threads = str(max(1, (os.cpu_count() or 1) // options.peers))  # as swarm.local gives each peer
    variables = {VARIABLE: str(options.samples_per_second), "OMP_NUM_THREADS": threads}
    swarm_command, plain_command = _swarm_command(options, run_id, peer_options), _plain_command(options, run_id)
    with (
        started(swarm_command, options.output_dir / "swarm.log", variables) as swarm,
        started(plain_command, options.output_dir / "plain.log", variables) as plain,
    ):
        _until_warm(folders, {"swarm": swarm, "plain": plain}, options, console)
        measurements = [_measurement(number, options, plain, swarm, console) for number in range(options.repeat)]
    return {
        "options": options_of_result(asdict(options)),
        "peer_options": list(peer_options),
        "rows": [_row(kind, [one.get(kind, _NOTHING) for one in measurements]) for kind in _kinds(measurements)],
    }


def _names(options: FootprintOptions) -> list[str]:
    """Names that `swarm demo` gives to its peers."""
    return [f"peer-{number}" for number in range(1, options.peers + 1)]


def _common(options: FootprintOptions, run_id: str) -> list[str]:
    words = ["--recipe", options.recipe, "--target-batch-size", str(options.target_batch_size), "--device", "cpu"]
    words += ["--batch-size", str(options.batch_size), "--total-steps", "1000000", "--validate-every-steps", "1000000"]
    return [*words, "--run-id", run_id, "--output-dir", str(options.output_dir)]


def _plain_command(options: FootprintOptions, run_id: str) -> list[str]:
    script = [sys.executable, str(_ROOT / "baseline_ddp" / "train.py"), "--name", PLAIN.split()[0]]
    return [*script, *_common(options, run_id)]


def _swarm_command(options: FootprintOptions, run_id: str, peer_options: Sequence[str]) -> list[str]:
    words = [sys.executable, "-m", "swarm", "demo", "--peers", str(options.peers)]
    return [*words, *_common(options, run_id), *peer_options]


def _until_warm(
    folders: Sequence[Path], processes: dict[str, subprocess.Popen], options: FootprintOptions, console: Console
) -> None:
    """Waits until all have made some updates: caches are full then, and connections are made."""
    deadline = time.monotonic() + START_SECONDS
    while (steps := [steps_done(folder) for folder in folders]) and min(steps) < WARM_UP_STEPS:
        if console.is_terminal:
            console.print(f"warming up: updates {steps}", end="\r")
        for name, process in processes.items():
            if has_ended(process, 1.0):
                raise _ended_early(options.output_dir / f"{name}.log")
        if time.monotonic() > deadline:
            raise InputError(f"No {WARM_UP_STEPS} updates in {START_SECONDS:.0f} s: see {options.output_dir}.")


def _ended_early(log: Path) -> InputError:
    return InputError(f"{last_words(log).removeprefix('error: ')} (see {log})")


def _measurement(
    number: int, options: FootprintOptions, plain: subprocess.Popen, swarm: subprocess.Popen, console: Console
) -> dict[str, np.ndarray]:
    """One window: means over the peers for each process and their sum, the plain process, and the difference."""
    console.print(f"window {number + 1}/{options.repeat}, {options.seconds:.0f} s")
    try:
        peers = [child for child in psutil.Process(swarm.pid).children() if child.children()]
        whole = [psutil.Process(plain.pid), *peers]
        before, began = [_sizes(process) for process in whole], time.monotonic()
        if has_ended(plain, options.seconds):
            raise _ended_early(options.output_dir / "plain.log")
        after, seconds = [_sizes(process) for process in whole], time.monotonic() - began
    except psutil.NoSuchProcess as error:
        raise InputError(f"A process ended early ({error}): see the logs in {options.output_dir}.") from error
    if len(peers) != options.peers:
        raise InputError(f"{len(peers)} of {options.peers} peers were there: see {options.output_dir / 'swarm.log'}.")
    alone, *used = [_used(old, new, seconds) for old, new in zip(before, after, strict=True)]
    mean = {kind: np.mean([one.get(kind, _NOTHING) for one in used], axis=0) for kind in _kinds(used)}
    return mean | {PLAIN: alone[ALL], BESIDE: mean[ALL] - alone[ALL]}


def _kinds(measurements: Sequence[dict[str, np.ndarray]]) -> list[str]:
    """The kinds of processes in any of the measurements, such as a short-lived one of one peer; the sums come last."""
    kinds = dict.fromkeys(kind for one in measurements for kind in one)
    return sorted(kinds, key=lambda kind: kind in (ALL, PLAIN, BESIDE))


def _used(before: dict[str, np.ndarray], after: dict[str, np.ndarray], seconds: float) -> dict[str, np.ndarray]:
    """For each process, the cores that it kept busy between two results of `_sizes`, and megabytes at the end."""
    found = {}
    for part, (cpu_seconds, megabytes) in after.items():
        earlier_cpu_seconds, _ = before.get(part, _NOTHING)
        found[part] = np.array([(cpu_seconds - earlier_cpu_seconds) / seconds, megabytes])
    return found


def _sizes(peer: psutil.Process) -> dict[str, np.ndarray]:
    """For each process of a peer, and for all together: processor seconds so far, and megabytes."""
    found: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    counted: dict[str, int] = {}
    for part, process in parts(peer):
        times = process.cpu_times()
        found[part] = found[part] + (times.user + times.system, _new_bytes(process, counted) / 1e6)
    return {**found, ALL: sum(found.values(), np.zeros(2))}


def _new_bytes(process: psutil.Process, counted: dict[str, int]) -> int:
    """Bytes of a process that processes counted before it do not hold; updates `counted`.

    Of a mapped file, such as a library, only the excess over those in `counted` counts. Of the rest its share counts,
    since only processes of the same peer can share that.
    """
    held = 0
    for mapped in process.memory_maps(grouped=True):
        if mapped.path.startswith("/") and Path(mapped.path).is_file() and not mapped.path.startswith("/dev/shm/"):
            held += max(0, mapped.rss - counted.get(mapped.path, 0))
            counted[mapped.path] = max(mapped.rss, counted.get(mapped.path, 0))
        else:
            held += mapped.pss
    return held


def _row(name: str, values: Sequence[np.ndarray]) -> dict[str, Any]:
    """A row of the result: means of cores and MB over the windows, with the least and the greatest values."""
    row: dict[str, Any] = {"process": name, "windows": len(values)}
    for column, numbers in zip(("cores", "mb"), zip(*values, strict=True), strict=True):
        row |= {column: float(np.mean(numbers)), f"{column}_least": min(numbers), f"{column}_most": max(numbers)}
    return row


def table(found: dict[str, Any]) -> Table:
    """A table with a row for each process of a peer, for their sum, and for the plain process."""
    options = found["options"]
    title = f"A peer of {options['peers']}, paced to {options['samples_per_second']:g} samples/s; windows of one run"
    shown = Table(title=title, title_justify="left")
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column == COLUMNS[0] else "right")
    for row in found["rows"]:
        if row["process"] in (ALL, PLAIN):
            shown.add_section()
        shown.add_row(*cells(row))
    return shown


def cells(row: dict[str, Any]) -> tuple[str, str, str]:
    """The cells of a row of the table. Results of earlier versions do not have the range of the windows."""
    shown = []
    for name, digits in _DIGITS.items():
        least, most = row.get(f"{name}_least"), row.get(f"{name}_most")
        span = "" if least == most else f" ({least:.{digits}f} to {most:.{digits}f})"
        shown.append(f"{row[name]:.{digits}f}{span}")
    return row["process"], *shown


_DIGITS = {"cores": 3, "mb": 0}


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns the exit status: 0, 2 for input that cannot work, 130 after Ctrl-C."""
    prog = "python -m analysis footprint"
    options, rest = tyro.cli(FootprintOptions, args=arguments, prog=prog, description=__doc__, return_unknown_args=True)
    console = Console()

    def run() -> None:
        options.check()
        make_writable(options.output_dir)
        environment = environment_from_outside()
        found = measure(options, rest, console) | {"environment": environment}
        write_json(options.output_dir / FILES.replace("*", str(options.peers)), found)
        console.print(table(found))

    return exit_status(run)
