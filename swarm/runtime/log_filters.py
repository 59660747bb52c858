"""Limits what is logged on the screen: repeated messages once a minute, and no messages meant for developers."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable

QUIET_SECONDS = 60.0
MAX_KINDS = 200
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


class RepeatFilter(logging.Filter):
    """Lets one message of each kind through in a minute. The next one tells how many were left out meanwhile.

    Messages are of one kind if they differ only in numbers, such as the step.

    Args:
        clock: returns seconds
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._clock, self._lock = clock, threading.Lock()
        self.told: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to show the record. May add to its message how many were left out."""
        message, now = record.getMessage(), self._clock()
        kind = record.name, _NUMBER.sub("#", message)
        with self._lock:
            told_at, left_out = self.told.get(kind, (-math.inf, 0))
            if now - told_at < QUIET_SECONDS:
                self.told[kind] = told_at, left_out + 1
                return False
            if len(self.told) >= MAX_KINDS:
                self.told.clear()
            self.told[kind] = now, 0
        if left_out:
            record.msg, record.args = f"{message} (and {left_out} more like this since {_ago(now - told_at)})", ()
        return True


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"


REPEATS = RepeatFilter()
"""The filter of this process."""


def silence_libraries() -> None:
    """Hide messages of libraries to developers. Warnings that a user can act on stay, each once a minute."""
    if os.environ.setdefault("HIVEMIND_LOGLEVEL", "WARNING") == "WARNING":  # also true after a restart in place
        logging.getLogger("hivemind.p2p.p2p_daemon").setLevel(logging.ERROR)
        # If p2pd could not start, its exception says so. asyncio also complains that the loop did not wait for its end.
        logging.getLogger("asyncio").addFilter(lambda record: "that handles pid" not in str(record.msg))
    logging.lastResort.addFilter(REPEATS)  # the handler of this program's own messages
    if not sys.warnoptions:
        for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning):
            warnings.simplefilter("ignore", category)
