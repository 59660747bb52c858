"""Keeps in mind what a round left out that failed for this peer, and perhaps not for other members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Memory(Protocol):
    """Knows what a round has left out: of a reducer's averages, or of what a peer gave in PowerSGD's two passes."""

    def keep_left_out(self) -> None:
        """Keep it for what this peer gives next: other members have finished the round."""


class Unsettled:
    """The last round that failed here, although other members may have made its update with what this peer gave.

    If they have, what had waited to be sent has reached them, and what that round left out takes its place. This peer
    knows that they have when it holds the weights that came out of that round. It does not know so when it makes an
    update alone, or tries the round again.
    """

    def __init__(self) -> None:
        self._group_id, self._memories = b"", list[Memory]()

    def failed(self, group_id: bytes, memories: Sequence[Memory]) -> None:
        """Note that the round of this group has failed, and the memories that know what it left out."""
        self._group_id, self._memories = group_id, list(memories)

    def holds(self, lineage: bytes | None) -> None:
        """Note that this peer has weights of this lineage: they came out of the round of the group of that name."""
        if self._memories and lineage == self._group_id:
            for memory in self._memories:
                memory.keep_left_out()
            self.forget()

    def forget(self) -> None:
        """Forget the failed round: it is tried again, or this peer has gone another way."""
        self._memories = []
