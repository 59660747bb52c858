"""Times the start of a peer: how long ago its command was given, and the phases up to its first contribution."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from swarm.runtime.timeouts import seconds_since_boot

STARTED = "SWARM_STARTED"
"""Environment variable: the time at which a peer started again, as another program in the same process."""
_TICKS_AFTER_NAME = 19
"""Index of a process's start, in clock ticks since the machine's start, among the fields of `/proc/PID/stat` behind the
name (`proc_pid_stat(5)`)."""


def seconds_since_command() -> float:
    """Return the seconds since a person started this peer.

    That counts from the first start if the peer has started itself again in place, and from the start of torchrun if
    that runs it. On Linux it makes no difference if the clock is set meanwhile.
    """
    is_of_torchrun = "TORCHELASTIC_RESTART_COUNT" in os.environ
    stat = Path(f"/proc/{os.getppid()}/stat" if is_of_torchrun else "/proc/self/stat")
    try:
        ticks = int(stat.read_text().rpartition(")")[2].split()[_TICKS_AFTER_NAME])
        return seconds_since_boot() - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:  # not on Linux
        return time.time() - psutil.Process(os.getppid() if is_of_torchrun else None).create_time()


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
        """Seconds of each phase, in the order in which the phases first ended."""

    def ends(self, phase: str, waiting_seconds: float = 0.0) -> None:
        """Count the time since the last call as this phase.

        Args:
            waiting_seconds: the end of that time, spent waiting for other peers; it counts as the phase `waiting`
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
