"""The time for which a leader keeps its group open for joiners: they hold its state and are on their way to it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection

from hivemind.p2p import PeerID

from swarm.protocol.messages import MAX_GROUP_SIZE
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts

MAX_HOLDS = 4
"""Times in `WITHIN_SECONDS` that a group is held open for one peer."""
WITHIN_SECONDS = 60.0


class JoinerGrace:
    """Remembers for whom a leader keeps its next group open.

    In a swarm of short steps a newcomer would find every group closed, if nobody waited for it. Nobody can keep it open
    for good: it is held `MAX_HOLDS` times a minute for a peer, some seconds each time, and the leader waits for
    strangers with an allowance (`swarm.averaging.meeting.matchmaking`).
    """

    def __init__(self, timeouts: Timeouts = DEFAULT_TIMEOUTS):
        self._timeouts = timeouts
        self._until: dict[PeerID, float] = {}
        self._holds: dict[PeerID, deque[float]] = {}
        self.open_until = 0.0
        """System-wide monotonic seconds until which somebody may still come."""

    def hold(self, peer: PeerID, seconds: float | None = None) -> None:
        """The next group waits so long for this peer; `hold_seconds` if nothing else is said."""
        seconds = self._timeouts.hold_seconds if seconds is None else seconds
        now = time.monotonic()
        self._holds = {other: holds for other, holds in self._holds.items() if holds[-1] > now - WITHIN_SECONDS}
        holds = self._holds.get(peer, deque(maxlen=MAX_HOLDS))
        used_up = len(holds) == MAX_HOLDS and holds[0] > now - WITHIN_SECONDS
        if used_up or (not holds and len(self._holds) >= MAX_GROUP_SIZE):
            return
        holds.append(now)
        self._holds[peer] = holds
        self._until[peer] = max(now + seconds, self._until.get(peer, 0.0))
        self.open_until = max(self.open_until, now + seconds)

    def awaited(self, arrived: Collection[PeerID]) -> set[PeerID]:
        """For whom it is held, without those who have come."""
        now = time.monotonic()
        self._until = {peer: until for peer, until in self._until.items() if until > now and peer not in arrived}
        return set(self._until)

    def seconds_left(self, peers: Collection[PeerID]) -> float:
        """For which it is held for one of these at least."""
        now = time.monotonic()
        return max((self._until[peer] - now for peer in peers if peer in self._until), default=0.0)
