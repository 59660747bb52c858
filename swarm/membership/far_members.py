"""Finds the members that send gradients far from all others, round after round.

A single far gradient means nothing: batches differ. A member that is far away most of the time has other images, is far
faster, is not in order, or lies. It is not left out for that. Far gradients count for little, and small lies would not
be found in this way.
"""

from __future__ import annotations

from collections import deque

from hivemind.p2p import PeerID

from swarm.protocol.round_report import RoundReport
from swarm.runtime.once import Once

ROUNDS = 8
"""Number of a member's latest rounds that are looked at."""
MANY = 6
"""A member that was far away in so many of these rounds is named."""
MAX_REMEMBERED = 4096
"""Members that are remembered. There is a limit because identities cost a stranger nothing."""


class FarMembers:
    """Counts in how many of its last rounds a member was far from the others, in the share that this peer reduced."""

    def __init__(self) -> None:
        self._was_far: dict[PeerID, deque[bool]] = {}
        self._named = Once(MAX_REMEMBERED)

    def note(self, report: RoundReport) -> list[PeerID]:
        """Count a round that has given an average.

        Returns:
            members that are to be named now; each is named once in the life of this process
        """
        if not report.judged:
            return []
        named = []
        for peer, ticket in report.group.members:
            if not ticket.samples:
                continue  # it gave no gradient
            rounds = self._was_far.setdefault(peer, deque(maxlen=ROUNDS))
            rounds.append(peer in report.outside)
            if sum(rounds) >= MANY and self._named.first(peer):
                named.append(peer)
        while len(self._was_far) > MAX_REMEMBERED:
            self._was_far.pop(next(iter(self._was_far)))
        return named
