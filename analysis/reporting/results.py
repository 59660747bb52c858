"""Finished experiments as tables, with statistics and limits."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.campaigns.cells import Cell, load_grid, shipped_grids
from analysis.campaigns.measure import runs_failed_by_themselves, tries_of
from analysis.campaigns.payload import too_few_bytes
from analysis.campaigns.statistics import interval
from analysis.campaigns.systems import SYSTEMS
from analysis.reporting.archive import Records
from recipe.presets import preset
from recipe.registry import DIGITS_FOLDS

_SETTINGS = (
    "peers",
    "rtt_ms",
    "bandwidth_mbps",
    "jitter_ms",
    "loss",
    "congestion_control",
    "topology",
    "last_times_slower",
    "paced_samples_per_second",
    "recipe",
    "batch_size",
    "steps",
    "warm_up_steps",
)
_NUMBERS = (
    *("samples_per_second", "step_seconds", "samples_per_step", "bytes_per_sample"),
    *("compute_seconds", "meeting_seconds", "exchange_seconds", "waiting_seconds"),
    *("top1", "macro_f1", "precision", "recall", "seconds_to_accuracy"),
)
"""Numbers that a failed cell lacks."""

REPETITIONS = ("repetition", "seed", "dataset")
"""Columns that are no settings, but tell repetitions apart: systems are compared within each. Of data sets, only the
folds of one vary in an experiment."""
INDEPENDENT = ("seed", "dataset")
"""Those of `REPETITIONS` in which runs have to differ for their accuracies to be independent."""
RATES = {"updates/s": "updates_per_second", "samples/s": "samples_per_second"}
"""Columns of rates, by their names in tables."""


class Experiment:
    """The results of an experiment, which asks one question.

    `cells` has a row for each cell: its settings (with changes of the recipe), its numbers, `problems` and the measured
    rounds. `tries` is how often it ran, at least. `runs` counts those on a fit machine, and `failed` those of them that
    failed by themselves. `axes` names the settings that vary, beside system and `REPETITIONS`.

    Args:
        records: the records of its cells.
    """

    def __init__(self, records: Records) -> None:
        self.grid, self.machine = records.grid, records.machine
        changed = sorted({name for cell, _ in records.cells.values() for name in cell.changes})
        rows = [_row(name, cell, result, changed) for name, (cell, result) in records.cells.items()]
        self.cells = pd.DataFrame(rows).astype(dict.fromkeys(_NUMBERS, float))
        self.cells["problems"] = [
            list(dict.fromkeys([*result["problems"], *too_few_bytes(cell, result)]))
            for cell, result in records.cells.values()
        ]
        results = [result for _, result in records.cells.values()]
        judged = zip(results, self.cells["problems"], strict=True)
        self.cells["failed"] = [runs_failed_by_themselves(result | {"problems": found}) for result, found in judged]
        self.cells["tries"] = [tries_of(result) for result in results]
        self.cells["runs"] = self.cells["failed"] + (self.cells["problems"].map(len) == 0)
        names = [*_SETTINGS, *(name for name in changed if name not in REPETITIONS), "kill_at_step"]
        self.cells["updates_per_second"] = 1 / self.cells["step_seconds"]
        self.axes = [name for name in names if self.cells[name].map(str).nunique() > 1]
        killed = self.cells["kill_at_step"]
        self.cells["kill_at_step"] = ["none" if pd.isna(step) else f"one after update {step:.0f}" for step in killed]
        for name in self.axes:
            if self.cells[name].isna().any():  # a limit that is not set
                self.cells[name] = self.cells[name].fillna("none" if self.cells[name].dtype == object else math.inf)

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return self.grid["name"]

    @property
    def question(self) -> str:
        """The experiment's question in its present words, which may have changed since a shipped experiment ran."""
        return question_of(self.grid)

    @property
    def asked(self) -> str:
        """Name of the whole experiment, of which this may be a part."""
        return self.grid.get("experiment", self.name)

    @property
    def axis(self) -> str:
        """The setting on the axis of figures and in the first column of tables: if none varies, that of the network."""
        if self.axes:
            return self.axes[0]
        return "topology" if self.cells["topology"].notna().any() else "rtt_ms"

    @property
    def valid(self) -> pd.DataFrame:
        """Cells without a problem."""
        return self.cells[self.cells["problems"].map(len) == 0]

    @property
    def failed_runs(self) -> pd.DataFrame:
        """Number of runs on a fit machine, and of those that failed by themselves, by system and value of the axis.

        It has only rows where some have failed.
        """
        counts = self.cells.groupby(["system", self.axis], sort=True, dropna=False)[["failed", "runs"]].sum()
        return counts[counts["failed"] > 0].reset_index()

    @property
    def tries(self) -> dict[tuple[str, Any], int]:
        """Number of tries of the cells, at least, by system and value of the axis."""
        return self.cells.groupby(["system", self.axis], sort=True, dropna=False)["tries"].sum().to_dict()

    @property
    def computes_few_samples(self) -> bool:
        """Whether a pretended device left out most of its samples, so that accuracies mean nothing."""
        return any(cell.paced_rates and not cell.paced_all_samples for cell in self.cells["cell"])

    @property
    def systems(self) -> list[str]:
        """Names of the experiment's systems, in the order of `SYSTEMS`."""
        return [name for name in SYSTEMS if name in set(self.cells["system"])]

    def summary(self, column: str) -> pd.DataFrame:
        """Mean, half width of the 95 % interval and n of a column, by system and value of the axis."""
        groups = self.valid.groupby(["system", self.axis], sort=True, dropna=False)
        values = [(*key, *interval(_independent(cells, column))) for key, cells in groups]
        return pd.DataFrame(values, columns=["system", self.axis, "mean", "half_width", "n"])


def is_shipped(grid: dict[str, Any]) -> bool:
    """Whether the command ran a shipped experiment by its name; a part of one has another name."""
    return grid["command"][:2] == ["run", grid["name"]] and grid["name"] in shipped_grids()


def question_of(grid: dict[str, Any]) -> str:
    """The question of an experiment, or its name; for a shipped experiment, the question in its present file."""
    return load_grid(grid["name"]).question if is_shipped(grid) else grid["question"] or grid["name"]


def experiments_in(records: Records) -> list[Experiment]:
    """One experiment for each setting of the further axes: runs with another setting are no repetitions."""
    whole = Experiment(records)
    if len(whole.axes) < 2:
        return [whole]
    name, question = whole.name, whole.question
    found = []
    for values, rows in whole.cells.groupby(whole.axes[1:], sort=True):
        said = ", ".join(f"{axis} {_label(axis, value)}" for axis, value in zip(whole.axes[1:], values, strict=True))
        own = {"name": re.sub(r",? |/", "-", f"{name} {said}"), "question": f"{question} ({said})"}
        cells = {cell: records.cells[cell] for cell in rows["name"]}
        found.append(Experiment(replace(records, grid=records.grid | own | {"experiment": name}, cells=cells)))
    return found


def same_cells(records: Records, experiment: Experiment) -> Records:
    """The cells of another run that have the settings of this experiment, which may be a part of that run."""
    wanted = set(experiment.cells["fingerprint"])
    cells = {name: found for name, found in records.cells.items() if found[0].fingerprint in wanted}
    return replace(records, cells=cells)


def _label(axis: str, value: Any) -> str:
    """The value of an axis; of a topology's file, only its name, as in the name of a cell."""
    if axis == "topology":
        return Path(value).stem
    return value if isinstance(value, str) else f"{value:g}"


def _row(name: str, cell: Cell, result: dict[str, Any], changed: Sequence[str]) -> dict[str, Any]:
    own = {key: value for key, value in vars(cell).items() if key != "changes"}
    recipe = cell.full_recipe()
    fields = {key: getattr(recipe, key) for key in changed}
    # Settings come last, so that they win: a result has a loss as well, that of the validation.
    missing = dict.fromkeys((*_NUMBERS, "all_rounds"))
    identity = {"cell": cell, "name": name, "fingerprint": cell.fingerprint}
    return missing | result | own | fields | identity


def ratios(experiment: Experiment, system: str, baseline: str, rate: str = "samples_per_second") -> pd.Series:
    """A rate of a system over that of a baseline, by value of the axis: a list with one ratio per repetition.

    Both ran in the same repetition, so slow changes of the machine leave the ratio unchanged.
    `analysis.reporting.words.order_of_runs` says how far apart they ran.
    """
    pairs = _rates_within_a_repetition(experiment, rate).unstack("system")
    if system not in pairs or baseline not in pairs:
        return pd.Series(dtype=object)
    found = (pairs[system] / pairs[baseline]).dropna()
    return found.groupby(level=experiment.axis).agg(list)


def kept(experiment: Experiment, reference: Any) -> dict[tuple[str, Any], list[float]]:
    """Samples per second over those at the reference value of the axis: one ratio per repetition, by (system,
    value)."""
    rates = _rates_within_a_repetition(experiment).unstack(experiment.axis)
    found: dict[tuple[str, Any], list[float]] = {}
    for value in (value for value in rates if value != reference):
        for system, shares in (rates[value] / rates[reference]).dropna().groupby(level="system"):
            found[system, value] = list(shares)
    return found


def differences(experiment: Experiment, system: str, baseline: str, column: str) -> list[float]:
    """The difference of a number between a system and a baseline, for each seed (and fold) with which both ran.

    Repetitions with the same seed begin with the same weights, so their mean counts once. Their samples are the same
    only in DDP: each peer of a swarm visits them in its own order, which is another one in each run.
    """
    pairs = _rates_within_a_repetition(experiment, column).unstack("system")
    found = (pairs[system] - pairs[baseline]).dropna()
    if levels := [name for name in INDEPENDENT if name in found.index.names]:
        return list(found.groupby(level=levels).mean())
    return [found.mean()] if len(found) else []


def of_seeds(cells: pd.DataFrame, column: str) -> list[float]:
    """A number for each seed (and fold): the mean over repetitions with the same seed, which are not independent."""
    found = cells.dropna(subset=[column])
    if levels := [name for name in INDEPENDENT if name in cells]:
        return list(found.groupby(levels)[column].mean())
    return [found[column].mean()] if len(found) else []


def _independent(cells: pd.DataFrame, column: str) -> Sequence[float]:
    """The independent values of a column.

    Speeds of all runs are independent; times to an accuracy also depend on the seed.
    """
    return of_seeds(cells, column) if column == "seconds_to_accuracy" else cells[column]


def validated_over_trained(experiment: Experiment) -> float:
    """Samples for validation over those for training in each fold of a cross-validation; 0 if there are no folds."""
    folds = "dataset" in experiment.cells and set(experiment.cells["dataset"]) <= set(DIGITS_FOLDS)
    return 1 / (len(DIGITS_FOLDS) - 1) if folds else 0.0


def _rates_within_a_repetition(experiment: Experiment, rate: str = "samples_per_second") -> pd.Series:
    run = [name for name in REPETITIONS if name in experiment.valid]
    return experiment.valid.groupby([experiment.axis, *run, "system"])[rate].mean()


@cache
def training_samples(dataset: str, num_classes: int) -> int | None:
    """Training samples of a data set that needs no folder; None for others."""
    if dataset not in ("digits", "docstrings", "synthetic"):
        return None
    from recipe.registry import build_data  # imports torch

    data = build_data(replace(preset(dataset), num_classes=num_classes))
    data.setup()
    return data.num_train_samples


def transfer_seconds(payload: float, peers: int, bandwidth_mbps: float | None) -> float:
    """Time that the bytes of an all-reduce take on each host's link: each host sends 2 (N - 1) / N payloads.

    This is the least that any all-reduce moves (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms").
    """
    if not bandwidth_mbps or peers < 2:
        return 0.0
    return 2 * (peers - 1) / peers * payload * 8 / (bandwidth_mbps * 1e6)


def limits(samples: float, compute: float, payload: float, peers: int, rtt_ms: float, mbps: float | None) -> dict:
    """Samples per second if only computing, bytes and a round trip took time: averaging after computing, or beside it.

    DDP averages the gradients of some layers while it computes others, so it can be a little faster than the
    synchronous limit.

    Args:
        samples: samples of an update.
        compute: seconds that the peers compute for it.
        payload: bytes of a gradient vector.
        peers: number of peers.
        rtt_ms: round-trip time; an all-reduce has two phases of half a round trip each.
        mbps: rate of each host's link.
    """
    communication = transfer_seconds(payload, peers, mbps) + (rtt_ms / 1e3 if peers > 1 else 0.0)
    return {"synchronous": samples / (compute + communication), "overlapped": samples / max(compute, communication)}


def granularity(compute: float, communication: float) -> float:
    """Compute time over communication time of an update (Erben et al., VLDB 2024)."""
    return compute / communication if communication else math.inf


def doubling(compute: float, communication: float, rest: float = 0.0, overlaps: bool = False) -> float:
    """Highest speed-up by twice as many peers at the same samples per update: computing halves, the rest stays.

    Args:
        compute: seconds of computing in an update.
        communication: seconds of communication in an update, or beside computing if the system `overlaps`.
        rest: seconds of neither.
    """
    before, after = (max(half, communication) if overlaps else half + communication for half in (compute, compute / 2))
    return (before + rest) / (after + rest) if after + rest else math.nan


def verdict(speed_up: float) -> str:
    """Whether more peers pay, in words: they do from half of the largest possible gain on."""
    return "more peers pay" if speed_up >= 1.5 else "more peers do not pay"
