"""Peers that are left out for a while, each time for longer: their claims were wrong, or they have spoilt a round."""

from __future__ import annotations

import math
import time

from hivemind.p2p import PeerID

from swarm.protocol.messages import MAX_GROUP_SIZE, Blame

BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 10.0, 60.0
"""Seconds for which a peer is left out whose claims did not hold: the first time, and at most. Each further time is
twice as long."""
BLAME_SECONDS, MAX_BLAME_SECONDS = 60.0, 600.0
"""The same for a peer that spoils rounds or holds them up."""


class Backoff:
    """Peers that are left out now.

    Args:
        max_seconds: longest time for which one is left out
    """

    def __init__(self, max_seconds: float = MAX_BACKOFF_SECONDS) -> None:
        self._max_seconds = max_seconds
        self._seconds: dict[PeerID, tuple[float, float]] = {}
        """Monotonic seconds until which, and how long that was."""

    def __contains__(self, peer: PeerID) -> bool:
        return self._seconds.get(peer, (-math.inf, 0.0))[0] >= time.monotonic()

    def add(self, peer: PeerID, first_seconds: float = BACKOFF_SECONDS) -> None:
        """Ignore a peer for a while: what it claims did not hold.

        Args:
            first_seconds: for which it is left out the first time
        """
        if len(self._seconds) >= 4 * MAX_GROUP_SIZE:  # names cost a stranger nothing
            self._seconds = {other: seconds for other, seconds in [*self._seconds.items()] if other in self}
        _, before = self._seconds.get(peer, (0.0, 0.0))
        if math.isinf(before):
            return  # for good
        seconds = min(max(first_seconds, 2 * before), self._max_seconds)
        self._seconds[peer] = time.monotonic() + seconds, seconds

    def end(self, peer: PeerID) -> None:
        """It has kept its word."""
        if peer in self._seconds and math.isfinite(self._seconds[peer][1]):
            del self._seconds[peer]


class BlameBackoff(Backoff):
    """Peers that have spoilt a round or held it up; they are left out for longer than who makes a wrong claim."""

    def __init__(self) -> None:
        super().__init__(MAX_BLAME_SECONDS)

    def blame(self, peer: PeerID, what: Blame) -> None:
        """Leave a peer out; for good, if everybody can check why. A leader that hangs, or goes on alone, can be honest,
        and held up or cut off itself: the first time it is taken back soon."""
        if what.is_proven:
            self._seconds[peer] = math.inf, math.inf
            return
        self.add(peer, BACKOFF_SECONDS if what in (Blame.STUCK, Blame.GOES_ON_ALONE) else BLAME_SECONDS)
