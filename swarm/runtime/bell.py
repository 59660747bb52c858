"""Wakes who waits, from whatever process or thread something has happened in."""

from __future__ import annotations

import contextlib
import multiprocessing as mp


class Bell:
    """Rung once or several times before it is heard is the same. It has no lock that a killed process could keep."""

    def __init__(self) -> None:
        self._rung = mp.BoundedSemaphore(1)
        self._rung.acquire()

    def ring(self) -> None:
        """Something has happened."""
        with contextlib.suppress(ValueError):  # it has been rung already
            self._rung.release()

    def wait(self, timeout_seconds: float) -> bool:
        """Until it is rung, or has been since the last call; whether it was."""
        return self._rung.acquire(timeout=timeout_seconds)
