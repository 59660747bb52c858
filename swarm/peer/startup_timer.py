"""How long a volunteer waited from the command to the first contribution, and for what."""

from __future__ import annotations

import os
import time

import psutil

STARTED = "SWARM_STARTED"
"""Environment variable: the time at which a peer started again, as another program in the same process."""


class StartupTimer:
    """Times the phases of a start, beginning when the kernel made this process.

    A phase that ends twice (imports that go on while the DHT joins) counts with both times.
    """

    def __init__(self) -> None:
        again_since = float(os.environ.pop(STARTED, 0))
        self.again = bool(again_since)
        """Whether this peer started again by itself."""
        self._since = again_since or psutil.Process().create_time()
        self.seconds: dict[str, float] = {}
        """Phase: seconds, in order."""

    def ends(self, phase: str, waiting_seconds: float = 0.0) -> None:
        """What happened since the last call was this phase.

        Args:
            waiting_seconds: at its end, for other peers: a part of its own
        """
        now = time.time()
        self._add(phase, now - self._since - waiting_seconds)
        if waiting_seconds > 0:
            self._add("waiting", waiting_seconds)
        self._since = now

    def _add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + max(0.0, seconds)

    def __str__(self) -> str:
        phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.seconds.items())
        return f"First contribution {sum(self.seconds.values()):.1f} s after the command: {phases}."
