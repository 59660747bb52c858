"""Peers that are left out for a while, each time for longer: their claims were wrong, or they have spoilt a round."""

from __future__ import annotations

import math
import time

from hivemind.p2p import PeerID

from swarm.protocol.messages import MAX_GROUP_SIZE, Blame

BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 10.0, 60.0
"""Seconds for which a peer with false claims is left out: the first time, and at most. The time doubles each time."""
BLAME_SECONDS, MAX_BLAME_SECONDS = 60.0, 600.0
"""Seconds for a peer that spoils rounds or holds them up: the first time, and at most."""
MAX_REMEMBERED = 4 * MAX_GROUP_SIZE
"""Peers with a backoff, also one that is over. There is a limit because names cost a stranger nothing."""


class Backoff:
    """Peers that are left out now.

    At `MAX_REMEMBERED` peers, a further one takes the place of the peer whose backoff ends, or has ended, first.

    Args:
        max_seconds: longest time for which a peer is left out
    """

    def __init__(self, max_seconds: float = MAX_BACKOFF_SECONDS) -> None:
        self._max_seconds = max_seconds
        self._seconds: dict[PeerID, tuple[float, float]] = {}
        """For each peer: the monotonic time until which it is left out, and for how many seconds in all."""

    def __contains__(self, peer: PeerID) -> bool:
        return self._seconds.get(peer, (-math.inf, 0.0))[0] >= time.monotonic()

    def add(self, peer: PeerID, first_seconds: float = BACKOFF_SECONDS) -> None:
        """Leave out a peer for a while.

        Args:
            first_seconds: seconds for which it is left out the first time
        """
        _, before = self._seconds.get(peer, (0.0, 0.0))
        if math.isinf(before):
            return  # left out for good
        seconds = min(max(first_seconds, 2 * before), self._max_seconds)
        self._remember(peer, time.monotonic() + seconds, seconds)

    def _remember(self, peer: PeerID, until: float, seconds: float) -> None:
        if peer not in self._seconds and len(self._seconds) >= MAX_REMEMBERED:
            first, _ = min([*self._seconds.items()], key=lambda other: other[1])
            self._seconds.pop(first, None)
        self._seconds[peer] = until, seconds

    def end(self, peer: PeerID) -> None:
        """Forget the backoff of a peer that has proved reliable, unless it is left out for good."""
        if peer in self._seconds and math.isfinite(self._seconds[peer][1]):
            del self._seconds[peer]


class BlameBackoff(Backoff):
    """Peers that have spoilt a round or held it up. They are left out for longer than peers with false claims."""

    def __init__(self) -> None:
        super().__init__(MAX_BLAME_SECONDS)

    def blame(self, peer: PeerID, what: Blame) -> None:
        """Leave out a peer; for good, if every peer can check the reason.

        A leader that hangs or goes on alone can be honest, and held up or cut off itself. So its first time is short.
        """
        if what.is_proven:
            self._remember(peer, math.inf, math.inf)
            return
        self.add(peer, BACKOFF_SECONDS if what in (Blame.STUCK, Blame.GOES_ON_ALONE) else BLAME_SECONDS)
