"""How long ago the command was that a volunteer gave, and what it waited for until its first contribution."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from swarm.runtime.timeouts import seconds_since_boot

STARTED = "SWARM_STARTED"
"""Environment variable: the time at which a peer started again, as another program in the same process."""
_TICKS_AFTER_NAME = 19
"""Where `/proc/PID/stat` has the time of a process's start, in ticks since the machine's (`proc_pid_stat(5)`)."""


def seconds_since_command() -> float:
    """Since a person started this peer, which may have started itself again in place, or been started by torchrun.

    A clock that is set meanwhile changes nothing on Linux.
    """
    is_of_torchrun = "TORCHELASTIC_RESTART_COUNT" in os.environ
    stat = Path(f"/proc/{os.getppid()}/stat" if is_of_torchrun else "/proc/self/stat")
    try:
        ticks = int(stat.read_text().rpartition(")")[2].split()[_TICKS_AFTER_NAME])
        return seconds_since_boot() - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:  # this system is no Linux
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
