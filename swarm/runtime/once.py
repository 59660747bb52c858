"""What is said once, however often there is a reason to say it."""

from __future__ import annotations

from collections.abc import Hashable

MOST = 1024


class Once:
    """Remembers what has been said. What comes from the network may name things without end, so it is bounded.

    Args:
        most: how many things are said at most; of further ones nothing is said
    """

    def __init__(self, most: int = MOST):
        self._most = most
        self._said: set[Hashable] = set()

    def first(self, about: Hashable = None) -> bool:
        """Whether this is to be said: nothing has been said about it yet."""
        if about in self._said or len(self._said) >= self._most:
            return False
        self._said.add(about)
        return True
