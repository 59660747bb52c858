"""Calls that one process answers at a time, and how many large ones are among them.

What a call has brought stays in memory until it is answered, and a name costs a stranger nothing. Members bring a few
kB; only whoever hands over the records of a run brings more, and can do without.
"""

from __future__ import annotations

from collections import Counter

CALLS, ALL_CALLS = 64, 1024
"""That one caller, and all of them together, may have at a time without an answer yet."""
SMALL_BYTES = 2**17
"""Every list that an organiser has signed is smaller."""
LARGE_BYTES, ALL_LARGE_BYTES = 2**23, 2**25
"""Of calls that are larger: of one caller, and of all together."""


class RunningCalls:
    """Those of one process that have no answer yet."""

    def __init__(self) -> None:
        self._calls: Counter[bytes] = Counter()
        self._large_bytes: Counter[bytes] = Counter()

    def begin(self, caller: bytes, num_bytes: int) -> bool:
        """Whether one more call is answered, which has brought so many bytes; then `end` has to be called for it."""
        if self._calls[caller] >= CALLS or self._calls.total() >= ALL_CALLS:
            return False
        large = _large(num_bytes)
        if large and self._large_bytes[caller] + large > LARGE_BYTES:
            return False
        if large and self._large_bytes.total() + large > ALL_LARGE_BYTES:
            return False
        self._calls[caller] += 1
        self._large_bytes[caller] += large
        return True

    def end(self, caller: bytes, num_bytes: int) -> None:
        """It has its answer."""
        for used, number in ((self._calls, 1), (self._large_bytes, _large(num_bytes))):
            used[caller] -= number
            if not used[caller]:
                del used[caller]


def _large(num_bytes: int) -> int:
    """Bytes of a call that count as those of a large one."""
    return num_bytes if num_bytes > SMALL_BYTES else 0
