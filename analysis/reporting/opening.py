"""The beginning of a report: the answer in five sentences and one picture, and a section on what these leave out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.campaigns.statistics import interval
from analysis.campaigns.systems import SYSTEMS, asked_samples
from analysis.reporting import captions, figures
from analysis.reporting.results import Experiment, ratios
from analysis.reporting.section import Section
from analysis.reporting.tables import with_interval
from analysis.reporting.words import paced_rates, results_table, span

HEADLINES = ("swarm-local-1-fp16", "swarm-fp16")
"""The two systems that the report opens with: averaging that overlaps, as volunteers use it, and synchronous
averaging."""
OPPONENTS = ("ddp-fp16", "ddp")
"""DDP systems to compare with, in order of preference: the fp16 hook is faster, where it was measured."""
FAIR_OPPONENT, FEWEST = "ddp-fp16", 3
"""A headline counts only comparisons with the system that sends as many bytes per number, and with enough repetitions
for an interval."""
RATES = {"updates_per_second": "updates per second", "samples_per_second": "samples per second"}

SYSTEM_NAMES = (
    "Names of systems. Synchronous: peers wait for each average. Overlapped, and 1 or 4 local steps: they compute "
    "meanwhile. fp16, int8, PowerSGD, topk: what a swarm sends; without such a name, float32. DDP, accumulated: "
    "PyTorch's DDP that sends gradients once per update; its fp16 hook halves their bytes, and its PowerSGD hook sends "
    "matrices of rank 2. Hivemind Optimizer, tuned: with settings of ours. Paced: each device pretends to have a set "
    "speed."
)
WHEN_TO_ADD_PEERS = (
    "Tables of communication say where more peers pay. Where they do not: enlarge the batch, shrink the payload "
    "(codec, local steps), or, where what is called communication is waiting for a slower peer, choose a system that "
    "does not wait."
)


@dataclass(frozen=True)
class Comparison:
    """A comparison in one setting of one experiment: rates of a swarm over those of DDP.

    Args:
        setting: the experiment, and the value of the setting that varies in it
        opponent: label of the DDP system
        means: means of the ratios within a repetition, for each of `RATES`
        half_widths: half widths of their 95 % intervals; NaN for fewer than three repetitions
        n: number of repetitions
        peers: fewest and most peers in the experiment's runs of either system
    """

    setting: str
    opponent: str
    means: dict[str, float]
    half_widths: dict[str, float]
    n: int
    peers: tuple[int, int]

    @property
    def is_counted(self) -> bool:
        """Whether the headline counts it: against DDP that sends fp16 as well, with enough repetitions."""
        return self.opponent == SYSTEMS[FAIR_OPPONENT].label and self.n >= FEWEST

    @property
    def is_shown_faster(self) -> bool:
        """Whether the swarm is shown to make more updates per second."""
        return self.verdict("updates_per_second") == "faster"

    def verdict(self, rate: str) -> str:
        """The verdict: "faster", "slower", or "not shown" if the interval includes 1 or is missing."""
        mean, half_width = self.means[rate], self.half_widths[rate]
        if mean - half_width > 1:
            return "faster"
        return "slower" if mean + half_width < 1 else "not shown"


def comparisons(experiments: Sequence[Experiment], system: str) -> list[Comparison]:
    """The comparisons in all settings where a swarm and a DDP ran in the same repetition, ordered by name of the
    experiment."""
    found = []
    for experiment in sorted(experiments, key=lambda experiment: experiment.name):
        opponent = next((name for name in OPPONENTS if not ratios(experiment, system, name).empty), None)
        if opponent is None:
            continue
        peers = experiment.valid.loc[experiment.valid["system"].isin([system, opponent]), "peers"]
        by_rate = {rate: ratios(experiment, system, opponent, rate) for rate in RATES}
        for value in by_rate["samples_per_second"].index:
            intervals = {rate: interval(by_rate[rate][value]) for rate in RATES}
            found.append(
                Comparison(
                    _setting(experiment, value),
                    SYSTEMS[opponent].label,
                    {rate: mean for rate, (mean, _, _) in intervals.items()},
                    {rate: half_width for rate, (_, half_width, _) in intervals.items()},
                    intervals["samples_per_second"][2],
                    (int(peers.min()), int(peers.max())),
                )
            )
    return found


def opening_section(experiments: Sequence[Experiment], output: Path) -> Section:
    """The section with the answer and its picture; the table of contents follows it."""
    section = Section("The answer")
    found = {}
    for system in HEADLINES:
        if rows := [row for row in comparisons(experiments, system) if row.is_counted]:
            found[system] = rows
    if found:
        paced = {experiment.name for experiment in experiments if paced_rates(experiment)}
        section.text += [*_results(found), _advice(found, paced), _scope(found)]
        picture = figures.forest({SYSTEMS[system].label: rows for system, rows in found.items()}, output)
        section.figures.append((f"A swarm over {SYSTEMS[FAIR_OPPONENT].label}: {captions.PAIRED}", picture))
    else:
        section.text.append(
            f"No setting was measured {FEWEST} times or more with a swarm and with DDP that sends fp16 as well: see "
            "each experiment."
        )
    return section


def details_section(experiments: Sequence[Experiment]) -> Section:
    """The section on how to read the answer and on which runs it rests, with a table of all comparisons."""
    section = Section("How to read the answer, and what it leaves out")
    section.text.append(SYSTEM_NAMES)
    section.text.append(
        "Intervals are not corrected for their number: where nothing differs, one in twenty leaves 1 out all the same."
    )
    if failed := _failed(experiments):
        section.text.append(failed)
    section.tables.append(("How often the cells of each system ran, and how many count", _tries_table(experiments)))
    if any(cell.last_times_slower > 1 for experiment in experiments for cell in experiment.cells["cell"]):
        section.text.append(
            "DDP splits each batch equally, so it waits for a slower peer. A split that fits speeds was not measured."
        )
    section.text.append(
        f"{_larger_updates(experiments)}Updates per second say how fast a system learns where updates are of equal "
        "size, and samples per second how much of the machines is used. Shown: the 95 % interval of the ratio leaves 1 "
        "out, which takes three repetitions. Limits, in figures and tables, are what is left when only computing, the "
        "bytes of an fp16 average and a round trip take time. DDP sends gradients while it computes others, so it "
        "can exceed the synchronous one where it is not paced. An update of several local steps has several times the "
        "samples, so no updates per second are given for it."
    )
    section.text.append(WHEN_TO_ADD_PEERS)
    every = [(system, row) for system in HEADLINES for row in comparisons(experiments, system)]
    rest = [_row(system, row) for system, row in every if not row.is_counted]
    if rest:
        title = f"Not counted above: against DDP that sends float32, or fewer than {FEWEST} repetitions"
        section.tables.append((title, pd.DataFrame(rest)))
    if not (table := results_table(experiments)).empty:
        section.tables.append(("Times as fast as DDP: from the least to the greatest of the settings", table))
    return section


def _results(found: dict[str, list[Comparison]]) -> list[str]:
    """A sentence on each swarm, and one on the settings where the first swarm gains most and least."""
    said = []
    for system, rows in found.items():
        in_updates, in_samples = (span([row.means[rate] for row in rows], 2) for rate in RATES)
        verdicts = [row.verdict("updates_per_second") for row in rows]
        label, opponent = SYSTEMS[system].label, SYSTEMS[FAIR_OPPONENT].label
        said.append(
            f"{_capital(label)} made {in_updates} times the updates/s of {opponent} ({in_samples} times the "
            f"samples/s): of {len(rows)} settings, it is shown to be faster in {verdicts.count('faster')} and slower "
            f"in {verdicts.count('slower')}."
        )
    shown = [row for row in next(iter(found.values())) if row.verdict("updates_per_second") != "not shown"]
    if shown:
        best = max(shown, key=lambda row: row.means["updates_per_second"])
        worst = min(shown, key=lambda row: row.means["updates_per_second"])
        said.insert(1, f"Of what is shown, its ratio is greatest at {_said(best)} and least at {_said(worst)}.")
    return said


def _advice(found: dict[str, list[Comparison]], paced: set[str]) -> str:
    """A sentence on when to use a swarm and when DDP.

    Args:
        paced: names of experiments with paced devices
    """
    names = {row.setting.partition(": ")[0] for rows in found.values() for row in rows if row.is_shown_faster}
    where = ", or where the picture shows it to be faster" if names else ""
    where += " (with paced devices only)" if names and names <= paced else ""
    return f"Use a swarm where peers come and go, which DDP does not survive{where}; else use DDP, which is simpler."


def _larger_updates(experiments: Sequence[Experiment]) -> str:
    """Sentences on how many more samples than asked for swarms of several peers had; empty without such swarms."""
    found = []
    for experiment in experiments:
        cells = experiment.valid[(experiment.valid["peers"] > 1) & experiment.valid["system"].str.startswith("swarm")]
        for row in cells.dropna(subset=["samples_per_step"]).itertuples():
            more = 100 * (row.samples_per_step / asked_samples(row.cell) - 1)
            found.append((more, _setting(experiment, getattr(row, experiment.axis))))
    if not found:
        return ""
    most, where = max(found)
    return (
        f"A swarm's update has more samples than it was asked for: {min(found)[0]:.0f} to {most:.0f} % more here, most "
        f"at {where}. No peer stops in the middle of a micro-batch, and peers hear of each other a moment later. DDP's "
        "update has just as many as asked. So what a swarm has learnt in as many updates, it has learnt from more "
        "samples; tables of quality say from how many. "
    )


def _setting(experiment: Experiment, value: Any) -> str:
    label = figures.LABELS.get(experiment.axis, experiment.axis)
    return f"{experiment.name}: {label} = {value}" if experiment.axes else experiment.name


def _failed(experiments: Sequence[Experiment]) -> str:
    """A sentence on the runs that failed on a fit machine; empty if none has."""
    cells = pd.concat([experiment.cells[["system", "failed", "runs"]] for experiment in experiments])
    counts = cells.groupby("system", sort=False)[["failed", "runs"]].sum()
    if not (failed := counts["failed"].sum()):
        return ""
    of_each = [f"{row.failed} of {row.runs} of {SYSTEMS[row.Index].label}" for row in counts.itertuples() if row.failed]
    return (
        f"{failed} of {counts['runs'].sum()} runs failed by themselves, on a machine that was fit for them: "
        f"{'; '.join(of_each)}. They have no speed, and are in no mean."
    )


def _tries_table(experiments: Sequence[Experiment]) -> pd.DataFrame:
    """A table of cells and tries over all experiments, with a row for each system."""
    cells = pd.concat(
        [
            experiment.cells[["system", "tries"]].assign(n=experiment.cells["problems"].map(len) == 0)
            for experiment in experiments
        ]
    )
    rows = []
    for system in (name for name in SYSTEMS if name in set(cells["system"])):
        own = cells[cells["system"] == system]
        row = {"system": SYSTEMS[system].label, "cells": len(own), "tries, at least": own["tries"].sum()}
        rows.append(row | {"cells that count": own["n"].sum()})
    return pd.DataFrame(rows)


def _scope(found: dict[str, list[Comparison]]) -> str:
    peers = [number for rows in found.values() for row in rows for number in row.peers]
    repetitions = [row.n for rows in found.values() for row in rows]
    return (
        f"All of it was measured {min(repetitions)} to {max(repetitions)} times, with {min(peers)} to {max(peers)} "
        "peers on one machine, in an emulated network, against DDP that splits each batch equally: more peers, other "
        "models and real lines may differ."
    )


def _said(row: Comparison) -> str:
    mean, half_width = row.means["updates_per_second"], row.half_widths["updates_per_second"]
    return f"{row.setting} ({mean:.2f} ± {half_width:.2f} times the updates, n = {row.n})"


def _row(system: str, row: Comparison) -> dict[str, Any]:
    shown = {"setting": row.setting, "system": SYSTEMS[system].label, "over": row.opponent}
    for rate, name in RATES.items():
        shown[f"{name}, times"] = with_interval(row.means[rate], row.half_widths[rate], row.n, digits=2)
    return shown


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
