"""Makes a peer leave when its owner's time is over."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from lightning.pytorch.callbacks import Timer


class TimeLimit(Timer):
    """Lightning's timer, which counts anew each time that a person starts the peer, and on where it starts by itself.

    Args:
        duration: of the training
        again: it has started by itself
    """

    def __init__(self, duration: timedelta, again: bool):
        super().__init__(duration)
        self._again = again

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of the peer's last checkpoint."""
        if self._again:
            super().load_state_dict(state_dict)
