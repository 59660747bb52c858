"""Records how each global update came about: metrics for the loggers, sums for the summary, a line for each round."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path

import lightning as L

from recipe.training.loggers import JsonlFile
from swarm.protocol.round_report import StepReport

SMOOTHING = 0.1


class SwarmMetrics(L.Callback):
    """Logs how each global update came about, and keeps the sums for the summary.

    Tags: `swarm/peers`, `swarm/samples`, `swarm/own_samples`, `swarm/loss` (over all peers' samples, as they claim it),
    `perf/swarm_samples_per_second` (samples of the update over its time, validation excluded),
    `round/compute_seconds`, `round/blocked_seconds`, `round/meeting_seconds`, `round/exchange_seconds`,
    `round/granularity` (computing over exchange) and `round/parts_received_fraction` (of the average and, as a reducer,
    of the others' gradients). Rounds that failed are in `rounds.jsonl` as well: a line for each `RoundEvent`.

    Args:
        rounds: that file
    """

    def __init__(self, rounds: Path) -> None:
        self._rounds = JsonlFile(rounds)
        self.contributed = self.swarm_samples = self.updates = self.max_num_peers = 0
        self.complete_updates = 0
        self.rate = self.swarm_rate = self.loss = self.own_loss = None
        self._began: float | None = None
        self._step = -1
        self._since = 0.0
        self._paused_at: float | None = None

    def on_train_start(self, trainer, pl_module) -> None:
        self._began = self._since = time.perf_counter()
        self._step = trainer.global_step
        trainer.strategy.coordinator.on_round = lambda event: self._rounds.append(asdict(event))

    @property
    def seconds(self) -> float:
        """Wall time in seconds since this peer has joined, validation included."""
        return 0.0 if self._began is None else time.perf_counter() - self._began

    def on_validation_start(self, trainer, pl_module) -> None:
        self._paused_at = time.perf_counter()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if self._paused_at is not None:  # the pause includes the checkpoint after the validation
            self._since += time.perf_counter() - self._paused_at
            self._paused_at = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        report = trainer.strategy.coordinator.last_step
        if report is None or report.step != self._step:
            return  # the peer caught up instead of taking part
        self._add(report, seconds)
        for logger in trainer.loggers:
            logger.log_metrics(self._values(report, seconds), step=self._step)

    def _add(self, report: StepReport, seconds: float) -> None:
        self.updates += 1
        self.contributed += report.own_samples
        self.swarm_samples += report.samples
        self.max_num_peers = max(self.max_num_peers, report.num_peers)
        self.complete_updates += report.round is None or report.round.complete
        self.loss = report.loss
        if report.own_samples:  # a helper has none, and neither has a peer that only listened to the round
            self.own_loss = report.ticket.loss
        self.rate = self._smooth(self.rate, report.own_samples / seconds)
        self.swarm_rate = self._smooth(self.swarm_rate, report.samples / seconds)

    @staticmethod
    def _smooth(old: float | None, new: float) -> float:
        return new if old is None else (1 - SMOOTHING) * old + SMOOTHING * new

    @staticmethod
    def _values(report: StepReport, seconds: float) -> dict[str, float]:
        values = {
            "swarm/peers": report.num_peers,
            "swarm/samples": report.samples,
            "swarm/own_samples": report.own_samples,
            "swarm/loss": report.loss,
            "perf/swarm_samples_per_second": report.samples / seconds,
            "round/compute_seconds": report.compute_seconds,
            "round/blocked_seconds": report.blocked_seconds,
        }
        if report.round is not None:
            values |= {
                "round/meeting_seconds": report.round.meeting_seconds,
                "round/exchange_seconds": report.round.exchange_seconds,
                "round/parts_received_fraction": report.round.received_fraction,
            }
        if not math.isnan(report.granularity):  # something was exchanged
            values["round/granularity"] = report.granularity
        return values
