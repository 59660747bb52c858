"""When a volunteer's machine is to be spared: it runs on its battery, or its line costs by the byte.

Both are known where the system tells: batteries on Linux and macOS, metered lines where there is NetworkManager. Who
wishes a pause that nobody can tell hears so.
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
METERED, NOT_METERED = ("u 1", "u 3"), ("u 2", "u 4")
"""NetworkManager's answers for a line that is metered, or is taken for one (a telephone's), and for others."""
_ASK = (
    "busctl get-property org.freedesktop.NetworkManager /org/freedesktop/NetworkManager "
    "org.freedesktop.NetworkManager Metered"
)


def is_on_battery() -> bool | None:
    """Whether nothing charges this machine's battery; None where it has none, or the system does not tell."""
    try:
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    except OSError:  # a container has no folder of batteries
        return None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def is_metered() -> bool | None:
    """Whether this machine's line to the internet is metered; None where NetworkManager does not tell."""
    try:
        said = subprocess.run(_ASK.split(), capture_output=True, text=True, timeout=ANSWER_SECONDS).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None
    if said in METERED:
        return True
    return False if said in NOT_METERED else None


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


def never_spared(on_battery: bool, metered: bool) -> list[str]:
    """Sentences for an owner whose wish does nothing here, because nobody tells; arguments as of `why_spared`."""
    said = []
    if on_battery and is_on_battery() is None:
        said.append(
            "--pause-on-battery: this machine has no battery, or does not say whether it runs on it: no pause for that."
        )
    if metered and is_metered() is None:
        said.append(
            "--pause-on-metered: NetworkManager is missing or does not know whether the line is metered, so this peer "
            "does not pause for that."
        )
    return said


def wait_while_spared(why: Callable[[], str]) -> None:
    """Say why nothing happens, and return when it may.

    Args:
        why: `why_spared` with what the owner wishes
    """
    told = ""
    while reason := why():
        if reason != told:
            told = reason
            print(f"{reason}: this peer is paused until that changes. Ctrl-C ends it.", flush=True)
        time.sleep(LOOK_SECONDS)
