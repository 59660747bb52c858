"""The sentences of a report about an experiment."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import combinations, product
from typing import Any

import pandas as pd

from analysis.campaigns.cells import load_grid
from analysis.campaigns.measure import CLOCK_SHARE, Round, measured_rounds, own_over_wall
from analysis.campaigns.systems import SYSTEMS, asked_samples, have_equal_updates, samples_between_validations
from analysis.reporting import figures
from analysis.reporting.results import (
    INDEPENDENT,
    RATES,
    REPETITIONS,
    Experiment,
    interval,
    is_shipped,
    of_seeds,
    ratios,
)
from analysis.reporting.tables import plus_minus, quality_table, time_reached, with_interval
from recipe.errors import InputError
from recipe.training.pacing import BACKWARD_OVER_FORWARD

FAIR = ("ddp", "ddp-fp16")
"""Systems of DDP that send whole gradients, once per update, of the same global batch as a swarm's."""
COMPARED = (*FAIR, "ddp-powersgd")
"""Systems that a swarm's speed is compared with. PowerSGD sends few bytes, as `topk` does."""


def reproduction(experiment: Experiment) -> str:
    """The command that repeats the experiment, its duration, and how many of its cells are not in this report."""
    command = f"Get it again: python -m analysis {' '.join(experiment.grid['command'])}"
    if "seconds" in experiment.cells and experiment.cells["seconds"].notna().any():
        command += f" (these cells took {experiment.cells['seconds'].sum() / 3600:.1f} hours)"
    if not is_shipped(experiment.grid):
        return command
    changes = experiment.grid.get("changes", {})  # earlier versions did not note them
    repetitions = int(experiment.cells["repetition"].max())
    try:
        asked = list(load_grid(experiment.name).cells(repetitions, **changes))
    except InputError:  # the experiment of this version cannot be run with those changes
        return command
    done = list(experiment.cells["cell"])
    if not (missing := sum(cell not in done for cell in asked)):
        return command
    return f"{command}. It runs {len(asked)} cells now; {missing} of them were not measured for this report."


def paced_rates(experiment: Experiment) -> list[float]:
    """Samples per second of the pretended devices; empty if computing was true."""
    return sorted({cell.paced_samples_per_second for cell in experiment.cells["cell"]} - {None})


def lost_overlap(experiment: Experiment) -> str | None:
    """A paragraph on what pacing takes from DDP; None if DDP did not run with several paced peers."""
    if not (shares := lost_shares(experiment)):
        return None
    return (
        "The pretended time passes before a backward pass, when DDP has nothing to send yet. A device could send while "
        "it computes the last backward pass of an update, all but the bucket that is ready last. So DDP's updates "
        f"would take {100 * max(shares):.1f} % less time here at most: that is this backward pass over an update."
    )


def lost_shares(experiment: Experiment) -> list[float]:
    """For each run of several paced peers with DDP, the time of a micro-batch's backward pass over that of the
    update."""
    cells = experiment.valid[experiment.valid["system"].isin(FAIR) & (experiment.valid["peers"] > 1)]
    backward = BACKWARD_OVER_FORWARD / (1 + BACKWARD_OVER_FORWARD)
    return [
        backward * cell.batch_size / min(cell.paced_rates) / seconds
        for cell, seconds in zip(cells["cell"], cells["step_seconds"], strict=True)
        if cell.paced_rates
    ]


def machine_drift(experiment: Experiment) -> str | None:
    """A sentence on how much the machine's own speed varied between cells; None if that is not known."""
    if "machine_gflops" in experiment.valid and experiment.valid["machine_gflops"].notna().any():
        speeds = experiment.valid["machine_gflops"].dropna().explode()
        return (
            "The machine itself was not always equally fast: a matrix product on all cores before and after each cell "
            f"made {speeds.min():.0f} to {speeds.max():.0f} GFLOP/s (median {speeds.median():.0f})."
        )
    cells = experiment.valid[experiment.valid["paced_samples_per_second"].isna()]
    cells = cells[cells["system"].isin(FAIR) & (cells["compute_seconds"] > 0)]
    if len(cells) < 2:
        return None
    rates = cells["samples_per_step"] / cells["compute_seconds"]
    return (
        f"The machine itself was not always equally fast: without any averaging, the peers of the DDP cells computed "
        f"{rates.min():.1f} to {rates.max():.1f} samples/s (median {rates.median():.1f}, n = {len(cells)})."
    )


def order_of_runs(experiment: Experiment) -> str | None:
    """A paragraph on how far apart the systems of a repetition ran, and on fixed orders; None with one system."""
    cells = experiment.valid[experiment.valid["all_rounds"].map(bool).astype(bool)]
    cells = cells.assign(first_end=[rounds[0]["ended_at"] for rounds in cells["all_rounds"]]).sort_values("first_end")
    together = cells.groupby([experiment.axis, *(name for name in REPETITIONS if name in cells)])
    blocks = [rows for _, rows in together if rows["system"].nunique() > 1]
    if not blocks:
        return None
    minutes = max(rows["first_end"].iloc[-1] - rows["first_end"].iloc[0] for rows in blocks) / 60
    said = f"The systems of a repetition ran up to {minutes:.0f} min apart"
    if not (fixed := _fixed_orders(experiment.axis, blocks)):
        return f"{said}."
    label = figures.LABELS.get(experiment.axis, experiment.axis)
    # If the order is the same at all values, the values are not listed.
    everywhere = not experiment.axes or sum(map(len, fixed.values())) == experiment.valid[experiment.axis].nunique()
    orders = [
        order if everywhere and len(fixed) == 1 else f"at {label} = {', '.join(map(str, values))}: {order}"
        for order, values in fixed.items()
    ]
    return (
        f"{said}, and these in one order each time: {'; '.join(orders)}. So a machine whose speed drifts meanwhile "
        "favours the same ones each time, which no interval shows."
    )


def _fixed_orders(axis: str, blocks: Sequence[pd.DataFrame]) -> dict[str, list[Any]]:
    """Orders of systems that repeated at a value of the axis and were never reversed, each with its values."""
    found: dict[str, list[Any]] = {}
    for value in dict.fromkeys(rows[axis].iloc[0] for rows in blocks):
        pairs = _always_before([rows for rows in blocks if rows[axis].iloc[0] == value])
        if order := _said_order(pairs):
            found.setdefault(order, []).append(value)
    return found


def _always_before(blocks: Sequence[pd.DataFrame]) -> list[tuple[str, str]]:
    """Pairs of systems of which the first ran earlier in more than one repetition, and later in none."""
    times: Counter[tuple[str, str]] = Counter()
    for rows in blocks:
        times.update(combinations(dict.fromkeys(rows["system"]), 2))
    return [(first, last) for (first, last), number in times.items() if number > 1 and (last, first) not in times]


def _said_order(pairs: Sequence[tuple[str, str]]) -> str:
    """The pairs of `_always_before` in words, without those that follow from two others."""
    after: dict[str, list[str]] = {}
    for first, last in pairs:
        if not any((first, between) in pairs and (between, last) in pairs for between in SYSTEMS):
            after.setdefault(first, []).append(SYSTEMS[last].label)
    return "; ".join(f"{SYSTEMS[first].label} before {' and '.join(lasts)}" for first, lasts in after.items())


def beside_the_clock(experiment: Experiment) -> str | None:
    """A paragraph on runs whose updates took other seconds by their own account than by the clock; None without any.

    Runs of later versions are invalid then.
    """
    shares, away = [], []
    for cell, items in zip(experiment.valid["cell"], experiment.valid["all_rounds"], strict=True):
        names = {field.name for field in fields(Round)}
        rounds = measured_rounds(cell, [Round(**{name: item[name] for name in names & item.keys()}) for item in items])
        if abs((share := own_over_wall(rounds)) - 1) <= CLOCK_SHARE:
            continue
        shares.append(share)
        if (every := samples_between_validations(cell) // asked_samples(cell)) > 3:  # else each is next to one
            # The last update is validated as well.
            marked = [replace(item, follows_validation=item.step % every == 1) for item in rounds[:-1]]
            away.append(own_over_wall(marked))
    if not shares:
        return None
    said = (
        f"By their own account, updates of {len(shares)} of {len(experiment.valid)} runs took {_percent(shares)} of "
        "the time between their ends. "
    )
    if not away or max(abs(share - 1) for share in away) > 0.01:
        return f"{said}The reason is not known."
    where = "" if len(away) == len(shares) else f" (in the {len(away)} of them that have updates away from validations)"
    return (
        f"{said}The version that measured them noted the end of an update after the validation that followed it: away "
        f"from validations it was {_percent(away)}{where}. Speeds go by the account of the updates, so they are not "
        "affected."
    )


def _percent(shares: Sequence[float]) -> str:
    return f"{span([100 * share for share in shares])} %"


def lost_warm_up(experiment: Experiment) -> str | None:
    """A paragraph on swarms that learnt without the warm-up that all others had; None if there are none."""
    found: dict[int, list[str]] = {}
    for cell, own in zip(experiment.cells["cell"], _own_warmup_steps(experiment), strict=True):
        asked = cell.full_recipe().warmup_steps
        if cell.target_accuracy is not None and asked > 1 >= own:
            found.setdefault(asked, []).append(SYSTEMS[cell.system].label)
    if not found:
        return None
    said = "; ".join(f"{', '.join(dict.fromkeys(labels))} ({asked} updates)" for asked, labels in found.items())
    return (
        f"Measured without the recipe's warm-up, which all others had: {said}. A part of it, rounded down, was one "
        "update, and a warm-up of one is none. So these times and accuracies show local steps and a high learning "
        "rate from the first step on together. Since then it is rounded up."
    )


def _own_warmup_steps(experiment: Experiment) -> Iterable[int]:
    """Warm-up steps of each cell, in its system's own updates; the version that did not note them rounded down."""
    noted = experiment.cells.get("own_warmup_steps", [None] * len(experiment.cells))
    for cell, own in zip(experiment.cells["cell"], noted, strict=True):
        local = SYSTEMS[cell.system].local_steps if cell.system.startswith("swarm") else 0
        yield cell.full_recipe().warmup_steps // max(1, local) if pd.isna(own) else int(own)


def answer(experiment: Experiment) -> list[str]:
    """Paragraphs on the speed of each system, and over `COMPARED`, at the first and the last value of the axis."""
    summary = experiment.summary("samples_per_second").dropna(subset=["mean"])
    if summary.empty:
        return [" ".join(["No cell was valid: see the reasons below.", *_failures(experiment)])]
    values = summary[experiment.axis].drop_duplicates().sort_values()
    label = figures.LABELS.get(experiment.axis, experiment.axis)
    paragraphs = []
    for value in dict.fromkeys((values.iloc[0], values.iloc[-1])):
        begin = f"At {label} = {value}" if experiment.axes else "Speed"
        paragraphs.append(f"{begin}: {_rates(experiment, value)}.")
        if found := _comparisons(experiment, value):
            paragraphs.append(" ".join(found))
    paragraphs += _failures(experiment)
    if summary["n"].max() < 3:
        paragraphs.append("Fewer than three repetitions: a first impression, no result.")
    return paragraphs if experiment.axes else [*filter(None, [learned(experiment)]), *paragraphs]


def _failures(experiment: Experiment) -> list[str]:
    """A sentence on each system with runs that failed by themselves, because these are in no mean."""
    found = experiment.cells.groupby("system")[["failed", "runs"]].sum()
    return [
        f"Of {SYSTEMS[system].label}, {found['failed'][system]} of {found['runs'][system]} runs failed by themselves."
        for system in experiment.systems
        if found["failed"][system]
    ]


def results_table(experiments: Sequence[Experiment]) -> pd.DataFrame:
    """A table with a row for each swarm of each experiment: how many times as fast as `COMPARED`, in both rates.

    An update of several local steps has several times the samples, so updates are not compared there.
    """
    rows = []
    for experiment in experiments:
        for system, against in _against_ddp(experiment).items():
            row = {"experiment": experiment.name, "over": _label(experiment) if experiment.axes else "–"}
            row |= {"system": SYSTEMS[system].label, "peers": span(experiment.valid["peers"])}
            row["each paced to, samples/s"] = ", ".join(f"{rate:g}" for rate in paced_rates(experiment)) or "not paced"
            row |= {f"{SYSTEMS[baseline].label}: {name}": None for baseline in COMPARED for name in RATES}
            rows.append(row | against)
    return pd.DataFrame(rows).dropna(axis="columns", how="all")  # few experiments have DDP of few bytes


def _against_ddp(experiment: Experiment) -> dict[str, dict[str, str]]:
    """For each swarm, by column of the table: the mean ratios, and in how many settings a difference is shown."""
    found: dict[str, dict[str, str]] = {}
    for system in (name for name in experiment.systems if name.startswith("swarm")):
        for baseline, (name, rate) in product(COMPARED, RATES.items()):
            if rate == "updates_per_second" and not have_equal_updates(system, baseline):
                continue
            intervals = [interval(values) for _, values in ratios(experiment, system, baseline, rate).items()]
            if means := [mean for mean, _, n in intervals if n]:
                faster = sum(mean - half_width > 1 for mean, half_width, _ in intervals)
                slower = sum(mean + half_width < 1 for mean, half_width, _ in intervals)
                shown = f"shown to be faster in {faster} of {len(means)} settings, slower in {slower}"
                column = f"{SYSTEMS[baseline].label}: {name}"
                found.setdefault(system, {})[column] = f"{span(means, 2)}; {shown}"
    return found


def span(values: Iterable[float], digits: int = 0) -> str:
    """The least and the greatest of the values."""
    least, greatest = (f"{found(values):.{digits}f}" for found in (min, max))
    return least if least == greatest else f"{least} to {greatest}"


def _label(experiment: Experiment) -> str:
    return figures.LABELS.get(experiment.axis, experiment.axis)


def time_to_accuracy(experiment: Experiment) -> str | None:
    """A paragraph on the seconds to the target accuracy, at the first and the last value of the axis."""
    cells = experiment.valid
    if quality_table(experiment) is None or cells["seconds_to_accuracy"].isna().all():
        return None
    values = sorted(cells[experiment.axis].unique())
    said = []
    for value in dict.fromkeys((values[0], values[-1])):
        here = cells[cells[experiment.axis] == value]
        times = "; ".join(
            f"{SYSTEMS[system].label} {time_reached(here[here['system'] == system])}"
            for system in experiment.systems
            if (here["system"] == system).any()
        )
        said.append(f"At {_label(experiment)} = {value}: {times}" if experiment.axes else times)
        said += _times_compared(experiment, here)
    target = cells["target_accuracy"].dropna().iloc[0]
    begin = f"Seconds of training until {target:.0%} of the validation samples were right"
    rule = (
        f"Validations do not count{_seconds_of_validations(experiment)}, and an update that follows one counts like "
        "the others do in the mean; where each follows one, as with four local steps, they all count, and what of an "
        "average went on meanwhile was free."
    )
    if uneven := _uneven_validations(experiment):
        rule = f"{rule} {uneven}"
    return f"{begin}{'. ' if experiment.axes else ': '}{'. '.join(said)}. {rule}"


def _times_compared(experiment: Experiment, cells: pd.DataFrame) -> list[str]:
    """Sentences, without full stops, that compare the times of every swarm with those of `FAIR`, seed by seed."""
    seeds = [name for name in INDEPENDENT if name in cells] or ["target_accuracy"]  # one pair, if all have one seed
    times = cells.groupby([*seeds, "system"])["seconds_to_accuracy"].mean().unstack("system")
    found = []
    for system, baseline in product((name for name in experiment.systems if name.startswith("swarm")), FAIR):
        if not {system, baseline} <= set(times):
            continue
        mean, half_width, n = interval(times[baseline] / times[system])
        if n:
            unclear = "" if abs(mean - 1) > half_width else ", not shown"
            found.append(
                f"Seed by seed, {SYSTEMS[baseline].label} took {plus_minus(mean, half_width, 2)} times the seconds of "
                f"{SYSTEMS[system].label} (n = {n}{unclear})"
            )
    return found


def _seconds_of_validations(experiment: Experiment) -> str:
    """The duration of a validation, from the quickest to the slowest run of each system.

    Empty if no run went on after a validation, or if the version that measured it did not note that.
    """
    found: dict[str, list[float]] = {}
    for system, rounds in zip(experiment.valid["system"], experiment.valid["all_rounds"], strict=True):
        if number := sum(item.get("follows_validation", False) for item in rounds):
            wall = rounds[-1]["ended_at"] - rounds[0]["ended_at"]
            found.setdefault(system, []).append((wall - sum(item["seconds"] for item in rounds[1:])) / number)
    said = [
        f"{span([max(0.0, one) for one in seconds], 1)} s with {SYSTEMS[system].label}"
        for system, seconds in found.items()
    ]
    return f" (one took {'; '.join(said)})" if said else ""


def _uneven_validations(experiment: Experiment) -> str:
    """A warning if systems were validated at different intervals; else empty.

    A system that is validated more often is seen to reach an accuracy sooner.
    """
    found: dict[tuple[int, int], dict[int, list[str]]] = {}
    for system, cell in zip(experiment.valid["system"], experiment.valid["cell"], strict=True):
        recipe = cell.full_recipe()
        asked = found.setdefault((recipe.target_batch_size, recipe.validate_every_steps), {})
        asked.setdefault(samples_between_validations(cell), []).append(SYSTEMS[system].label)
    uneven = next((intervals for intervals in found.values() if len(intervals) > 1), {})
    often = [
        f"every {samples:,} samples: {', '.join(dict.fromkeys(labels))}" for samples, labels in sorted(uneven.items())
    ]
    return f"Validations came {'; '.join(often)}. Compare times of different intervals with care." if often else ""


def _rates(experiment: Experiment, value: object) -> str:
    """The rates of every system at a value of the axis, the fastest first.

    Updates per second are left out where an update is asked to have another number of samples than one of `FAIR`.
    """
    samples, updates = (
        (rows := experiment.summary(rate))[rows[experiment.axis] == value].set_index("system")
        for rate in ("samples_per_second", "updates_per_second")
    )
    said = []
    for row in samples.dropna(subset=["mean"]).sort_values("mean", ascending=False).itertuples():
        rates = f"{plus_minus(row.mean, row.half_width, 1)} samples/s"
        if have_equal_updates(row.Index, FAIR[0]):
            mean, half_width = updates.loc[row.Index, ["mean", "half_width"]]
            digits = max(0, 2 - math.floor(math.log10(mean)))  # three figures: an update may take a minute
            rates += f", {plus_minus(mean, half_width, digits)} updates/s"
        said.append(f"{SYSTEMS[row.Index].label} {rates} (n = {row.n})")
    return "; ".join(said)


def _comparisons(experiment: Experiment, value: object) -> list[str]:
    """Sentences that compare every swarm with `COMPARED` in both rates; if an interval includes 1, no difference is
    shown."""
    found = []
    for system in (name for name in experiment.systems if name.startswith("swarm")):
        against = []
        for baseline in COMPARED:
            rates = [name for name in RATES if name == "samples/s" or have_equal_updates(system, baseline)]
            said = []
            for name in rates:
                mean, half_width, n = interval(ratios(experiment, system, baseline, RATES[name]).get(value, []))
                if n:
                    unclear = "" if abs(mean - 1) > half_width else " (not shown)"
                    said.append(f"{plus_minus(mean, half_width, 2)} times the {name}{unclear}")
            if said:
                against.append(f"{' and '.join(said)} of {SYSTEMS[baseline].label} (n = {n})")
        if against:
            label = SYSTEMS[system].label
            found.append(f"{label[0].upper()}{label[1:]} made {'; and '.join(against)}.")
    return found


def learned(experiment: Experiment) -> str:
    """A sentence on the accuracy of every system where nothing else varies; empty if none was asked for."""
    if quality_table(experiment) is None:
        return ""
    cells = experiment.valid.dropna(subset=["top1"])
    found = [(system, *interval(of_seeds(own, "top1"))) for system, own in cells.groupby("system", sort=True)]
    shown = "; ".join(
        f"{SYSTEMS[system].label} {with_interval(100 * mean, 100 * half_width, n)}"
        for system, mean, half_width, n in sorted(found, key=lambda row: -row[1])
    )
    return f"Validation accuracy at the end, in percent: {shown}."
