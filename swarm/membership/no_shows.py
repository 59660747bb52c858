"""Peers that were expected at the end of a step and did not come: nobody waits for them until something changes."""

from __future__ import annotations

import math
from typing import NamedTuple

from hivemind.p2p import PeerID

from swarm.membership.backoff import Backoff
from swarm.protocol.messages import MAX_GROUP_SIZE

MAX_WAITED_FOR = 3
"""Steps at which a stranger is waited for in vain."""
MAX_REMEMBERED = 4 * MAX_GROUP_SIZE
"""The latest; names cost a stranger nothing."""


class NoShow(NamedTuple):
    """Of one peer.

    Args:
        step: that it has not come to end
        joined: when it had joined then, as its record said; nan if there was none
        in_a_row: at how many different steps it has not come, without having been in a group at all
    """

    step: int
    joined: float
    in_a_row: int


_NEVER = NoShow(-1, math.nan, 0)


class NoShows:
    """Of the other peers.

    Who was missed is expected again when it says that it came back, which is when its `joined` changes. Who never was
    in a group could say that all the time, and keep everybody waiting: after `MAX_WAITED_FOR` absences nobody waits
    for it for a while, each time longer, though it can come.
    """

    def __init__(self) -> None:
        self._last: dict[PeerID, NoShow] = {}
        self._strangers = Backoff()

    def note(self, peer: PeerID, step: int, joined: float, is_proven: bool) -> None:
        """It has not come to end a step.

        Args:
            joined: when it had joined, as its record says; nan if there is none
            is_proven: it has been in a group since then
        """
        before = self._last.get(peer, _NEVER)
        in_a_row = 0 if is_proven else before.in_a_row + (before.step < step)
        if in_a_row >= MAX_WAITED_FOR and before.step < step:
            self._strangers.add(peer)
        self._last.pop(peer, None)
        self._last[peer] = NoShow(step, joined, in_a_row)
        if len(self._last) > MAX_REMEMBERED:
            del self._last[next(iter(self._last))]

    def came(self, peer: PeerID) -> None:
        """It is there."""
        self._last.pop(peer, None)
        self._strangers.end(peer)

    def forget(self) -> None:
        """This peer itself has been away."""
        self._last.clear()

    def missed_at(self, peer: PeerID) -> int:
        """The last step at which it was missed; -1 for none."""
        return self._last.get(peer, _NEVER).step

    def is_over(self, peer: PeerID, joined: float) -> bool:
        """Whether it is waited for again, having joined then."""
        return self._last.get(peer, _NEVER).joined != joined and peer not in self._strangers
