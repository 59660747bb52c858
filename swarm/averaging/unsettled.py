"""What becomes of what a round has left out that failed for this peer, and perhaps not for others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Memory(Protocol):
    """Knows what a round has left out of what this peer gave: a reducer's share of it, or PowerSGD's two passes."""

    def keep_left_out(self) -> None:
        """Others have finished the round: that goes with what this peer gives next."""


class Unsettled:
    """The last round that failed here. Others may have all they need, and make its update with what this peer gave.

    What had waited to be sent has reached them then, and what that round left out takes its place. Whether they have
    made it is known when this peer holds the weights that came out of that round, and not where it has made an update
    alone or tries the round again.
    """

    def __init__(self) -> None:
        self._group_id, self._memories = b"", list[Memory]()

    def failed(self, group_id: bytes, memories: Sequence[Memory]) -> None:
        """The round of this group has; these know what it left out."""
        self._group_id, self._memories = group_id, list(memories)

    def holds(self, lineage: bytes | None) -> None:
        """This peer has weights of this lineage: the name of the group whose round they came out of."""
        if self._memories and lineage == self._group_id:
            for memory in self._memories:
                memory.keep_left_out()
            self.forget()

    def forget(self) -> None:
        """The round is tried again, or this peer has gone another way."""
        self._memories = []
