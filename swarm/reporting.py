"""What a peer writes down while it trains: swarm metrics for each update, and its status for those who watch."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace

import lightning as L
from rich.console import Console
from rich.live import Live

from recipe.run_folder import RunFolder
from swarm.collaboration import StepReport
from swarm.progress import JOINING
from swarm.status import Status, status_table

STATUS_SECONDS = 0.5
LINE_SECONDS = 10.0
SMOOTHING = 0.1


class SwarmMetrics(L.Callback):
    """Logs how each global update came about, and keeps the sums for the summary.

    Tags: ``swarm/peers``, ``swarm/samples``, ``swarm/own_samples``, ``swarm/loss`` (over all peers' samples),
    ``perf/swarm_samples_per_second`` (samples of the update over its time, validation excluded),
    ``round/compute_seconds``, ``round/meeting_seconds``, ``round/exchange_seconds`` and
    ``round/parts_received_fraction`` (of the average and, as a reducer, of the others' gradients).
    """

    def __init__(self) -> None:
        self.contributed = self.swarm_samples = self.updates = self.max_num_peers = 0
        self.complete_updates = 0
        self.rate = self.swarm_rate = self.loss = None
        self._step = -1
        self._since = 0.0
        self._paused_at = 0.0

    def on_train_start(self, trainer, pl_module) -> None:
        self._step, self._since = trainer.global_step, time.perf_counter()

    def on_validation_start(self, trainer, pl_module) -> None:
        self._paused_at = time.perf_counter()

    def on_validation_end(self, trainer, pl_module) -> None:
        self._since += time.perf_counter() - self._paused_at

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        report = trainer.strategy.collaboration.last_step
        if report is None or report.step != self._step:
            return  # it caught up instead of taking part
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
        }
        if report.round is not None:
            expected = report.round.parts_expected + report.round.inputs_expected
            received = report.round.parts_received + report.round.inputs_received
            values |= {
                "round/meeting_seconds": report.round.meeting_seconds,
                "round/exchange_seconds": report.round.exchange_seconds,
                "round/parts_received_fraction": received / expected if expected else 1.0,
            }
        return values


class StatusReporter(L.Callback):
    """Keeps ``status.json`` fresh and shows a person what is going on: a live table, or a line now and then.

    :param folder: whose ``status.json``
    :param status: what is known before the training starts
    :param metrics: sums and rates
    """

    def __init__(self, folder: RunFolder, status: Status, metrics: SwarmMetrics):
        self._folder, self._status, self._metrics = folder, status, metrics
        self._collaboration = None
        self._closing = threading.Event()
        self._console = Console(file=sys.stdout, soft_wrap=True)
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def setup(self, trainer, pl_module, stage) -> None:
        if not self._thread.is_alive() and not self._closing.is_set():
            self._thread.start()

    def on_train_start(self, trainer, pl_module) -> None:
        self._collaboration = trainer.strategy.collaboration

    def on_validation_end(self, trainer, pl_module) -> None:
        accuracy = trainer.callback_metrics.get("val/top1")
        if accuracy is not None:
            self._status = replace(self._status, val_accuracy=float(accuracy))
            if self._collaboration is not None:
                self._collaboration.tracker.report(accuracy=float(accuracy))

    def snapshot(self) -> Status:
        """The status of this moment."""
        metrics, collaboration = self._metrics, self._collaboration
        status = replace(
            self._status,
            rate=metrics.rate,
            swarm_rate=metrics.swarm_rate,
            loss=metrics.loss,
            contributed=metrics.contributed,
            swarm_samples=metrics.swarm_samples,
        )
        if collaboration is None:
            return replace(status, phase=JOINING)
        last = collaboration.last_step
        return replace(
            status,
            phase=collaboration.tracker.own.phase,
            step=collaboration.step,
            samples=int(collaboration.tracker.samples_by_now()),
            num_peers=last.num_peers if last else len(collaboration.tracker.members),
        )

    def finish(self, outcome: str) -> Status:
        """Write the last status and stop showing."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2)
        status = replace(self.snapshot(), ended=outcome, addresses=())
        status.write(self._folder.status)
        return status

    def _run(self) -> None:
        if self._console.is_terminal:
            with Live(console=self._console, refresh_per_second=4, transient=True) as live:
                self._watch(lambda status: live.update(status_table([status], f"run {status.run_id}")))
        else:
            self._watch(self._print_line)

    def _watch(self, show) -> None:
        while True:
            status = self.snapshot()
            status.write(self._folder.status)
            show(status)
            if self._closing.wait(STATUS_SECONDS):
                return

    _last_line = -LINE_SECONDS
    _last_accuracy: float | None = None

    def _print_line(self, status: Status) -> None:
        news = status.val_accuracy != self._last_accuracy
        if news or time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line, self._last_accuracy = time.monotonic(), status.val_accuracy
            self._console.print(status.line(), markup=False, highlight=False)
