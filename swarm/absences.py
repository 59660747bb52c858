"""Who was expected to end a step and did not come: it is not waited for again before something has changed."""

from __future__ import annotations

import math
from typing import NamedTuple

from hivemind.p2p import PeerID

from swarm.distrust import Distrust


class Absence(NamedTuple):
    """Of one peer.

    :param step: that it has not come to end
    :param joined: when it had joined then, as its record said; nan if there was none
    :param is_proven: it had been in a group since then
    """

    step: int
    joined: float
    is_proven: bool


_NEVER = Absence(-1, math.nan, True)


class Absences:
    """Of the other peers.

    Who was missed is expected again when it says that it came back, which is when its ``joined`` changes. Who never was
    in a group could say that all the time, and keep everybody waiting: after the second absence nobody waits for it for
    a while, each time longer, though it can come.
    """

    def __init__(self) -> None:
        self._last: dict[PeerID, Absence] = {}
        self._strangers = Distrust()

    def note(self, peer: PeerID, absence: Absence) -> None:
        """It has not come."""
        before = self._last.get(peer, _NEVER)
        if not absence.is_proven and not before.is_proven and before.step < absence.step:
            self._strangers.add(peer)
        self._last[peer] = absence

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
