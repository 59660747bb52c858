"""What a peer shows of itself: `status.json` for other programs, and a live table or lines for its owner."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L
from rich.console import Console
from rich.live import Live

from recipe.run_folder import RunFolder
from swarm.membership.progress_record import JOINING, PAUSED, WAITING
from swarm.peer.callbacks.swarm_metrics import SwarmMetrics
from swarm.peer.status import Status, status_table

STATUS_SECONDS = 0.5
LINE_SECONDS = 10.0
NO_TRAINER = "waiting for a training peer"
LEAVING = "leaving"  # never in a progress record: other peers are told that this peer has left


class PatientConsole(Console):
    """A console that loses its output, and not the training, if its pipe is closed or the disk below a log is full."""

    def print(self, *objects: Any, **kwargs: Any) -> None:
        with contextlib.suppress(OSError):
            super().print(*objects, **kwargs)

    def on_broken_pipe(self) -> None:
        self.quiet = True  # rich would end the program


class StatusReporter(L.Callback):
    """Keeps `status.json` fresh and shows a person what is going on: a live table, or a line now and then.

    Args:
        folder: where `status.json` is
        status: what is known before the training starts
        metrics: sums and rates
        stop_requested: set when this peer was asked to leave
        is_quiet: print no status line until the training begins, so that a join line stays the last on the screen
    """

    def __init__(
        self,
        folder: RunFolder,
        status: Status,
        metrics: SwarmMetrics,
        stop_requested: threading.Event,
        is_quiet: bool = False,
    ):
        self._folder, self._status, self._metrics = folder, status, metrics
        self._stop_requested, self._is_quiet = stop_requested, is_quiet
        self._strategy = self._trainer = None
        self._coordinator = None
        self._training, self._leaving, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._console = PatientConsole(file=sys.stdout)
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._last_line, self._last_news = -LINE_SECONDS, None

    def setup(self, trainer, pl_module, stage) -> None:
        self._strategy, self._trainer = trainer.strategy, trainer
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
        # the strategy drops its coordinator when it leaves, but the last step is still shown
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
            total_steps=self._total_steps,
            target_batch_size=coordinator.target.samples,
            samples=int(coordinator.tracker.swarm.samples_by_now),
            num_peers=last.num_peers if last else len(coordinator.tracker.swarm.members),
        )

    @property
    def _total_steps(self) -> int:
        """Where the run ends; the organiser may have moved that since the start."""
        return self._status.total_steps if self._trainer is None else self._trainer.max_steps

    def _phase(self) -> str:
        if self._stop_requested.is_set() or self._leaving.is_set():
            return LEAVING
        if self._coordinator is None:
            return JOINING
        phase, num_trainers = self._coordinator.tracker.own.phase, self._coordinator.tracker.swarm.num_trainers
        if phase == PAUSED:
            return f"paused at step {self._coordinator.step}"
        if self._coordinator.options.helps:
            return self._coordinator.tracker.own.shown_phase if num_trainers else NO_TRAINER
        missing = self._coordinator.options.min_peers - num_trainers
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
                self._console.print("Leaving the swarm, this takes a few seconds (a second Ctrl-C leaves at once) …")
            status = self.snapshot()
            status.write(self._folder.status)
            with contextlib.suppress(OSError):
                show(status)
            until.wait(STATUS_SECONDS)

    def _print_line(self, status: Status) -> None:
        if self._is_quiet and not self._training.is_set():
            return
        news = (status.val_accuracy, self._training.is_set() or status.phase)
        if news != self._last_news or time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line, self._last_news = time.monotonic(), news
            self._console.print(status.line(), markup=False, highlight=False, soft_wrap=True)
