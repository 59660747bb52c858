"""Peers that were expected at the end of a step and did not come: they are not waited for until something changes."""

from __future__ import annotations

import math
from typing import NamedTuple

from hivemind.p2p import PeerID

from swarm.membership.backoff import Backoff
from swarm.protocol.messages import MAX_GROUP_SIZE

MAX_WAITED_FOR = 3
"""Steps at which a stranger is waited for in vain before it is left out of the waiting for a while."""
MAX_REMEMBERED = 4 * MAX_GROUP_SIZE
"""Peers that are remembered, the latest ones. There is a limit because names cost a stranger nothing."""


class NoShow(NamedTuple):
    """The last absence of a peer.

    Args:
        step: the step that it did not come to end
        joined: when it had joined, as its record said then; nan if it had no record
        in_a_row: at how many different steps it did not come, without having been in a group at all
    """

    step: int
    joined: float
    in_a_row: int


_NEVER = NoShow(-1, math.nan, 0)


class NoShows:
    """Absences of the other peers.

    A missed peer is expected again when its `joined` changes, by which it says that it came back. A stranger could say
    that all the time and keep all peers waiting. So after `MAX_WAITED_FOR` absences a peer that never was in a group is
    not waited for, for a while that grows each time. It can still come.
    """

    def __init__(self) -> None:
        self._last: dict[PeerID, NoShow] = {}
        self._strangers = Backoff()

    def note(self, peer: PeerID, step: int, joined: float, is_proven: bool) -> None:
        """Note that a peer has not come to end a step.

        Args:
            peer: the peer
            step: that step
            joined: when it had joined, as its record says; nan if it has no record
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
        """Forget the absences of a peer: it has come."""
        self._last.pop(peer, None)
        self._strangers.end(peer)

    def forget(self) -> None:
        """Forget all absences: this peer itself has been away."""
        self._last.clear()

    def missed_at(self, peer: PeerID) -> int:
        """The last step at which the peer was missed; -1 for none."""
        return self._last.get(peer, _NEVER).step

    def is_over(self, peer: PeerID, joined: float) -> bool:
        """Whether the peer is waited for, or again waited for, if it joined at this time."""
        return self._last.get(peer, _NEVER).joined != joined and peer not in self._strangers
