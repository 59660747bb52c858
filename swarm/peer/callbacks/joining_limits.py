"""Asks a peer's limits while it joins: its trainer waits for a state then, which may come slowly."""

from __future__ import annotations

import threading

import lightning as L

from swarm.training.limits import is_to_leave

LOOK_SECONDS = 1.0


class JoiningLimits(L.Callback):
    """Looks each second, in a thread of its own, until the training begins; from then on others ask.

    Args:
        stop_requested: set to leave
    """

    def __init__(self, stop_requested: threading.Event):
        self._stop_requested, self._joined = stop_requested, threading.Event()
        self._thread: threading.Thread | None = None
        self.time_is_up = False
        """Whether this peer leaves because of its time."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._thread = threading.Thread(target=self._look, args=(trainer,), daemon=True, name="limits")
        self._thread.start()

    def _look(self, trainer: L.Trainer) -> None:
        while not self._joined.wait(LOOK_SECONDS) and not self._stop_requested.is_set():
            if trainer.strategy.coordinator is not None and is_to_leave(trainer):
                self.time_is_up = True
                self._stop_requested.set()

    def _end(self) -> None:
        self._joined.set()
        if self._thread is not None:
            self._thread.join()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._end()
