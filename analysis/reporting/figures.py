"""Draws the figures of a report."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.transforms import ScaledTranslation

from analysis.campaigns.cells import Cell
from analysis.campaigns.payload import num_parameters
from analysis.campaigns.systems import SYSTEMS
from analysis.reporting.results import Experiment, interval, limits

LABELS = {
    "rtt_ms": "round-trip time, ms",
    "bandwidth_mbps": "bandwidth of each link, Mbit/s",
    "peers": "peers",
    "target_batch_size": "samples per update",
    "learning_rate": "learning rate",
    "paced_samples_per_second": "samples per second of each peer alone",
    "kill_at_step": "killed",
    "last_times_slower": "times that the last peer is slower",
    "topology": "network",
    "congestion_control": "TCP's congestion control",
}
LOGARITHMIC = ("bandwidth_mbps", "target_batch_size", "learning_rate")
UNORDERED = ("topology", "kill_at_step", "congestion_control")
_OFTEN = ("ddp", "ddp-fp16", "hivemind-tuned", "swarm-local-1-fp16", "swarm-local", "swarm-fp16", "hivemind")
_TAB20 = matplotlib.colormaps["tab20"].colors  # each colour twice, the second time pale
_TAB20B = matplotlib.colormaps["tab20b"].colors  # five others in four shades each
_PALETTE = _TAB20[::2] + _TAB20[1::2] + _TAB20B[::4] + _TAB20B[2::4]
_NAMES = tuple(dict.fromkeys((*_OFTEN, *SYSTEMS)))
COLOURS = dict(zip(_NAMES, _PALETTE[: len(_NAMES)], strict=True))
"""Colour of each system, the same in every figure. The systems that are shown most often have strong colours."""
PARTS = {"compute": "computing", "meeting": "matchmaking", "exchange": "transfer", "other": "waiting, apply, the rest"}


def throughput(experiment: Experiment, folder: Path) -> Path:
    """Draws samples per second over the axis: each run, mean and 95 % interval, with the limits of the network."""
    figure, axes = _figure()
    _means(axes, experiment, "samples_per_second")
    if shows_limits(experiment):
        bounds = bound_rows(experiment)
        for name, style in (("synchronous", ":"), ("overlapped", "--")):
            drawn = {"linestyle": style, "color": "grey", "label": f"limit, {name}, fp16"}
            if experiment.axes:
                axes.plot(_positions(bounds[experiment.axis]), bounds[name], **drawn)
            else:
                axes.axvline(bounds[name].iloc[0], **drawn)
    _finish(axes, experiment, "samples per second")
    return _save(figure, folder / f"{experiment.name}-throughput.png")


def shows_limits(experiment: Experiment) -> bool:
    """Whether limits are drawn: as lines, which need two values of the axis, or across the bars where none varies."""
    known = bound_rows(experiment).get("synchronous", pd.Series(dtype=float)).notna().sum()
    return known >= (2 if experiment.axes else 1)


def bound_rows(experiment: Experiment) -> pd.DataFrame:
    """A table of what the peers compute `alone` at each value of the axis, and of the limits for an fp16 payload.

    Both are unknown where the number of peers changes, as a peer is killed or joins late.
    """
    valid = experiment.valid.dropna(subset=["samples_per_step"])
    rows = []
    for value, group in valid.groupby(experiment.axis, sort=True, dropna=False):
        cell = group.iloc[0]["cell"]
        samples = cell.full_recipe().target_batch_size
        is_constant = all(one.least_peers == one.peers for one in group["cell"])
        alone = 1 / seconds_per_sample(valid, cell) if is_constant else math.nan
        payload = 2 * num_parameters(cell)
        network = (cell.peers, cell.rtt_ms, cell.bandwidth_mbps)
        found = {} if cell.topology or math.isnan(alone) else limits(samples, samples / alone, payload, *network)
        rows.append({experiment.axis: value, "alone": alone, "synchronous": math.nan, "overlapped": math.nan, **found})
    return pd.DataFrame(rows)


def seconds_per_sample(cells: pd.DataFrame, cell: Cell) -> float:
    """Seconds per sample of all the cell's peers together while they only compute."""
    if cell.paced_rates:
        return 1 / sum(cell.paced_rates)
    small = cells["system"].map(lambda name: SYSTEMS[name].every_micro_batch)  # they update weights more often
    alike = cells[(cells["peers"] == cell.peers) & (cells["compute_seconds"] > 0) & ~small]
    overlaps = alike["system"].map(lambda name: SYSTEMS[name].overlaps)  # their seconds contain more than computing
    alike = alike if overlaps.all() else alike[~overlaps]
    return float((alike["compute_seconds"] / alike["samples_per_step"]).median())


def parts(experiment: Experiment, folder: Path) -> Path:
    """Draws where the time goes, as stacked bars.

    Times are per sample, because updates of different systems have different numbers of samples.
    """
    table = part_rows(experiment)
    table[[*PARTS]] = 1e3 * table[[*PARTS]].div(table["samples"], axis="index")
    figure, axes = _figure()
    names = [SYSTEMS[row.system].label + (f", {row.value}" if experiment.axes else "") for row in table.itertuples()]
    left = pd.Series(0.0, index=table.index)
    for part, label in PARTS.items():
        axes.barh(names, table[part], left=left, label=label)
        left = left + table[part]
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of an update per sample in it")
    axes.set_xlim(0, 1.05 * left.max())
    figure.legend(loc="outside upper center", ncol=len(PARTS))
    figure.set_size_inches(9, 1.5 + 0.32 * len(names))
    return _save(figure, folder / f"{experiment.name}-parts.png")


def part_rows(experiment: Experiment) -> pd.DataFrame:
    """Mean seconds of the parts of an update, by system and value of the axis, for systems that report them.

    `meeting` and `exchange` count only time without computing. `communication` is all time of both, and `hidden` its
    part beside computing.
    """
    rows = []
    for (system, value), group in experiment.valid.groupby(["system", experiment.axis], sort=True, dropna=False):
        means = {
            part: _mean(group, f"{part}_seconds") for part in ("step", "compute", "meeting", "exchange", "waiting")
        }
        if means["compute"] is None:
            continue
        known = {part: mean or 0.0 for part, mean in means.items()}
        communication = {part: known[part] for part in ("meeting", "exchange")}
        row = {"system": system, "value": value, "samples": _mean(group, "samples_per_step") or math.nan}
        row |= communication | {"compute": known["compute"], "hidden": 0.0}
        row["communication"] = sum(communication.values())
        if SYSTEMS[system].overlaps:
            row |= {"compute": known["step"] - known["waiting"], "meeting": 0.0, "exchange": 0.0}
            row["hidden"] = max(0.0, row["communication"] - known["waiting"])
        row["other"] = max(0.0, known["step"] - row["compute"] - row["meeting"] - row["exchange"])
        rows.append(row)
    order = {system: number for number, system in enumerate(experiment.systems)}
    columns = ["system", "value", "samples", *PARTS, "communication", "hidden"]
    return pd.DataFrame(rows, columns=columns).sort_values("system", key=lambda names: names.map(order), kind="stable")


def _mean(group: pd.DataFrame, column: str) -> float | None:
    mean = interval(group[column])[0] if column in group else math.nan
    return None if math.isnan(mean) else mean


def time_to_accuracy(experiment: Experiment, folder: Path) -> Path:
    """Draws the seconds of training until the target accuracy over the axis, with mean and 95 % interval."""
    figure, axes = _figure()
    _means(axes, experiment, "seconds_to_accuracy")
    target = experiment.valid["target_accuracy"].dropna().iloc[0]
    _finish(axes, experiment, f"seconds of training to {100 * target:g} % accuracy")
    return _save(figure, folder / f"{experiment.name}-accuracy.png")


def memory(samples: Sequence[Mapping[str, Any]], file: Path) -> Path:
    """Draws the memory of each peer, in megabytes, over the rounds."""
    figure, axes = _figure()
    steps = [sample["step"] for sample in samples]
    for peer, style in zip(samples[0]["pss_mb"], itertools.cycle(("-", "--"))):  # peers may lie on each other
        axes.plot(steps, [sum(sample["pss_mb"][peer].values()) for sample in samples], style, label=peer)
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.set_xlabel("rounds")
    axes.set_ylabel("memory of a peer, MB (proportional set size)")
    axes.legend()
    return _save(figure, file)


def predictions(table: pd.DataFrame, file: Path) -> Path:
    """Draws predicted against measured samples per second; on the diagonal they are equal."""
    figure, axes = _figure()
    axes.scatter(table["measured"], table["predicted"], label="a setting, predicted from the others")
    top = 1.1 * max(table["measured"].max(), table["predicted"].max())
    axes.plot([0, top], [0, top], color="grey", linewidth=1, label="predicted as measured")
    axes.set_xlabel("measured samples per second")
    axes.set_ylabel("predicted samples per second")
    axes.legend()
    return _save(figure, file)


def forest(comparisons: Mapping[str, Sequence[Any]], folder: Path) -> Path:
    """Draws the ratios of every setting, of updates/s (filled) and samples/s (hollow); grey if no difference is
    shown."""
    rows = [(label, row) for label, of_system in comparisons.items() for row in of_system]
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.3 * (len(rows) + len(comparisons))), layout="constrained")
    places, names, place, shown_labels = [], [], 0.0, set()
    for label, row in rows:
        if label not in shown_labels:
            shown_labels.add(label)
            places.append(place)
            names.append(label.upper())
            place += 1
        mean, half_width = row.means["updates_per_second"], row.half_widths["updates_per_second"]
        colour = "tab:blue" if row.verdict("updates_per_second") != "not shown" else "grey"
        reach = 0.0 if math.isnan(half_width) else half_width
        axes.errorbar(mean, place, xerr=reach, marker="o", capsize=3, color=colour)
        axes.scatter(row.means["samples_per_second"], place, s=30, facecolors="none", edgecolors=colour)
        places.append(place)
        names.append(f"{row.setting} (n = {row.n})")
        place += 1
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(places, names, fontsize=8)
    axes.set_ylim(place - 0.5, -0.5)  # the first one on top
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("times as fast as DDP: updates per second (filled), samples per second (hollow)")
    return _save(figure, folder / "answer.png")


def _positions(values: pd.Series) -> list:
    return [str(value) for value in values] if _has_names(values) else list(values)


def _has_names(values: pd.Series) -> bool:
    """Whether some values are not finite numbers: "none" or infinity stand for no limit at all."""
    return not pd.api.types.is_numeric_dtype(values) or not values.abs().max() < math.inf


def _figure():
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    axes.grid(alpha=0.3)
    return figure, axes


def _means(axes, experiment: Experiment, column: str) -> None:
    """Draws every run as a dot, and the systems' means with 95 % intervals; bars if only the system varies."""
    summary = experiment.summary(column).dropna(subset=["mean"])
    systems = [system for system in experiment.systems if system in set(summary["system"])]
    for number, system in enumerate(systems):
        rows, runs = (table[table["system"] == system] for table in (summary, experiment.valid))
        label, colour = SYSTEMS[system].label, COLOURS[system]
        if experiment.axes:
            x, each = _positions(rows[experiment.axis]), _positions(runs[experiment.axis])
            line = "none" if experiment.axis in UNORDERED else "solid"  # there is nothing between two networks
            # Systems stand side by side, else one hides the interval of another.
            points = (number - (len(systems) - 1) / 2) * (16 if experiment.axis in UNORDERED else 5)
            beside = axes.transData + ScaledTranslation(points / 72, 0, axes.figure.dpi_scale_trans)
            bars = {"marker": "o", "capsize": 3, "linestyle": line, "transform": beside}
            axes.errorbar(x, rows["mean"], rows["half_width"], label=label, color=colour, **bars)
            highest = [*(rows["mean"] + rows["half_width"].fillna(0.0)), *runs[column]]
            axes.plot([*x, *each], highest, linestyle="none")  # the scale follows only what stands at its place
            axes.scatter(each, runs[column], s=12, color=colour, alpha=0.5, transform=beside)
        else:
            axes.barh([label], rows["mean"], xerr=rows["half_width"], capsize=3, color=colour)
            axes.scatter(runs[column], [label] * len(runs), s=12, color="black", alpha=0.5, zorder=3)


def _finish(axes, experiment: Experiment, quantity: str) -> None:
    if not experiment.axes:
        axes.invert_yaxis()
        axes.set_xlabel(quantity)
        axes.set_xlim(left=0)
        if axes.get_legend_handles_labels()[1]:
            axes.figure.legend(loc="outside lower center")
        return
    axes.set_xlabel(LABELS.get(experiment.axis, experiment.axis))
    axes.set_ylabel(quantity)
    axes.set_ylim(bottom=0)
    if experiment.axis in LOGARITHMIC and not _has_names(experiment.cells[experiment.axis]):
        axes.set_xscale("log")
    if _has_names(experiment.cells[experiment.axis]):
        axes.margins(x=0.25)
    else:
        measured = sorted(set(experiment.cells[experiment.axis]))
        axes.set_xticks(measured, [f"{value:g}" for value in measured])
        axes.set_xticks([], minor=True)
    axes.figure.legend(loc="outside lower center", ncols=3)
    axes.figure.set_size_inches(9, 6)


def _save(figure, file: Path) -> Path:
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return file
