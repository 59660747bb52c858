"""Limits of the calls that one process answers at a time, and of the large ones among them.

The bytes of a call stay in memory until it is answered, and a name costs a stranger nothing. Calls of members have a
few kB. Only a node that hands over the records of a run sends more, and a refusal does no harm there: a search finds
the records.
"""

from __future__ import annotations

from collections import Counter

CALLS, ALL_CALLS = 64, 1024
"""Unanswered calls that one caller, and all callers together, may have at a time."""
SMALL_BYTES = 2**17
"""Bytes up to which a call is small. Every list that an organiser has signed is smaller."""
LARGE_BYTES, ALL_LARGE_BYTES = 2**23, 2**25
"""Bytes of unanswered calls above `SMALL_BYTES` that one caller, and all callers together, may have at a time."""


class RunningCalls:
    """The calls to one process that have no answer yet."""

    def __init__(self) -> None:
        self._calls: Counter[bytes] = Counter()
        self._large_bytes: Counter[bytes] = Counter()

    def begin(self, caller: bytes, num_bytes: int) -> bool:
        """Whether one more call of this caller is answered; if so, `end` has to be called when it has its answer.

        Args:
            caller: peer id
            num_bytes: size of the call's request
        """
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
        """Note that a call for which `begin` returned True has its answer."""
        for used, number in ((self._calls, 1), (self._large_bytes, _large(num_bytes))):
            used[caller] -= number
            if not used[caller]:
                del used[caller]


def _large(num_bytes: int) -> int:
    """Bytes with which a call counts as a large one; 0 if it is small."""
    return num_bytes if num_bytes > SMALL_BYTES else 0
