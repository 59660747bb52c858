"""Pauses on a volunteer's machine while it runs on its battery, or while its line is metered (costs by the byte).

Both can be found out only where the system tells: batteries on Linux and macOS, metered lines where NetworkManager
runs. If an owner wishes a pause that this machine cannot detect, the program says so.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

import psutil

LOOK_SECONDS = 5.0
"""Time between two looks at the machine's state."""
ANSWER_SECONDS = 1.0
"""Time limit for NetworkManager's answer. Training stands still meanwhile."""
METERED, NOT_METERED = ("u 1", "u 3"), ("u 2", "u 4")
"""NetworkManager's answers for a line that is, or is guessed to be, metered (a telephone's), and for other lines."""
_ASK = (
    "busctl get-property org.freedesktop.NetworkManager /org/freedesktop/NetworkManager "
    "org.freedesktop.NetworkManager Metered"
)


def is_on_battery() -> bool | None:
    """Whether this machine runs on its battery; None where it has none, or the system does not tell."""
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
    """Why this peer is to pause now, as the beginning of a sentence; empty if it is not to.

    Args:
        on_battery: whether its owner wishes a pause while the machine runs on its battery
        metered: whether its owner wishes a pause while the line is metered
    """
    if on_battery and is_on_battery():
        return "This machine runs on its battery"
    if metered and is_metered():
        return "This machine's line is metered"
    return ""


def never_spared(on_battery: bool, metered: bool) -> list[str]:
    """Sentences for the owner about wishes that have no effect, since the system does not tell the machine's state.

    Args:
        on_battery: as in `why_spared`
        metered: as in `why_spared`
    """
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
    """Wait as long as there is a reason to pause, and print each new reason.

    Args:
        why: `why_spared` with the owner's wishes
    """
    told = ""
    while reason := why():
        if reason != told:
            told = reason
            print(f"{reason}: this peer is paused until that changes. Ctrl-C ends it.", flush=True)
        time.sleep(LOOK_SECONDS)
