"""When a volunteer's machine is to be spared: it runs on its battery, or its line costs by the byte.

Both are known where the system tells: batteries on Linux and macOS, metered lines where there is NetworkManager.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

import psutil

LOOK_SECONDS = 5.0
"""From one look at the machine to the next."""
ANSWER_SECONDS = 1.0
"""For NetworkManager: training stands still meanwhile."""
METERED = ("u 1", "u 3")
"""NetworkManager's answers for a line that is metered, or is taken for one (a telephone's)."""
_ASK = (
    "busctl get-property org.freedesktop.NetworkManager /org/freedesktop/NetworkManager "
    "org.freedesktop.NetworkManager Metered"
)


def is_on_battery() -> bool:
    """Whether this machine has a battery, and nothing that charges it."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return battery is not None and battery.power_plugged is False


def is_metered() -> bool:
    """Whether NetworkManager says so of the line by which this machine reaches the internet."""
    try:
        said = subprocess.run(_ASK.split(), capture_output=True, text=True, timeout=ANSWER_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return said.stdout.strip() in METERED


def why_spared(on_battery: bool, metered: bool) -> str:
    """Why this machine is to be spared now, as the beginning of a sentence; empty if it is not.

    Args:
        on_battery: its owner wishes that while it runs on its battery
        metered: and while its line is metered
    """
    if on_battery and is_on_battery():
        return "This machine runs on its battery"
    if metered and is_metered():
        return "This machine's line is metered"
    return ""


def wait_while_spared(why: Callable[[], str]) -> None:
    """Say why nothing happens, and return when it may.

    Args:
        why: `why_spared` with what the owner wishes
    """
    told = ""
    while reason := why():
        if reason != told:
            told = reason
            print(f"{reason}: this peer waits for better times. Ctrl-C ends it.", flush=True)
        time.sleep(LOOK_SECONDS)
