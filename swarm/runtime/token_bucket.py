"""Token buckets, which limit how much of something may be used up in a time (the idea is in RFC 2697)."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """A budget that refills with time.

    Args:
        most: tokens that may be used at once
        per_second: tokens that come back each second
        clock: returns seconds
    """

    def __init__(self, most: float, per_second: float, clock: Callable[[], float] = time.monotonic):
        self._most, self._per_second, self._clock = most, per_second, clock
        self._left, self._looked_at = most, clock()

    @property
    def left(self) -> float:
        """Tokens that may be used now; negative if more were used than there were."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._looked_at) * self._per_second)
        self._looked_at = now
        return self._left

    def spend(self, amount: float) -> None:
        """Use up tokens, also if there are too few: then less than nothing is left."""
        self._left = self.left - amount

    def take(self) -> bool:
        """Use one token if there is one, and return whether there was."""
        if self.left < 1:
            return False
        self.spend(1)
        return True

    @property
    def is_full(self) -> bool:
        """Whether all tokens have come back. Such a bucket is the same as a new one, so it can be forgotten."""
        return self._left + (self._clock() - self._looked_at) * self._per_second >= self._most


class TokenBuckets:
    """A token bucket for each name, forgotten when it is full again.

    Args:
        most: tokens that one name may use at once
        per_second: tokens that come back each second
        names: names that are remembered at most; while so many are in use, a further name gets no token
    """

    def __init__(self, most: float, per_second: float, names: int = 4096):
        self._most, self._per_second, self._names = most, per_second, names
        self._of: dict[object, TokenBucket] = {}

    def take(self, name: object) -> bool:
        """Use one token of this name if there is one, and return whether there was."""
        bucket = self._bucket(name)
        return bucket is not None and bucket.take()

    def may(self, name: object) -> bool:
        """Whether this name has anything left. Uses nothing up."""
        bucket = self._bucket(name)
        return bucket is not None and bucket.left > 0

    def spend(self, name: object, amount: float) -> None:
        """Use up tokens of this name, also if there are too few: then less than nothing is left."""
        if (bucket := self._bucket(name)) is not None:
            bucket.spend(amount)

    def _bucket(self, name: object) -> TokenBucket | None:
        """The bucket of a name; None if too many names are in use."""
        if name not in self._of:
            if len(self._of) >= self._names:
                self._of = {other: bucket for other, bucket in self._of.items() if not bucket.is_full}
            if len(self._of) >= self._names:
                return None
            self._of[name] = TokenBucket(self._most, self._per_second)
        return self._of[name]
