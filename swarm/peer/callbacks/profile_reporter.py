"""Tells the others, in the progress record, how much this peer has sent and received and what its line carries."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import lightning as L

from swarm.protocol.notes import Profile
from swarm.protocol.round_report import StepReport
from swarm.runtime.line_use import LineUse

MEASURED = 20
"""Latest averages that count."""


class ProfileReporter(L.Callback):
    """Keeps the profile in this peer's record up to date.

    What the line carries is not measured by itself, which would cost traffic. Averages say how much it carries at
    least: they also wait for other members, so the fastest of the latest ones comes nearest.

    Args:
        line: of this peer
        profile: what does not change
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
