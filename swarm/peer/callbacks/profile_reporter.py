"""Tells other peers, in the progress record, how much this peer has sent and received and how fast its line is."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import lightning as L

from swarm.protocol.notes import Profile
from swarm.protocol.round_report import StepReport
from swarm.runtime.line_use import LineUse

MEASURED = 20
"""Number of the latest averages that count."""


class ProfileReporter(L.Callback):
    """Keeps the profile in this peer's record up to date.

    The speed of the line is not measured on its own, which would cost traffic. An average shows the least that the line
    carries, since it also waits for other members. So the fastest of the latest averages comes nearest.

    Args:
        line: of this peer
        profile: the part that does not change
    """

    def __init__(self, line: LineUse, profile: Profile):
        self._line, self._profile = line, profile
        self._rates: deque[float] = deque(maxlen=MEASURED)
        self._step = -1

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs, batch, batch_idx) -> None:
        coordinator = trainer.strategy.coordinator
        self._note(coordinator.last_step)
        told = {"upload": max(self._rates, default=None), "sent": self._line.sent, "received": self._line.received}
        coordinator.tracker.report(profile=replace(self._profile, **told))

    def _note(self, report: StepReport | None) -> None:
        if report is None or report.step == self._step:
            return
        self._step = report.step
        if report.round is not None and report.round.bytes_sent and report.round.exchange_seconds > 0:
            self._rates.append(report.round.bytes_sent / report.round.exchange_seconds)
