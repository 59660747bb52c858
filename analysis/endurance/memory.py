"""Measures whether a peer's memory grows: two peers train for thousands of rounds, with a record of their memory.

    python -m analysis memory --rounds 2000     # five minutes; OUTPUT_DIR/memory.json

Memory is the proportional set size: a shared page counts once over all processes that share it. A line through the
second half of the rounds tells growth from noise, because caches and the allocator's arenas fill in the first half. The
processes of a peer are forked from one process. A page that they share becomes two when one of them writes to it: then
this size grows, although no process does. So the growth of the resident sets, which count a shared page in each
process, is shown beside it.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import tyro
from rich.console import Console
from rich.table import Table

from analysis.campaigns.peer_processes import has_ended, parts, started
from analysis.program import environment_from_outside
from recipe.command_line import arg, at_least, exit_status
from recipe.errors import InputError
from recipe.run_folder import RunFolder, make_writable, write_json
from recipe.training.pacing import VARIABLE

PERIOD_SECONDS = 1.0
NAMES = ("peer-1", "peer-2")
"""Names that `swarm demo` gives to its peers."""
ALL = "all"
COLUMNS = ("peer", "process", "MB", "growth, MB over 1,000 rounds", "noise, MB", "growth of the resident sets, MB")
RECIPE = ["--depth", "1", "--embed-dim", "32", "--num-heads", "2", "--validate-every-steps", "500"]
"""Options for digits on a model so small that most memory is that of the machinery around it."""


@dataclass(frozen=True)
class MemoryOptions:
    """Measure the memory of two peers over many rounds."""

    rounds: int = 2000
    """Number of rounds."""
    output_dir: Annotated[Path, arg("FOLDER")] = Path("runs/memory")
    """Folder for the run folders and memory.json."""

    def check(self) -> None:
        """Raises InputError: a value cannot work."""
        at_least(self, 50, "rounds")


def measure(options: MemoryOptions, console: Console) -> dict[str, Any]:
    """Runs the swarm; returns the content of `memory.json`.

    Raises:
        InputError: the peers ended before they had made all rounds.
    """
    run_id = f"memory-{os.getpid()}"
    command = [sys.executable, "-m", "swarm", "demo", "--peers", str(len(NAMES)), "--run-id", run_id, *RECIPE]
    command += ["--output-dir", str(options.output_dir), "--total-steps", str(options.rounds), "--device", "cpu"]
    variables = {VARIABLE: "4000", "OMP_NUM_THREADS": "1"}
    samples: list[dict[str, Any]] = []
    log = options.output_dir / "memory.log"
    with started(command, log, variables) as swarm:
        while not has_ended(swarm, PERIOD_SECONDS):
            sample = _sample(swarm.pid, options.output_dir / run_id)
            if sample is not None and (not samples or sample["step"] > samples[-1]["step"]):
                samples.append(sample)
                if console.is_terminal:
                    console.print(f"round {sample['step']}/{options.rounds}", end="\r")
    if swarm.returncode != 0 or len(samples) < 4:
        raise InputError(f"The swarm ended early: see {log}.")
    rows = [trend(samples, peer, part) for peer in NAMES for part in (*samples[-1]["pss_mb"][peer], ALL)]
    return {"rounds": options.rounds, "samples": samples, "rows": rows}


def _sample(pid: int, runs: Path) -> dict[str, Any] | None:
    """The round, and megabytes of each peer's processes; None while not all peers train."""
    try:
        status = json.loads(RunFolder(runs / NAMES[0]).status.read_text())
        peers = [child for child in psutil.Process(pid).children() if child.children()]
        if not status["step"] or status["ended"] or len(peers) != len(NAMES):
            return None
        peers.sort(key=lambda process: process.create_time())
        pss, rss = zip(*map(_sizes, peers), strict=True)
    except (OSError, ValueError, psutil.NoSuchProcess):  # a peer is starting or ending
        return None
    return {"step": status["step"]} | {
        kind: dict(zip(NAMES, sizes, strict=True)) for kind, sizes in (("pss_mb", pss), ("rss_mb", rss))
    }


def _sizes(peer: psutil.Process) -> tuple[dict[str, float], dict[str, float]]:
    """Megabytes of a peer's processes: proportional and resident set sizes."""
    pss: dict[str, float] = defaultdict(float)
    rss: dict[str, float] = defaultdict(float)
    for part, process in parts(peer):
        memory = process.memory_full_info()
        pss[part] += memory.pss / 1e6
        rss[part] += memory.rss / 1e6
    return pss, rss


def trend(samples: Sequence[dict[str, Any]], peer: str, part: str = ALL) -> dict[str, Any]:
    """The growth of memory of a peer's process, or of all its processes, over the second half of the rounds.

    Returns:
        `mb`, the mean; `growth_mb` over 1,000 rounds; `noise_mb`, the deviation from that line; and
        `resident_growth_mb`, the growth of the resident sets.
    """
    middle, growth, noise = _line(samples, "pss_mb", peer, part)
    resident = _line(samples, "rss_mb", peer, part)[1]
    sizes = {"mb": middle, "growth_mb": growth, "noise_mb": noise, "resident_growth_mb": resident}
    return {"peer": peer, "process": part, **sizes}


def _line(samples: Sequence[dict[str, Any]], kind: str, peer: str, part: str) -> tuple[float, float, float]:
    half = list(samples)[len(samples) // 2 :]
    steps = np.array([sample["step"] for sample in half], dtype=float)
    held = [sample[kind][peer] for sample in half]
    megabytes = np.array([sum(one.values()) if part == ALL else one.get(part, 0.0) for one in held])
    line = np.polyfit(steps, megabytes, 1)
    return float(megabytes.mean()), 1000 * float(line[0]), float(np.std(megabytes - np.polyval(line, steps)))


def table(found: dict[str, Any]) -> Table:
    """A table with a row for each process of each peer."""
    shown = Table(title=f"Memory over {found['rounds']} rounds", title_justify="left")
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column in COLUMNS[:2] else "right")
    for row in found["rows"]:
        figures = (f"{row['mb']:.0f}", f"{row['growth_mb']:+.1f}", f"{row['noise_mb']:.1f}")
        figures += (f"{row['resident_growth_mb']:+.1f}",)
        shown.add_row(row["peer"], row["process"], *figures)
    return shown


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns the exit status: 0, 2 for input that cannot work, 130 after Ctrl-C."""
    options = tyro.cli(MemoryOptions, args=arguments, prog="python -m analysis memory", description=__doc__)
    console = Console()

    def run() -> None:
        options.check()
        make_writable(options.output_dir)
        environment = environment_from_outside()
        found = measure(options, console) | {"environment": environment}
        write_json(options.output_dir / "memory.json", found)
        console.print(table(found))

    return exit_status(run)
