"""Experiments on an emulated internet: run them, measure them again, and write the report.

    python -m analysis run delay      # or peers, bandwidth, averaging, convergence, unequal, many, …
    python -m analysis run my-grid.toml --repeat 3
    python -m analysis run peers --paced-samples-per-second 40
    python -m analysis run learning_rate --recipe docstrings
    python -m analysis measure runs/analysis/delay      # after a change of the gates, from the files that are there
    python -m analysis home runs/analysis/home          # the members of each update of a swarm on home lines
    python -m analysis report runs/analysis/delay -o report/

The same command, given again, continues an experiment that was interrupted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from analysis.campaigns.campaign import Campaign, outcome, summary_table
from analysis.campaigns.cells import Cell, load_grid, shipped_grids
from analysis.program import wide_console
from recipe.command_line import arg, exit_status
from recipe.errors import InputError


@dataclass(frozen=True)
class Run:
    """Run an experiment: a grid of cells, each a swarm or a DDP run in a lab of its own."""

    experiment: Annotated[tyro.conf.Positional[str], arg("NAME", text=f"{', '.join(shipped_grids())}, or a .toml.")]
    repeat: Annotated[int, arg("TIMES")] = 1
    """Repetitions of the whole grid, interleaved."""
    output_dir: Annotated[Path, arg("FOLDER")] = Path("runs/analysis")
    """Everything goes to OUTPUT_DIR/NAME, a folder per cell."""
    systems: Annotated[tuple[str, ...], arg("NAME ...", "all of the experiment")] = ()
    """Systems to run."""
    recipe: Annotated[str | None, arg("NAME", "as the experiment says")] = None
    """Another preset; the folder is then OUTPUT_DIR/NAME-RECIPE."""
    paced_samples_per_second: Annotated[float | None, arg("SAMPLES", "as the experiment says")] = None
    """Speed of each host's pretended device."""
    steps: Annotated[int | None, arg("UPDATES", "as the experiment says")] = None
    """Updates of each cell, for a quick look."""
    again: bool = False
    """Run cells again if the machine was busy or the router late; a run that failed by itself is a result."""
    dry_run: bool = False
    """Only list the cells."""


@dataclass(frozen=True)
class Measure:
    """Compute the results of finished cells again from their files, by the rules of this version."""

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], arg("FOLDER ...", text="Folders of experiments.")]


@dataclass(frozen=True)
class Home:
    """Show the members of each update of a swarm, the failed rounds, and the times of starting and of joining late."""

    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        arg("FOLDER ...", text="Folders of experiments or cells, finished or not."),
    ]


@dataclass(frozen=True)
class Report:
    """Write what experiments found: one HTML page, the same as Markdown, and its figures."""

    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        arg("PATH ...", text="Folders of experiments, or .jsonl files of reports."),
    ]
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FOLDER")] = Path("report")
    """Folder for the report."""
    earlier: Annotated[tuple[Path, ...], arg("PATH ...", "none")] = ()
    """Other runs of the same experiments: the report shows whether both agree."""


def main(arguments: list[str] | None = None) -> int:
    """Runs a program; returns the exit status: 0, 1 if a cell gave no valid result, 2 for input that cannot work, 130
    after Ctrl-C."""
    options = tyro.cli(
        Run | Measure | Home | Report, args=arguments, prog="python -m analysis", config=(tyro.conf.OmitArgPrefixes,)
    )
    console = wide_console()
    programs = {Run: _run, Measure: _measure, Home: _home, Report: _report}
    interrupted = "Interrupted; the same command goes on with the cells that are left."
    return exit_status(lambda: programs[type(options)](options, console), interrupted)


def _report(options: Report, console: Console) -> None:
    from analysis.reporting.report import write_report

    console.print(f"Report: {write_report(options.runs, options.output, options.earlier)}", highlight=False)


def _run(options: Run, console: Console) -> int:
    if options.repeat < 1:
        raise InputError(f"--repeat is {options.repeat}: give at least 1.")
    grid = load_grid(options.experiment)
    changes: dict[str, Any] = {}
    if options.recipe is not None:
        changes["recipe"] = options.recipe
        grid = replace(grid, name=f"{grid.name}-{options.recipe}")
    if options.paced_samples_per_second is not None:
        changes["paced_samples_per_second"] = options.paced_samples_per_second
    if options.steps is not None:
        changes["steps"] = options.steps
    cells = list(grid.cells(options.repeat, **changes))
    if options.systems:
        known = dict.fromkeys(cell.system for cell in cells)
        cells = [cell for cell in cells if cell.system in options.systems]
        if not cells:
            raise InputError(f"The experiment has none of these systems: choose from {', '.join(known)}.")
    folder = options.output_dir.expanduser() / grid.name
    if options.dry_run:
        console.print(*(cell.name for cell in cells), sep="\n", highlight=False)
        console.print(summary_table(grid, folder, cells))
        return 0
    console.print(f"{grid.question} {len(cells)} cells, load average {os.getloadavg()[0]:.1f}, folder {folder}")
    return int(Campaign(grid, cells, folder, options.again, changes).run(console) > 0)


def _measure(options: Measure, console: Console) -> int:
    from analysis.campaigns.measure import measure_again

    finished = [file.parent for folder in options.runs for file in sorted(folder.glob("*/result.json"))]
    if not finished:
        raise InputError("There are no finished cells: name folders that python -m analysis run has written.")
    results = {folder.name: measure_again(folder) for folder in finished}
    for name, result in results.items():
        console.print(f"{name}: {outcome(result)}", markup=False, highlight=False)
    return int(any(result["problems"] for result in results.values()))


def _home(options: Home, console: Console) -> None:
    from analysis.campaigns.home import home_numbers, measures_home
    from analysis.campaigns.home_text import show

    files = [file for folder in options.runs for file in [folder / "cell.json", *sorted(folder.glob("*/cell.json"))]]
    cells = {file.parent: Cell.from_json(file.read_text()) for file in files if file.exists()}
    swarms = {folder: cell for folder, cell in cells.items() if measures_home(cell)}
    if not swarms:
        raise InputError("There are no cells of our swarm: name folders that python -m analysis run has written.")
    for folder, cell in swarms.items():
        show(folder.name, home_numbers(folder, cell), console)
