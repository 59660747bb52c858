"""Grace: the time for which a leader keeps its group open for joiners that have its state and are on their way."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Container

from hivemind.p2p import PeerID

from swarm.protocol.messages import MAX_GROUP_SIZE
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts

MAX_HOLDS = 4
"""How often in `WITHIN_SECONDS` a group is held open for one peer."""
WITHIN_SECONDS = 60.0


class JoinerGrace:
    """Remembers for which peers a leader keeps its next group open.

    In a swarm of short steps a joiner would find every group closed, if the leader did not wait for it. No peer can
    keep groups open for good: they are held `MAX_HOLDS` times a minute for a peer, some seconds each time. They are
    held for `MAX_GROUP_SIZE` known peers a minute, and for as many strangers: strangers take no place of a known peer.
    For strangers the leader has a limited allowance of time (`swarm.averaging.meeting.matchmaking`).

    Args:
        known: peers that have averaged with the leader; all others are strangers
        timeouts: for how long a group is held open
    """

    def __init__(self, known: Container[PeerID] = (), timeouts: Timeouts = DEFAULT_TIMEOUTS):
        self._known, self._timeouts = known, timeouts
        self._until: dict[PeerID, float] = {}
        self._holds: dict[PeerID, deque[float]] = {}
        self.open_until = 0.0
        """System-wide monotonic seconds until which some peer may still come."""

    def hold(self, peer: PeerID, seconds: float | None = None) -> None:
        """Keep the next group open for this peer, for `seconds` or else for `hold_seconds` of the timeouts."""
        seconds = self._timeouts.hold_seconds if seconds is None else seconds
        now = time.monotonic()
        self._forget_past(now)  # a peer that never leads does not ask `awaited`
        self._holds = {other: holds for other, holds in self._holds.items() if holds[-1] > now - WITHIN_SECONDS}
        holds = self._holds.get(peer, deque(maxlen=MAX_HOLDS))
        used_up = len(holds) == MAX_HOLDS and holds[0] > now - WITHIN_SECONDS
        if used_up or (not holds and self._num_like(peer) >= MAX_GROUP_SIZE):
            return
        holds.append(now)
        self._holds[peer] = holds
        self._until[peer] = max(now + seconds, self._until.get(peer, 0.0))
        self.open_until = max(self.open_until, now + seconds)

    def _num_like(self, peer: PeerID) -> int:
        """For how many peers that are known, or strangers, as this one is, a group was held in the last minute."""
        return sum((other in self._known) == (peer in self._known) for other in self._holds)

    def awaited(self, arrived: Collection[PeerID]) -> set[PeerID]:
        """The peers for which the group is held, without those that have arrived."""
        self._forget_past(time.monotonic())
        self._until = {peer: until for peer, until in self._until.items() if peer not in arrived}
        return set(self._until)

    def _forget_past(self, now: float) -> None:
        self._until = {peer: until for peer, until in self._until.items() if until > now}

    def seconds_left(self, peers: Collection[PeerID]) -> float:
        """Seconds for which the group is still held for at least one of these peers."""
        now = time.monotonic()
        return max((self._until[peer] - now for peer in peers if peer in self._until), default=0.0)
