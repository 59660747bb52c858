"""Fits the round model on half of an experiment's settings, predicts the others, and draws more peers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pandas as pd

from analysis.figures import seconds_per_sample
from analysis.results import Experiment, payload_bytes
from analysis.round_model import Measured, RoundCosts, Swarm, fit, home_swarm, simulate
from analysis.systems import SYSTEMS

TRUST = 0.10
"""Largest error on cells that the fit has not seen at which the model is believed."""
PEERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)


@dataclass(frozen=True)
class Prediction:
    """The model of one system."""

    system: str
    costs: RoundCosts
    table: pd.DataFrame
    """`value` of the axis, `measured`, `predicted`, `error` (a share), `fitted`."""
    like: Swarm
    """The swarm of the first setting."""

    @property
    def worst_error(self) -> float:
        """Largest error on settings that were not fitted; NaN where all were."""
        return float(self.table[~self.table["fitted"]]["error"].abs().max())

    @property
    def is_trusted(self) -> bool:
        """Whether it is known to be good enough."""
        return self.worst_error <= TRUST


def predict(experiment: Experiment, system: str) -> Prediction | None:
    """Every second setting, the first and the last included, is fitted; None with less than three settings."""
    if SYSTEMS[system].payload_bytes is None:
        return None
    cells = experiment.valid[experiment.valid["system"] == system]
    settings = [
        (value, measured_setting(experiment, group))
        for value, group in cells.groupby(experiment.axis, sort=True)
        if group.iloc[0]["peers"] > 1
    ]
    if len(settings) < 3:
        return None
    chosen = {0, len(settings) - 1} | set(range(0, len(settings) - 1, 2))
    costs = fit([measured for number, (_, measured) in enumerate(settings) if number in chosen])
    rows = []
    for number, (value, measured) in enumerate(settings):
        predicted = simulate(measured.swarm, costs)
        error = predicted / measured.samples_per_second - 1
        numbers = {"measured": measured.samples_per_second, "predicted": predicted, "error": error}
        rows.append({"value": value, **numbers, "fitted": number in chosen})
    return Prediction(system, costs, pd.DataFrame(rows), settings[0][1].swarm)


def measured_setting(experiment: Experiment, cells: pd.DataFrame) -> Measured:
    """Means over the repetitions of one setting."""
    cell, system = cells.iloc[0]["cell"], SYSTEMS[cells.iloc[0]["system"]]
    everyone = seconds_per_sample(experiment.valid, cell)
    means = cells[["meeting_seconds", "exchange_seconds", "step_seconds", "samples_per_step"]].astype(float).mean()
    means = means.fillna(0.0)
    swarm = Swarm(
        peers=cell.peers,
        samples_per_update=cell.full_recipe().target_batch_size,
        samples_per_second=1 / (everyone * cell.peers),
        micro_batch=cell.batch_size,
        payload_bytes=payload_bytes(cell),
        rtt_ms=cell.rtt_ms,
        up_mbps=cell.bandwidth_mbps,
        overlaps=system.overlaps,
    )
    computing = means["samples_per_step"] * everyone
    communication = 0.0 if system.overlaps else means["meeting_seconds"] + means["exchange_seconds"]
    other = max(0.0, means["step_seconds"] - computing - communication)
    rate = float(cells["samples_per_second"].mean())
    return Measured(swarm, means["meeting_seconds"], means["exchange_seconds"], other, rate)


def home_table(prediction: Prediction) -> pd.DataFrame:
    """Predicted speed of 1 to 1,000 volunteers at home, for three sizes of an update."""
    rows = []
    for factor in (1, 8, 64):
        like = replace(prediction.like, samples_per_update=prediction.like.samples_per_update * factor)
        for peers in PEERS:
            rate = simulate(home_swarm(peers, like), prediction.costs, updates=10)
            speed_up = rate / like.samples_per_second
            label = f"{like.samples_per_update:,.0f} samples per update"
            rows.append({"label": label, "peers": peers, "samples_per_second": rate, "speed_up": speed_up})
    return pd.DataFrame(rows)
