"""Makes the tables of a report."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from analysis.campaigns.cells import Cell
from analysis.campaigns.statistics import equivalence
from analysis.campaigns.systems import SYSTEMS, asked_samples, have_equal_updates
from analysis.reporting import figures
from analysis.reporting.results import (
    RATES,
    Experiment,
    differences,
    doubling,
    granularity,
    interval,
    kept,
    of_seeds,
    ratios,
    training_samples,
    validated_over_trained,
    verdict,
)
from analysis.wan.topology import Topology
from recipe.errors import InputError

AGREEMENT_PERCENT = 10.0
MARGIN_POINTS = 0.5
"""Difference of accuracies, in percentage points, below which it does not matter. It is one of the 270 digits for
validation, and about nine of the 1,797 that all folds validate."""


def throughput_table(experiment: Experiment) -> pd.DataFrame:
    """The table of samples per second: a row for each value of the axis, with mean, interval, n and efficiency.

    Efficiency compares with the speed of one peer of the same system, times the number of peers, where that was
    measured. Elsewhere it compares with what the peers compute alone. It is left out where the number of peers
    changes.
    """
    summary = experiment.summary("samples_per_second")
    one_peer = summary[summary["peers"] == 1].set_index("system")["mean"] if experiment.axis == "peers" else {}
    bounds = figures.bound_rows(experiment).set_index(experiment.axis) if len(summary) else None
    failed = {(row.system, getattr(row, experiment.axis)): row for row in experiment.failed_runs.itertuples()}
    rows, tries = [], experiment.tries
    for value, group in summary.groupby(experiment.axis, sort=True):
        row: dict[str, Any] = {experiment.axis: value}
        for item in group.itertuples():
            alone = value * one_peer[item.system] if item.system in one_peer else bounds.loc[value, "alone"]
            shown = with_interval(item.mean, item.half_width, item.n)
            if not math.isnan(alone):
                shown += f"; efficiency {item.mean / alone:.2f}"
            shown += _failures(failed.pop((item.system, value), None))
            row[SYSTEMS[item.system].label] = shown + _tries(tries[item.system, value], item.n)
        for system in [system for system, where in failed if where == value]:  # systems without a valid run
            shown = f"(n = 0){_failures(failed.pop((system, value)))}"
            row[SYSTEMS[system].label] = shown + _tries(tries[system, value], 0)
        row["limit, overlapped fp16"] = number(bounds.loc[value, "overlapped"], 1)
        row["limit, synchronous fp16"] = number(bounds.loc[value, "synchronous"], 1)
        rows.append(row)
    return pd.DataFrame(rows)


def _failures(counts: Any) -> str:
    """A clause on failed runs, which n does not count."""
    return "" if counts is None else f"; {counts.failed} of {counts.runs} runs failed by themselves"


def _tries(tries: int, n: int) -> str:
    """A clause on the number of tries, if it is more than n."""
    return f"; {tries} tries or more" if tries > n else ""


def ratio_table(experiment: Experiment) -> pd.DataFrame | None:
    """Ratios of every swarm over every other system; None if none ran in the same repetition.

    There is a row for samples per second, and one for updates per second if both were asked for equally large updates.
    """
    ours = [system for system in experiment.systems if system.startswith("swarm")]
    others = [system for system in experiment.systems if not system.startswith("swarm")]
    rows: dict[tuple[int, Any, str], dict[str, Any]] = {}
    for system, baseline, (unit, rate) in itertools.product(ours, others, RATES.items()):
        if rate == "updates_per_second" and not have_equal_updates(system, baseline):
            continue
        for value, found in ratios(experiment, system, baseline, rate).items():
            place = ours.index(system), value, unit
            row = rows.setdefault(place, {"system": SYSTEMS[system].label, experiment.axis: value, "in": unit})
            row[SYSTEMS[baseline].label] = with_interval(*interval(found), digits=2)
    return pd.DataFrame([rows[place] for place in sorted(rows)]) if rows else None


def kept_table(experiment: Experiment) -> pd.DataFrame | None:
    """Share of its samples per second at the shortest round trip that every system keeps elsewhere.

    None if the axis is neither round-trip time nor topology, or if the file of a topology is gone. The round trip of a
    topology is the mean over all pairs of hosts.
    """
    if experiment.axis not in ("rtt_ms", "topology") or experiment.valid.empty:
        return None
    cells = experiment.valid.groupby(experiment.axis)["cell"].first()
    try:
        nearest = min(cells.index, key=lambda value: _mean_delay_ms(cells[value].network()))
    except InputError:
        return None
    rows: dict[str, dict[str, Any]] = {}
    for (system, value), shares in kept(experiment, nearest).items():
        row = rows.setdefault(system, {"system": SYSTEMS[system].label})
        row[f"{figures.LABELS[experiment.axis]} {value} over {nearest}"] = with_interval(*interval(shares), digits=2)
    return pd.DataFrame([rows[system] for system in experiment.systems if system in rows]) if rows else None


def _mean_delay_ms(network: Topology) -> float:
    delays = [network.path(*pair).delay_ms for pair in itertools.permutations(network.hosts, 2)]
    return statistics.fmean(delays) if delays else 0.0


def survivors_table(experiment: Experiment) -> pd.DataFrame | None:
    """The longest update after a peer was killed, and the others' speed before and after; None if none was killed."""
    rows = []
    killed = experiment.valid[experiment.valid["cell"].map(lambda cell: cell.kill_at_step is not None).astype(bool)]
    for system, cells in killed.groupby("system", sort=False):
        found = [_of_survivors(cell, rounds) for cell, rounds in zip(cells["cell"], cells["all_rounds"], strict=True)]
        row = {"system": SYSTEMS[system].label}
        for name, values in zip(_OF_SURVIVORS, zip(*found, strict=True), strict=True):
            row[name] = with_interval(*interval(values))
        rows.append(row)
    return pd.DataFrame(rows) if rows else None


_OF_SURVIVORS = ("usual update before, s", "longest after, s", "samples/s before", "samples/s after, without that one")


def _of_survivors(cell: Cell, rounds: list[dict[str, Any]]) -> tuple[float, float, float, float]:
    before = [item for item in rounds if cell.warm_up_steps < item["step"] <= cell.kill_at_step]
    after = [item for item in rounds if item["step"] > cell.kill_at_step]
    longest = max(after, key=lambda item: item["seconds"], default={"seconds": math.nan})
    usual = statistics.median(item["seconds"] for item in before) if before else math.nan
    return usual, longest["seconds"], _rate(before), _rate([item for item in after if item is not longest])


def _rate(rounds: list[dict[str, Any]]) -> float:
    seconds = sum(item["seconds"] for item in rounds)
    return sum(item["samples"] for item in rounds) / seconds if seconds else math.nan


def communication_table(experiment: Experiment) -> pd.DataFrame:
    """Bytes per sample, granularity, and the most that twice as many peers could bring if they communicated no
    longer."""
    rows, axis = [], experiment.axis
    parts = {(part.system, part.value): part for part in figures.part_rows(experiment).itertuples()}
    for (system, value), cells in experiment.valid.groupby(["system", axis], sort=True, dropna=False):
        row = {"system": SYSTEMS[system].label, axis: value}
        row["bytes per sample"] = number(interval(cells["bytes_per_sample"])[0], 0)
        part = parts.get((system, value))
        if part is not None and part.communication:
            row["communication, s"] = number(part.communication, 2)
            row["of it beside computing, s"] = number(part.hidden, 2)
            row["granularity"] = number(granularity(part.compute, part.communication), 1)
            overlaps = SYSTEMS[system].overlaps  # there, the rest is waiting for their communication
            speed_up = doubling(part.compute, part.communication, 0.0 if overlaps else part.other, overlaps)
            row["doubling the peers"] = f"at most {speed_up:.2f} times as fast: {verdict(speed_up)}"
        rows.append(row)
    return pd.DataFrame(rows).fillna("not reported")


def quality_table(experiment: Experiment) -> pd.DataFrame | None:
    """Validation metrics of each setting, over n seeds (and folds).

    None if none were asked for, or not all samples were computed.
    """
    cells = experiment.valid
    was_asked = cells["target_accuracy"].notna().any() and not experiment.computes_few_samples
    if not was_asked or "top1" not in cells or cells["top1"].isna().all():
        return None
    rows = []
    for (system, value), group in cells.groupby(["system", experiment.axis], sort=True):
        if group["top1"].isna().all():
            continue
        row = {"system": SYSTEMS[system].label, experiment.axis: value, "n": len(of_seeds(group, "top1"))}
        for name in ("top1", "macro_f1", "precision", "recall"):
            mean, half_width, _ = interval(of_seeds(group, name))
            row[name] = number(mean, 4) + ("" if math.isnan(half_width) else f" ± {half_width:.4f}")
        asked = asked_samples(group.iloc[0]["cell"])
        row["samples of an update (asked for)"] = f"{number(interval(group['samples_per_step'])[0], 0)} ({asked:,})"
        row["samples/s"] = number(interval(group["samples_per_second"])[0], 1)
        recipe = group.iloc[0]["cell"].full_recipe()
        if samples := training_samples(recipe.dataset, recipe.num_classes):
            row["epoch, s"] = number(samples / interval(group["samples_per_second"])[0], 1)
        row[f"seconds to {group['target_accuracy'].iloc[0]:.0%}"] = time_reached(group)
        rows.append(row)
    return pd.DataFrame(rows).rename(columns={"top1": "accuracy"})


def equivalence_table(experiment: Experiment) -> pd.DataFrame | None:
    """Tests which systems learn as well as the one that sends most, and the share of its bytes that they send.

    None if this cannot be told, or if another setting varies: a loss at one value and a gain at another would look like
    no difference.
    """
    if experiment.axes or quality_table(experiment) is None:
        return None
    sent = experiment.valid.dropna(subset=["top1"]).groupby("system")["bytes_per_sample"].mean()
    if len(sent := sent[sent > 0]) < 2:
        return None
    reference, rows = sent.idxmax(), []
    for system in (name for name in experiment.systems if name in sent and name != reference):
        points = 100 * np.array(differences(experiment, system, reference, "top1"))
        found = equivalence(points, MARGIN_POINTS, validated_over_trained(experiment))
        row = {"system": SYSTEMS[system].label, "compared with": SYSTEMS[reference].label, "pairs": found.n}
        row["bytes per sample, share of those"] = f"1/{sent[reference] / sent[system]:.0f}"
        row["accuracy, points more"] = plus_minus(found.mean, found.half_width, 2, "+") if found.n else None
        row[f"the same within {MARGIN_POINTS:g} points"] = "shown" if found.is_shown else "not shown"
        rows.append(row)
    return pd.DataFrame(rows) if rows else None


def time_reached(cells: pd.DataFrame) -> str:
    """Seconds to the accuracy, over seeds, in words, with the number of runs that reached it."""
    mean, half_width, n = interval(of_seeds(cells, "seconds_to_accuracy"))
    if not n:
        return "not reached"
    reached = cells["seconds_to_accuracy"].notna().sum()
    return f"{plus_minus(mean, half_width, 1)} ({reached} of {len(cells)} reached it)"


COMMON = "ddp"
"""The system over which others are compared if machines may have been of different speed."""


def compares_ratios(experiment: Experiment) -> bool:
    """Whether computing was true, so that another machine has other samples per second, and `COMMON` was measured."""
    return experiment.valid["paced_samples_per_second"].isna().any() and COMMON in experiment.systems


def agreement_table(experiment: Experiment, earlier: Experiment) -> pd.DataFrame:
    """Compares two runs of the same cells: samples per second, or ratios (`compares_ratios`), and whether they agree.

    The interval is Welch's for the difference of two means. They agree if it is within 10 % of the earlier mean, and
    differ if it excludes zero. Else there are too few repetitions to tell.
    """
    rows, digits = [], 2 if compares_ratios(experiment) else 1
    for (system, value), cells in experiment.valid.groupby(["system", experiment.axis], sort=True):
        if compares_ratios(experiment):
            both = (ratios(run, system, COMMON).get(value, []) for run in (experiment, earlier))
            now, before = (pd.Series(found if system != COMMON else [], dtype=float) for found in both)
        else:
            now = cells["samples_per_second"]
            before = earlier.valid[earlier.valid["fingerprint"].isin(cells["fingerprint"])]["samples_per_second"]
        if min(len(now), len(before)) < 2:
            continue
        found = stats.ttest_ind(now, before, equal_var=False).confidence_interval(0.95)
        low, high = (100 * bound / before.mean() for bound in found)
        rows.append(
            {
                "system": SYSTEMS[system].label,
                experiment.axis: value,
                "earlier": with_interval(*interval(before), digits=digits),
                "now": with_interval(*interval(now), digits=digits),
                "difference": f"{100 * (now.mean() / before.mean() - 1):+.1f} %",
                "95 % interval": f"{low:+.1f} to {high:+.1f} %",
                "agree": "yes" if max(-low, high) <= AGREEMENT_PERCENT else "undecided" if low <= 0 <= high else "no",
            }
        )
    return pd.DataFrame(rows)


def with_interval(mean: float, half_width: float, n: int, digits: int = 1) -> str:
    """A mean with its interval and n, as in all tables."""
    return f"{plus_minus(mean, half_width, digits)} (n = {n})"


def plus_minus(mean: float, half_width: float, digits: int, sign: str = "-") -> str:
    """A mean with its interval, which fewer than three values do not have.

    Args:
        sign: "+" for a difference, which is written with its sign, or "-" to write only that of a negative number.
    """
    return f"{mean:{sign}.{digits}f}" + ("" if math.isnan(half_width) else f" ± {half_width:.{digits}f}")


def number(value: float, digits: int) -> str | None:
    """A number with commas; None for an unknown one."""
    return None if value is None or math.isnan(value) else f"{value:,.{digits}f}"
