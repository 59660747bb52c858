"""Makes a peer leave for as long as its machine is to be spared (on battery, or on a metered line)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import lightning as L

from swarm.network.home.sparing import LOOK_SECONDS
from swarm.peer.callbacks.owners_limit import OwnersLimit


class HomePause(OwnersLimit):
    """Finds out every few seconds whether the machine is to be spared.

    Args:
        why: returns why this machine is to be spared now; empty if it is not
        stop_requested: set to leave
    """

    def __init__(self, why: Callable[[], str], stop_requested: threading.Event):
        super().__init__(stop_requested)
        self._why, self._reason, self._looked_at = why, "", time.monotonic()

    def is_reached(self, trainer: L.Trainer) -> bool:
        if time.monotonic() - self._looked_at >= LOOK_SECONDS:
            self._looked_at = time.monotonic()
            self._reason = self._why()
        ends_anyway = self._stop_requested.is_set() or trainer.global_step >= trainer.max_steps
        return bool(self._reason) and not ends_anyway
