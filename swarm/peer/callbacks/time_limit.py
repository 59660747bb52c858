"""Makes a peer leave when its owner's time is over."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import lightning as L
import psutil

from swarm.runtime.timeouts import seconds_since_boot
from swarm.training.limits import Limit

_TICKS_AFTER_NAME = 19
"""Where `/proc/PID/stat` has the time of a process's start, in ticks since the machine's (`proc_pid_stat(5)`)."""


def seconds_since_command() -> float:
    """Since a person started this peer, which may have started itself again in place, or been started by torchrun.

    A clock that is set meanwhile changes nothing on Linux.
    """
    is_of_torchrun = "TORCHELASTIC_RESTART_COUNT" in os.environ
    pid = os.getppid() if is_of_torchrun else os.getpid()
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_TICKS_AFTER_NAME])
        return seconds_since_boot() - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:  # this system is no Linux
        return time.time() - psutil.Process(pid).create_time()


class TimeLimit(Limit):
    """Ends the training so long after the command, whatever the peer has done since: joined, computed, or paused.

    Args:
        limit: of all that together
    """

    def __init__(self, limit: timedelta):
        self._limit_seconds = limit.total_seconds()

    def look(self, trainer: L.Trainer) -> None:
        if seconds_since_command() >= self._limit_seconds:
            trainer.should_stop = True
