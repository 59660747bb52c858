"""Makes sure that a message is given only once, however often there is a reason for it."""

from __future__ import annotations

from collections.abc import Hashable

MOST = 1024


class Once:
    """Remembers what messages have been given about. It is bounded, since the network may name ever new things.

    Args:
        most: things that messages are given about; there are none about further ones
    """

    def __init__(self, most: int = MOST):
        self._most = most
        self._said: set[Hashable] = set()

    def first(self, about: Hashable = None) -> bool:
        """Whether a message is to be given: there was none about this thing yet. Remembers the thing."""
        if about in self._said or len(self._said) >= self._most:
            return False
        self._said.add(about)
        return True
