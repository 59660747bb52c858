"""How long a volunteer waited from the command to the first contribution, and for what."""

from __future__ import annotations

import os
import time

import psutil

STARTED = "SWARM_STARTED"
"""Environment variable: the time at which a peer started again, as another program in the same process."""


class StartClock:
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

    def ends(self, phase: str) -> None:
        """What happened since the last call was this phase."""
        now = time.time()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + max(0.0, now - self._since)
        self._since = now

    def __str__(self) -> str:
        phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.seconds.items())
        return f"First contribution {sum(self.seconds.values()):.1f} s after the command: {phases}."
