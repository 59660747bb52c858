"""Runs the cells of a grid one after the other, each in its own namespaces, except those that have a result."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from analysis.campaigns.cell import read_result, set_result_aside
from analysis.campaigns.cells import Cell, Grid
from analysis.campaigns.measure import failed_by_itself
from analysis.campaigns.systems import SYSTEMS, check_learning, system_of
from analysis.wan import sandbox
from recipe.errors import InputError
from recipe.run_folder import make_writable, write_json

_GRACE_SECONDS = 60.0
"""Time after its limit that a cell has to end by itself; then it is killed."""


class Campaign:
    """Runs the cells of a grid; each has its own folder.

    Args:
        grid: the experiment.
        cells: the cells, in the order in which they run.
        folder: the folder `OUTPUT/GRID`.
        again: run cells again if the machine was busy or the router late. A run that failed by itself is a result, and
            is not repeated.
        changes: settings of the cells that the command gave, in place of those of the grid.

    Raises:
        InputError: a cell cannot work, namespaces are not allowed, or the folder cannot be written.
    """

    def __init__(
        self,
        grid: Grid,
        cells: Sequence[Cell],
        folder: Path,
        again: bool = False,
        changes: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.grid, self.cells, self.folder, self.again = grid, cells, folder, again
        for cell in cells:
            system_of(cell)
            check_learning(cell)
        sandbox.wrapped([])
        make_writable(folder)
        self.lock = _only_here(folder)
        origin = {"command": _anywhere(sys.argv[1:]), "cores": os.cpu_count(), "congestion_control": _congestion()}
        about = {"name": grid.name, "question": grid.question, "changes": dict(changes)}
        write_json(folder / "grid.json", about | origin)

    def run(self, console: Console) -> int:
        """Runs the cells without a result; returns the number of cells without a valid one."""
        waiting = [cell for cell in self.cells if not self._is_done(cell)]
        if skipped := len(self.cells) - len(waiting):
            console.print(f"{skipped} of {len(self.cells)} cells have a result already.")
        spent: list[float] = []
        for number, cell in enumerate(waiting, 1):
            left = f", about {_clock(sum(spent) / len(spent) * (len(waiting) - number + 1))} left" if spent else ""
            console.print(f"[{number}/{len(waiting)}{left}] {_sentence(cell)}", markup=False, highlight=False)
            began = time.monotonic()
            result = self._run(cell)
            spent.append(time.monotonic() - began)
            console.print(f"    {outcome(result)}", markup=False, highlight=False)
        console.print(summary_table(self.grid, self.folder, self.cells))
        return sum(bool(read_result(self.folder / cell.name).get("problems", ["no result"])) for cell in self.cells)

    def _is_done(self, cell: Cell) -> bool:
        result = read_result(self.folder / cell.name)
        return bool(result) and not (self.again and result["problems"] and not failed_by_itself(result["problems"]))

    def _run(self, cell: Cell) -> dict[str, Any]:
        folder = self.folder / cell.name
        folder.mkdir(exist_ok=True)
        set_result_aside(folder)
        (folder / "cell.json").write_text(cell.to_json())
        # The kernel ends the cell when this program ends, even by SIGKILL.
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            *sandbox.wrapped([sys.executable, "-m", "analysis", "cell", str(folder)]),
        ]
        process = subprocess.Popen(command, env=sandbox.environment(), stdin=subprocess.DEVNULL)
        try:
            process.wait(cell.time_limit_seconds + _GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()  # and with it all processes in its namespaces
            process.wait()
        return read_result(folder) or {"problems": [f"it ended without a result (status {process.returncode})"]}


def _only_here(folder: Path) -> IO:
    """A lock on the folder that this process holds until it ends.

    Raises:
        InputError: another process runs cells in this folder.
    """
    lock = (folder / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise InputError(f"{folder} is in use by another run: wait for it, or give another --output-dir.") from None
    return lock


def _congestion() -> str | None:
    """The kernel's TCP congestion control: it decides how fast a long link fills and what a lost packet costs."""
    try:
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError:
        return None


def _anywhere(command: Sequence[str]) -> list[str]:
    """The command without this machine's folder, and without the options that chose or repeated some cells."""
    kept, words, choosing = [], iter(command), False
    for word in words:
        name, equals, _ = word.replace("_", "-").partition("=")
        choosing = name == "--systems" or (choosing and not name.startswith("--"))
        if name == "--output-dir" and not equals:
            next(words, None)
        elif not choosing and name not in ("--output-dir", "--again"):
            kept.append(word)
    return kept


def summary_table(grid: Grid, folder: Path, cells: Sequence[Cell]) -> Table:
    """A table of the samples per second of each setting and system, of valid cells only."""
    found: dict[tuple, dict[str, list[float]]] = {}
    axes = [name for name in grid.axes if name not in ("system", "seed", "dataset")]
    for cell in cells:
        result = read_result(folder / cell.name)
        key = tuple(str(getattr(cell, axis, cell.changes.get(axis))) for axis in axes)
        values = found.setdefault(key, {}).setdefault(cell.system, [])
        if result and not result["problems"]:
            values.append(result["samples_per_second"])
    table = Table(title=f"{grid.question} Samples per second (n valid cells)", title_justify="left")
    systems = [name for name in SYSTEMS if any(cell.system == name for cell in cells)]
    for name in [*axes, *(SYSTEMS[system].label for system in systems)]:
        table.add_column(name, justify="right")
    for key, row in found.items():
        shown = [f"{sum(v) / len(v):.1f} ({len(v)})" if (v := row.get(system)) else "–" for system in systems]
        table.add_row(*key, *shown)
    return table


def _sentence(cell: Cell) -> str:
    network = cell.topology or f"{cell.rtt_ms:g} ms, {cell.bandwidth_mbps or 'unlimited'} Mbit/s"
    paced = f", paced to {cell.paced_samples_per_second:g} samples/s each" if cell.paced_samples_per_second else ""
    paced += f", the last {cell.last_times_slower:g} times slower" if cell.last_times_slower > 1 else ""
    changes = "".join(f", {name} {value}" for name, value in cell.changes.items())
    label = SYSTEMS[cell.system].label
    return f"{label}, {cell.peers} peers, {network}{paced}{changes}, repetition {cell.repetition}"


def outcome(result: dict[str, Any]) -> str:
    """A line about a cell: its speed, or why it is invalid."""
    if result["problems"]:
        what = "failed by itself" if failed_by_itself(result["problems"]) else "invalid"
        return f"{what}: {'; '.join(result['problems'])}{_who_took_part(result)}"
    line = f"{result['samples_per_second']:.1f} samples/s, {result['step_seconds']:.2f} s an update"
    return line + _who_took_part(result)


def _who_took_part(result: dict[str, Any]) -> str:
    """A clause about the updates and failed rounds of a swarm (`analysis.campaigns.home`); else empty."""
    if not (found := result.get("home")):
        return ""
    whole = f"; all in {found['whole_updates']} of {len(found['updates'])} updates"
    return f"{whole}, {len(found['failed'])} failed rounds"


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
