"""Reads finished experiments: from a folder for each cell, or from the one small file that a report keeps of them.

A report's `NAME.jsonl` begins with a line {"grid", "machine"}; each further line is a cell: {"name", "cell", "result"}.
The report can be made again from this file, and `cell` is enough to run the cell again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from analysis.campaigns.cell import read_result
from analysis.campaigns.cells import Cell
from analysis.campaigns.systems import system_of
from recipe.errors import InputError
from recipe.run_folder import RunFolder

UNFINISHED = {"problems": ["it ended without a result"]}


@dataclass
class Records:
    """The records of an experiment."""

    grid: dict[str, Any]
    """`name`, `question` and `command`; of later versions also `changes`, the settings that the command gave."""
    machine: dict[str, Any] | None
    """The `environment.json` of the cell that began first, from its first host, without its command line, and with the
    `commits` of all cells. None if there is none."""
    cells: dict[str, tuple[Cell, dict[str, Any]]]
    """Cells by name, with their results."""

    def update(self, other: Records) -> None:
        """Adds the cells of other records; where both have a cell, that of `other` counts."""
        self.cells |= other.cells
        if self.machine and other.machine:
            self.machine["commits"] = sorted({*_commits(self.machine), *_commits(other.machine)})

    def write(self, file: Path) -> None:
        """Writes the file that `read` reads."""
        lines = [{"grid": self.grid, "machine": self.machine}]
        lines += [{"name": name, "cell": asdict(cell), "result": result} for name, (cell, result) in self.cells.items()]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(source: Path) -> Records:
    """Reads an experiment from a folder that `python -m analysis run` wrote, or from a report's `NAME.jsonl`.

    Raises:
        InputError: the source holds no finished cells.
    """
    records = _read_folder(source) if source.is_dir() else _read_file(source)
    if all(result == UNFINISHED for _, result in records.cells.values()):
        raise InputError(f"{source} holds no finished cells: run python -m analysis run, and name its folder.")
    return records


def _read_folder(folder: Path) -> Records:
    cells, machines = {}, []
    for file in sorted(folder.glob("*/cell.json")):
        try:
            cell = Cell.from_json(file.read_text())
            system_of(cell)
        except InputError as error:
            raise InputError(f"{file} is no cell of this version: {error}") from None
        cells[file.parent.name] = cell, read_result(file.parent) or UNFINISHED
        if environment := _json(RunFolder(file.parent / "runs" / "run" / "h1").environment):
            machines.append(environment)
    machine = min(machines, key=lambda one: one["started_at"], default=None)
    if machine is not None:
        machine.pop("command_line", None)  # that of one host of one cell, with paths of this machine
        machine["commits"] = sorted({str(one["git_commit"]) for one in machines})
    grid = _json(folder / "grid.json") or {"name": folder.name, "question": "", "command": []}
    return Records(grid, machine, cells)


def _read_file(file: Path) -> Records:
    try:
        first, *lines = map(json.loads, file.read_text().splitlines())
        cells = {line["name"]: (Cell(**line["cell"]), line["result"]) for line in lines}
        for cell, _ in cells.values():
            system_of(cell)
        return Records(first["grid"], first["machine"], cells)
    except InputError as error:
        raise InputError(f"{file} holds a cell that cannot be run by this version: {error}") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{file} is no folder of cells and no report's .jsonl: name one of these.") from None


def _commits(machine: dict[str, Any]) -> list[str]:
    return machine.get("commits") or [machine["git_commit"]]


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None
