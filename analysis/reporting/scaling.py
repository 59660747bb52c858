"""Fits the round model on an experiment's settings, and tests it on a setting left out and on other experiments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from analysis.campaigns.payload import payload_bytes
from analysis.campaigns.systems import SYSTEMS
from analysis.reporting.figures import seconds_per_sample
from analysis.reporting.results import Experiment
from analysis.reporting.round_model import Measured, RoundCosts, Swarm, fit, simulate

TRUST = 0.10
"""Largest error, on cells outside the fit, at which the model is trusted."""


@dataclass(frozen=True)
class Prediction:
    """The fitted model of one system, and its errors."""

    system: str
    costs: RoundCosts
    """Costs of a round, fitted on all settings."""
    table: pd.DataFrame
    """`value` of the axis, `measured`, `predicted`, `error` (a share), `error of the mean` of the other settings, and
    communication."""
    recipe: str
    """Name of the recipe that was trained."""

    @property
    def worst_error(self) -> float:
        """Largest error of a setting that was left out of the fit."""
        return float(self.table["error"].abs().max(skipna=False))

    @property
    def worst_of_mean(self) -> float:
        """Largest error if the mean of the other settings is the prediction; the model has to be better."""
        return float(self.table["error of the mean"].abs().max())

    def is_trusted(self, elsewhere: pd.DataFrame) -> bool:
        """Whether the model is near the measurements, and nearer than a constant.

        Args:
            elsewhere: the result of `transfers`; rows of the same recipe have to be near as well.
        """
        alike = elsewhere[elsewhere["recipe"] == self.recipe]["error"].abs() if len(elsewhere) else [0.0]
        return max([self.worst_error, *alike]) <= TRUST and self.worst_error < self.worst_of_mean


def predict(experiment: Experiment, system: str) -> Prediction | None:
    """Predicts each setting by the model as fitted on the others; None with fewer than three settings."""
    if SYSTEMS[system].payload_bytes is None:
        return None
    cells = experiment.valid[(experiment.valid["system"] == system) & (experiment.valid["peers"] > 1)]
    settings = list(cells.groupby(experiment.axis, sort=True))
    if len(settings) < 3:
        return None
    rows = []
    for value, held_out in settings:
        known = experiment.valid.drop(held_out.index)
        others = [measured_setting(known, group) for other, group in settings if other != value]
        costs, asked = fit(others), measured_setting(known, held_out)
        predicted, measured = simulate(asked.swarm, costs), asked.samples_per_second
        mean = sum(other.samples_per_second for other in others) / len(others)
        numbers = {"measured": measured, "predicted": predicted, "error": predicted / measured - 1}
        numbers |= {"error of the mean": mean / measured - 1, "communication, s": asked.meeting + asked.exchange}
        numbers["predicted, s"] = costs.communication_seconds(asked.swarm, asked.swarm.peers)
        rows.append({"value": value, **numbers})
    everything = [measured_setting(experiment.valid, group) for _, group in settings]
    return Prediction(system, fit(everything), pd.DataFrame(rows), cells.iloc[0]["recipe"])


def transfers(prediction: Prediction, experiments: Iterable[Experiment]) -> pd.DataFrame:
    """Predicts the same system in other experiments by the fitted costs: a row for each setting, empty without any."""
    rows = []
    for experiment in experiments:
        cells = experiment.valid[experiment.valid["system"] == prediction.system]
        cells = cells[(cells["peers"] > 1) & cells["topology"].isna() & (cells["last_times_slower"] == 1)]
        untouched = cells["cell"].map(lambda cell: cell.kill_at_step is None).astype(bool)
        for value, group in cells[untouched].groupby(experiment.axis):
            asked = measured_setting(experiment.valid, group)
            predicted, measured = simulate(asked.swarm, prediction.costs), asked.samples_per_second
            setting = {"experiment": experiment.name, "recipe": group.iloc[0]["recipe"], "axis": experiment.axis}
            setting |= {"value": value, "n": len(group)}
            rows.append(setting | {"measured": measured, "predicted": predicted, "error": predicted / measured - 1})
    return pd.DataFrame(rows)


def measured_setting(known: pd.DataFrame, cells: pd.DataFrame) -> Measured:
    """Means over the repetitions of one setting.

    Args:
        known: cells from which the computing speed of the peers is known.
        cells: cells of the setting.
    """
    cell, system = cells.iloc[0]["cell"], SYSTEMS[cells.iloc[0]["system"]]
    everyone = seconds_per_sample(known, cell)
    columns = ["meeting_seconds", "exchange_seconds", "waiting_seconds", "step_seconds", "samples_per_step"]
    means = cells[columns].astype(float).mean().fillna(0.0)
    swarm = Swarm(
        peers=cell.peers,
        samples_per_update=cell.full_recipe().target_batch_size * max(1, system.local_steps),
        samples_per_second=1 / (everyone * cell.peers),
        micro_batch=cell.batch_size,
        payload_bytes=payload_bytes(cell),
        rtt_ms=cell.rtt_ms,
        up_mbps=cell.bandwidth_mbps,
        overlaps=system.overlaps,
    )
    computing = means["samples_per_step"] * everyone
    communication = means["meeting_seconds"] + means["exchange_seconds"]
    exposed = means["waiting_seconds"] if system.overlaps else communication
    other = max(0.0, means["step_seconds"] - computing - exposed)
    rate = float(cells["samples_per_second"].mean())
    return Measured(swarm, means["meeting_seconds"], means["exchange_seconds"], other, rate)
