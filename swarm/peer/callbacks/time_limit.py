"""Makes a peer leave when its owner's time is over."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import psutil
from lightning.pytorch.callbacks import Timer

_TICKS_AFTER_NAME = 19
"""Where `/proc/PID/stat` has the time of a process's start, in ticks since the machine's (`proc_pid_stat(5)`)."""


def this_start() -> str:
    """Names the start by a person: the same when the peer starts itself again in place, or torchrun starts it again."""
    is_of_torchrun = "TORCHELASTIC_RESTART_COUNT" in os.environ
    pid = os.getppid() if is_of_torchrun else os.getpid()
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_TICKS_AFTER_NAME]
        return f"{pid} {ticks} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:  # this system is no Linux, where a time on the clock would change when the clock is set
        return f"{pid} {psutil.Process(pid).create_time()}"


class TimeLimit(Timer):
    """Lightning's timer, for which only time since the last start by a person counts, not that of an evening before.

    The time for which a peer joins, and waits for others before it trains, counts as well.
    """

    def on_fit_start(self, trainer: L.Trainer, *arguments: Any, **options: Any) -> None:
        self.on_train_start(trainer, None)
        super().on_fit_start(trainer, *arguments, **options)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule | None) -> None:
        if self.start_time() is None:
            super().on_train_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any, **options: Any) -> None:
        """Also called while it waits."""
        self.on_train_start(trainer, None)
        super().on_train_batch_end(trainer, *arguments, **options)

    def state_dict(self) -> dict[str, Any]:
        """For the peer's checkpoint."""
        return super().state_dict() | {"start": this_start()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of the peer's last checkpoint."""
        if state_dict.get("start") == this_start():
            super().load_state_dict(state_dict)
