"""A clock that nobody sets."""

import time


def seconds_since_boot() -> float:
    """Also those for which the machine slept, where the system counts them (Linux)."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
