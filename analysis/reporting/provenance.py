"""The report's last sections: machines and commits of its cells, accuracy of the lab, and published figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.reporting import published
from analysis.reporting.results import Experiment
from analysis.reporting.section import Section
from analysis.wan.check import GOODPUT_RTT_MS, LEAST_GOODPUT, LOSS_TOLERANCE, RTT_TOLERANCE_MS, Row
from recipe.run_folder import write_json

CHECKS = ("check.json", "check-netem.json")
"""Files with checks of the lab, beside the experiments."""
BACKENDS = {"router": "a router in user space", "netem": "the kernel's netem"}
_CHECK = "python -m analysis wan check"
COMMANDS = {"router": f"{_CHECK} --backend router", "netem": f"sh analysis/wan/with_netem.sh {_CHECK} --backend netem"}


def machine_section(experiments: Sequence[Experiment]) -> Section:
    """The section on where and when the cells ran, and with which commit."""
    known = [experiment for experiment in experiments if experiment.machine is not None]
    if not known:
        return Section("Machine", ["The first cell has no environment.json."])
    backend = BACKENDS[backend_of(known)]
    ran_on: dict[str, list[str]] = {}
    for experiment in known:
        ran_on.setdefault(machine_of(experiment), []).append(experiment.name)
    text = [
        *(f"{', '.join(names)}: {machine}." for machine, names in ran_on.items()),
        *(f"{e.name}: begun {e.machine['started_at']}, commit {', '.join(commits(e))}." for e in known),
        f"All peers shared this machine. The network between them was emulated by {backend}; what it keeps to is "
        "measured by: python -m analysis wan check",
    ]
    if any(name.endswith("+") for experiment in known for name in commits(experiment)):
        text.append("A + after a commit: there were changes that were not committed; these cells cannot be had again.")
    text += _congestion_control(known)
    return Section("Machine", text)


def _congestion_control(experiments: Sequence[Experiment]) -> list[str]:
    """A sentence on TCP's algorithms, which matter where packets are lost; none if no experiment knows its own."""
    used: dict[str | None, list[str]] = {}
    for experiment in experiments:
        used.setdefault(experiment.grid.get("congestion_control"), []).append(experiment.name)
    unknown = used.pop(None, [])
    if not used:
        return []
    chosen = {cell.congestion_control for experiment in experiments for cell in experiment.cells["cell"]} - {None}
    others = f", or {' or '.join(sorted(chosen))} where the cell says so" if chosen else ""
    said = "; ".join(f"{algorithm} ({', '.join(names)})" for algorithm, names in used.items())
    not_known = f" It is not known of {', '.join(unknown)}." if unknown else ""
    return [f"TCP's congestion control was the kernel's: {said}{others}.{not_known}"]


def machine_of(experiment: Experiment) -> str:
    """Hardware and versions in words."""
    machine = experiment.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    cores = experiment.grid.get("cores") or machine["cores"]  # a host may have seen only its own cores
    return f"{cores} cores of {machine['cpu']}, {machine['memory_gib']:g} GiB, {machine['os']}; {versions}"


def backend_of(experiments: Sequence[Experiment]) -> str:
    """Backend of the lab, from the first cell that records it."""
    said = (cell.get("backend") for experiment in experiments for _, cell in experiment.cells.iterrows())
    return next((backend for backend in said if isinstance(backend, str)), "router")


def commits(experiment: Experiment) -> list[str]:
    """Commits that the experiment's cells ran with."""
    return experiment.machine.get("commits") or [experiment.machine["git_commit"]]


def lab_section(file: Path, output: Path) -> Section:
    """The section on a result of `python -m analysis wan check --output`; the file is copied into the report."""
    found = json.loads(file.read_text())
    write_json(output / file.name, found)
    rows = pd.DataFrame(found["rows"]).dropna(axis="columns", how="all").round(4)
    rows["out of bounds"] = [", ".join(Row(**row).problems) or "nothing" for row in found["rows"]]
    text = [
        f"Linux {found['kernel']}; how it was measured: {COMMANDS[found['backend']]} --output {file.name}",
        f"Bounds: the median round trip within {RTT_TOLERANCE_MS:g} ms (and three standard errors, where it jitters), "
        f"TCP's goodput {LEAST_GOODPUT:.0%} of the rate or more (beyond {GOODPUT_RTT_MS} ms not at the highest), loss "
        f"within {LOSS_TOLERANCE:.0%} of its value.",
    ]
    return Section(f"The lab, set against measured: {BACKENDS[found['backend']]}", text, [("", rows)])


def published_section(experiments: Sequence[Experiment]) -> Section:
    """The section on published figures, each with the nearest result here."""
    rows = [vars(figure) | {"here": figure.here(experiments)} for figure in published.FIGURES]
    return Section("Published figures, on other hardware", tables=[("", pd.DataFrame(rows))])
