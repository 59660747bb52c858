"""How much of something may be used up in a time: a token bucket."""

from __future__ import annotations

import time


class Allowance:
    """Full at first; what is spent comes back evenly.

    :param amount: the most that can be spent at once, and in ``seconds`` once it is empty
    :param seconds: in which an empty one is full again
    """

    def __init__(self, amount: float, seconds: float):
        self._amount, self._seconds = amount, seconds
        self._left, self._looked = amount, time.monotonic()

    @property
    def left(self) -> float:
        """What may be spent now."""
        now = time.monotonic()
        self._left = min(self._amount, self._left + self._amount * (now - self._looked) / self._seconds)
        self._looked = now
        return self._left

    def spend(self, amount: float) -> None:
        """So much has been used; it may become less than nothing."""
        self._left = self.left - amount
