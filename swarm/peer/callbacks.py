"""What a peer writes down while it trains: swarm metrics for each update, and its status for those who watch."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning as L
from rich.console import Console
from rich.live import Live

from recipe.run_folder import RunFolder
from recipe.training.loggers import JsonlFile
from swarm.membership.progress_record import JOINING, WAITING
from swarm.peer.startup_timer import StartupTimer
from swarm.peer.status import Status, status_table
from swarm.protocol.round_report import StepReport

STATUS_SECONDS = 0.5
LINE_SECONDS = 10.0
SMOOTHING = 0.1
LEAVING = "leaving"  # not a phase that others hear of: they are told that this peer has left


class PatientConsole(Console):
    """Nobody reads on, or the disk below a log is full: then there is no output, but training goes on."""

    def print(self, *objects: Any, **kwargs: Any) -> None:
        with contextlib.suppress(OSError):
            super().print(*objects, **kwargs)

    def on_broken_pipe(self) -> None:
        self.quiet = True  # rich would end the program


class SwarmMetrics(L.Callback):
    """Logs how each global update came about, and keeps the sums for the summary.

    Tags: `swarm/peers`, `swarm/samples`, `swarm/own_samples`, `swarm/loss` (over all peers' samples),
    `perf/swarm_samples_per_second` (samples of the update over its time, validation excluded),
    `round/compute_seconds`, `round/blocked_seconds`, `round/meeting_seconds`, `round/exchange_seconds` and
    `round/parts_received_fraction` (of the average and, as a reducer, of the others' gradients). Rounds that failed
    are in `rounds.jsonl` as well: a line for each `RoundEvent`.

    Args:
        rounds: that file
    """

    def __init__(self, rounds: Path) -> None:
        self._rounds = JsonlFile(rounds)
        self.contributed = self.swarm_samples = self.updates = self.max_num_peers = 0
        self.complete_updates = 0
        self.rate = self.swarm_rate = self.loss = None
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
        """Wall time since this peer had joined, validation included."""
        return 0.0 if self._began is None else time.perf_counter() - self._began

    def on_validation_start(self, trainer, pl_module) -> None:
        self._paused_at = time.perf_counter()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if self._paused_at is not None:  # with the checkpoint that followed
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
            "round/blocked_seconds": report.blocked_seconds,
        }
        if report.round is not None:
            values |= {
                "round/meeting_seconds": report.round.meeting_seconds,
                "round/exchange_seconds": report.round.exchange_seconds,
                "round/parts_received_fraction": report.round.received_fraction,
            }
        return values


class StatusReporter(L.Callback):
    """Keeps `status.json` fresh and shows a person what is going on: a live table, or a line now and then.

    Args:
        folder: whose `status.json`
        status: what is known before the training starts
        metrics: sums and rates
        stop_requested: set when this peer was asked to leave
    """

    def __init__(self, folder: RunFolder, status: Status, metrics: SwarmMetrics, stop_requested: threading.Event):
        self._folder, self._status, self._metrics = folder, status, metrics
        self._stop_requested = stop_requested
        self._strategy = None
        self._coordinator = None
        self._training, self._leaving, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._console = PatientConsole(file=sys.stdout)
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._last_line, self._last_news = -LINE_SECONDS, None

    def setup(self, trainer, pl_module, stage) -> None:
        self._strategy = trainer.strategy
        if not self._thread.is_alive() and not self._closing.is_set():
            self._thread.start()

    def on_train_start(self, trainer, pl_module) -> None:
        self._training.set()

    def on_validation_end(self, trainer, pl_module) -> None:
        accuracy = trainer.callback_metrics.get("val/top1")
        if accuracy is not None:
            self._status = replace(self._status, val_accuracy=float(accuracy))
            if trainer.strategy.coordinator is not None:
                trainer.strategy.coordinator.tracker.report(accuracy=float(accuracy))

    def on_train_end(self, trainer, pl_module) -> None:
        self._leaving.set()

    def snapshot(self) -> Status:
        """The status of this moment."""
        metrics = self._metrics
        # the strategy forgets it when it leaves; the last step is of interest still
        self._coordinator = coordinator = getattr(self._strategy, "coordinator", None) or self._coordinator
        status = replace(
            self._status,
            phase=self._phase(),
            rate=metrics.rate,
            swarm_rate=metrics.swarm_rate,
            loss=metrics.loss,
            contributed=metrics.contributed,
            swarm_samples=metrics.swarm_samples,
        )
        if coordinator is None:
            return status
        last = coordinator.last_step
        return replace(
            status,
            step=coordinator.step,
            samples=int(coordinator.tracker.swarm.samples_by_now),
            num_peers=last.num_peers if last else len(coordinator.tracker.swarm.members),
        )

    def _phase(self) -> str:
        if self._stop_requested.is_set() or self._leaving.is_set():
            return LEAVING
        if self._coordinator is None:
            return JOINING
        phase = self._coordinator.tracker.own.phase
        missing = self._coordinator.options.min_peers - len(self._coordinator.tracker.swarm.members)
        return f"waiting for {missing} more peer{'s' * (missing != 1)}" if phase == WAITING and missing > 0 else phase

    def say(self, line: str) -> None:
        """Print a line; a live table stays below it."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def finish(self, outcome: str) -> Status:
        """Write the last status and stop showing."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2)
        status = replace(self.snapshot(), ended=outcome, addresses=())
        status.write(self._folder.status)
        return status

    def _run(self) -> None:
        self._watch(self._print_line, until=self._training if self._console.is_terminal else self._closing)
        if self._closing.is_set():
            return
        # Not before: it replaces sys.stderr, and the processes that are made while joining must not inherit that.
        with Live(console=self._console, refresh_per_second=4, transient=True) as live:
            self._watch(
                lambda status: live.update(status_table([status], f"run {status.run_id}", self._console.width)),
                until=self._closing,
            )

    def _watch(self, show: Callable[[Status], None], until: threading.Event) -> None:
        announced = False
        while not until.is_set() and not self._closing.is_set():
            if self._stop_requested.is_set() and not announced:
                announced = True
                self._console.print("Leaving the swarm, this takes a few seconds (Ctrl-C again leaves at once) …")
            status = self.snapshot()
            status.write(self._folder.status)
            with contextlib.suppress(OSError):
                show(status)
            until.wait(STATUS_SECONDS)

    def _print_line(self, status: Status) -> None:
        news = (status.val_accuracy, self._training.is_set() or status.phase)
        if news != self._last_news or time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line, self._last_news = time.monotonic(), news
            self._console.print(status.line(), markup=False, highlight=False, soft_wrap=True)


class FirstContribution(L.Callback):
    """Ends the phases `state` (with `waiting` for others) and `first micro-batch` of a clock, and says so.

    Args:
        clock: whose earlier phases have ended
        say: prints one line
    """

    def __init__(self, clock: StartupTimer, say: Callable[[str], None]):
        self._clock, self._say = clock, say
        self._contributed = False

    def on_train_start(self, trainer, pl_module) -> None:
        self._clock.ends("state", trainer.strategy.coordinator.waited_seconds)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        coordinator = trainer.strategy.coordinator
        counts = coordinator.samples > 0 or coordinator.last_step is not None  # not dropped while catching up
        if not self._contributed and counts:
            self._contributed = True
            self._clock.ends("first micro-batch")
            self._say(str(self._clock))
