"""The report's sections about endurance: faults, equal weights, memory, and the cost of a peer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.endurance import exactness, footprint
from analysis.endurance.memory import COLUMNS
from analysis.endurance.soak_result import accuracy_of, rows
from analysis.reporting import figures
from recipe.run_folder import write_json

WHO = {"swarm": "Our swarm", "hivemind": "Hivemind's Optimizer with its defaults"}
SOAKS = {"soak.json": "our swarm", "soak-hivemind.json": "Hivemind's Optimizer"}
"""Files that `python -m analysis soak` writes, and the system that the faults happened to."""
SHORT = {"swarm": "ours", "hivemind": "Hivemind's"}
COMPARED = ("times", "recovered", "stall: median s", "stall: worst s", "back: median s", "back: worst s")
"""Columns of a soak's table that are shown beside those of another one."""


def soak_section(file: Path, output: Path) -> dict[str, Any]:
    """The parts of a section about a result of `python -m analysis soak`; the file is copied into the report."""
    found = json.loads(file.read_text())
    write_json(output / file.name, found)
    options = found["options"]
    network = f"{options['rtt_ms']:g} ms and {options['bandwidth_mbps']:g} Mbit/s"
    text = [
        f"{WHO[options['system']]}: {options['peers']} peers at {network}, each paced to "
        f"{options['paced_samples_per_second']:g} samples/s; for {options['minutes']:g} minutes a fault every "
        f"{options['every_seconds']:g} s (seed {options['seed']}), and every peer that has ended is started again. "
        f"{found['updates']} updates, usually one in {found['usual_seconds']:.1f} s."
    ]
    text.append(_provenance(found))
    if accuracy := accuracy_of(found):
        text.append(
            f"{accuracy.capitalize()}; without faults trained peers that were alone. "
            f"Peers that held the same weights at step {found['step']}: {len(found['weights'])}. "
            "All of them were paced, and learnt from two samples of each micro-batch: compare these accuracies with "
            "each other only."
        )
    text += [f"Not good: {problem}" for problem in found["problems"]] or [
        "No process was left behind, and every victim came back."
    ]
    given = {name: value for name, value in options.items() if value not in ((), [])}
    words = {name: " ".join(value) if isinstance(value, list) else value for name, value in given.items()}
    command = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in words.items())
    text.append(f"Get it again: python -m analysis soak {command}")
    again = "averaged with others" if options["system"] == "swarm" else "made an update"
    about = "Stall: what the swarm's longest update meanwhile took beyond a usual one. Back: until all victims"
    return {"text": text, "tables": [(f"{about} {again} again, from the fault's end", pd.DataFrame(rows(found)))]}


def _provenance(found: dict[str, Any]) -> str:
    """A sentence on time, commit and machine of a measurement; older files do not have these."""
    if (environment := found.get("environment")) is None:
        return "Commit and machine were not recorded."
    machine = f"{environment['cores']} cores of {environment['cpu']}, {environment['memory_gib']:g} GiB"
    return f"Begun {environment['started_at']}, commit {environment['git_commit']}, on {machine}."


def side_by_side(files: Sequence[Path]) -> dict[str, Any]:
    """The parts of a section that compares the same faults for several systems.

    Args:
        files: a soak's result of each system.
    """
    tables, paces = [], []
    for file in files:
        found = json.loads(file.read_text())
        options = found["options"]
        whose = SHORT[options["system"]]
        table = pd.DataFrame(rows(found)).set_index("fault")[[*COMPARED]]
        tables.append(table.add_prefix(f"{whose}: "))
        minutes, usual = options["minutes"], found["usual_seconds"]
        paces.append(f"{whose} {found['updates']} in {minutes:g} minutes, usually one in {usual:.1f} s")
    together = pd.concat(tables, axis=1).sort_index().fillna("–").rename_axis("fault").reset_index()
    text = [
        f"Updates: {'; '.join(paces)}. A stall is the excess over such a usual update: a system that is slow "
        "anyway seems to stall less.",
        "Of Hivemind's, any update of any peer counts, also of one that trains alone, and weights are not compared. "
        "A swarm that stands still for long meets some faults before it has recovered from the one before: these "
        "count for the first.",
    ]
    return {"text": text, "tables": [("", together)]}


def exactness_section(file: Path, output: Path) -> dict[str, Any]:
    """The parts of a section about a result of `python -m analysis exactness`; the file is copied into the report."""
    found = json.loads(file.read_text())
    write_json(output / file.name, found)
    options = found["options"]
    rounds = sum(row["peer_rounds"] for row in found["rows"])
    text = [
        f"{options['peers']} peers on one machine train digits, {options['rounds']} rounds in each way. A round as one "
        f"of them saw it is a peer-round; there were {rounds:,} in all. A part of an average that a peer missed "
        "without noticing, or rounded otherwise than the others, would leave its weights different in the end. "
        f"Local: {exactness.LOCAL_STEPS} local steps; compared is what the peers share. A group that met too early "
        "computed on.",
        _provenance(found),
        f"Get it again: python -m analysis exactness --rounds {options['rounds']} --peers {options['peers']} "
        f"--averaging {' '.join(options['averaging'])} --codec {' '.join(options['codec'])} "
        f"--fragments {' '.join(map(str, options.get('fragments', (1,))))}",
    ]
    rows = [exactness.cells(row) for row in found["rows"]]
    return {"text": text, "tables": [("", pd.DataFrame(rows, columns=list(exactness.COLUMNS)))]}


def memory_section(file: Path, output: Path) -> dict[str, Any]:
    """The parts of a section about a result of `python -m analysis memory`; the file is copied into the report."""
    found = json.loads(file.read_text())
    write_json(output / file.name, found)
    table = pd.DataFrame(found["rows"]).round(1)
    table.columns = COLUMNS[: table.shape[1]]  # older files have no resident sets
    text = [
        f"Two peers, {found['rounds']} rounds of a tiny model. Proportional set size of all processes of a peer; "
        "growth is the slope over the second half. Processes that were forked from one share pages until one of them "
        "writes to a page; that counts as growth of this size, but not of the resident sets. So does the end of "
        "another process that shared pages: then the sizes of all peers jump.",
        _provenance(found),
        f"Get it again: python -m analysis memory --rounds {found['rounds']}",
    ]
    picture = figures.memory(found["samples"], output / "memory.png")
    caption = "Memory of each peer: the proportional set size of all its processes, in one run."
    return {"text": text, "tables": [("", table)], "figures": [(caption, picture)]}


def footprint_section(file: Path, output: Path) -> dict[str, Any]:
    """The parts of a section about a result of `python -m analysis footprint`; the file is copied into the report."""
    found = json.loads(file.read_text())
    write_json(output / file.name, found)
    options = found["options"]
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", f"{value}")]
    text = [
        f"{options['peers']} peers of a swarm and a plain training process at the same time on one machine, each paced "
        f"to {options['samples_per_second']:g} samples/s, {options['target_batch_size']:,} samples per update of a "
        f"swarm; means of {options['repeat']} windows of {options['seconds']:g} s of one run. Windows are no "
        "repetitions: what varies from run to run was not measured. What a peer of the swarm uses more than the plain "
        "process is the price of the swarm. Libraries count once for each peer.",
        _provenance(found),
        f"Get it again: python -m analysis footprint {' '.join([*words, *found['peer_options']])}",
    ]
    rows = [footprint.cells(row) for row in found["rows"]]
    return {"text": text, "tables": [("", pd.DataFrame(rows, columns=list(footprint.COLUMNS)))]}
