"""A signal that wakes a waiting thread from any process or thread."""

from __future__ import annotations

import contextlib
import multiprocessing as mp


class Bell:
    """A signal between processes. Several rings before a `wait` count as one.

    It has no lock that a killed process could keep.
    """

    def __init__(self) -> None:
        self._rung = mp.BoundedSemaphore(1)
        self._rung.acquire()

    def ring(self) -> None:
        """Wake the thread that waits, or the next one that does."""
        with contextlib.suppress(ValueError):  # it has been rung already
            self._rung.release()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for a ring, or take one since the last call. Returns whether there was one in time."""
        return self._rung.acquire(timeout=timeout_seconds)
