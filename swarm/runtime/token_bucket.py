"""How much of something may be used up in a time: token buckets (RFC 2697 has the idea)."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """So much at once, and then as much as it refills.

    Args:
        most: at once
        per_second: that come back
        clock: in seconds
    """

    def __init__(self, most: float, per_second: float, clock: Callable[[], float] = time.monotonic):
        self._most, self._per_second, self._clock = most, per_second, clock
        self._left, self._looked_at = most, clock()

    @property
    def left(self) -> float:
        """What may be used up now."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._looked_at) * self._per_second)
        self._looked_at = now
        return self._left

    def spend(self, amount: float) -> None:
        """So much has been used up; there may be less than nothing left."""
        self._left = self.left - amount

    def take(self) -> bool:
        """Whether it may be done once more, which is then counted."""
        if self.left < 1:
            return False
        self.spend(1)
        return True

    @property
    def is_full(self) -> bool:
        """Whether everything has come back: nothing is known about who used it."""
        return self._left + (self._clock() - self._looked_at) * self._per_second >= self._most


class TokenBuckets:
    """One for each name, as long as it is in use.

    Args:
        most: at once, by one name
        per_second: that come back
        names: that are remembered at most; while so many are in use, a further one may do nothing
    """

    def __init__(self, most: float, per_second: float, names: int = 4096):
        self._most, self._per_second, self._names = most, per_second, names
        self._of: dict[object, TokenBucket] = {}

    def take(self, name: object) -> bool:
        """Whether this name may do it once more, which is then counted."""
        bucket = self._bucket(name)
        return bucket is not None and bucket.take()

    def may(self, name: object) -> bool:
        """Whether this name has anything left."""
        bucket = self._bucket(name)
        return bucket is not None and bucket.left > 0

    def spend(self, name: object, amount: float) -> None:
        """This name has used up so much; there may be less than nothing left."""
        if (bucket := self._bucket(name)) is not None:
            bucket.spend(amount)

    def _bucket(self, name: object) -> TokenBucket | None:
        """None if too many names are in use."""
        if name not in self._of:
            if len(self._of) >= self._names:
                self._of = {other: bucket for other, bucket in self._of.items() if not bucket.is_full}
            if len(self._of) >= self._names:
                return None
            self._of[name] = TokenBucket(self._most, self._per_second)
        return self._of[name]
