"""Makes a peer leave when its owner's time is over."""

from __future__ import annotations

import os
from typing import Any

import psutil
from lightning.pytorch.callbacks import Timer


def this_start() -> str:
    """Names the start by a person: the same when the peer starts itself again in place, or torchrun starts it again."""
    is_of_torchrun = "TORCHELASTIC_RESTART_COUNT" in os.environ
    process = psutil.Process(os.getppid() if is_of_torchrun else os.getpid())
    return f"{process.pid} {process.create_time()}"


class TimeLimit(Timer):
    """Lightning's timer, for which only time since the last start by a person counts, not that of an evening before."""

    def state_dict(self) -> dict[str, Any]:
        """For the peer's checkpoint."""
        return super().state_dict() | {"start": this_start()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of the peer's last checkpoint."""
        if state_dict.get("start") == this_start():
            super().load_state_dict(state_dict)
