"""Which members send gradients that are far from all others', round after round.

Once is nothing: batches differ. Who is far away most of the time has other images, is far faster, is not in order, or
lies. Nobody is left out for it: what is far away counts for little, and small lies would not be found by this.
"""

from __future__ import annotations

from collections import deque

from hivemind.p2p import PeerID

from swarm.protocol.round_report import RoundReport
from swarm.runtime.once import Once

ROUNDS = 8
"""Latest rounds of a member that are looked at."""
MANY = 6
"""A member that was far away in so many of these rounds is named."""
MAX_REMEMBERED = 4096
"""Members; identities cost a stranger nothing."""


class FarMembers:
    """Counts in how many of its last rounds a member was far from the others, in what this peer has combined."""

    def __init__(self) -> None:
        self._was_far: dict[PeerID, deque[bool]] = {}
        self._named = Once(MAX_REMEMBERED)

    def note(self, report: RoundReport) -> list[PeerID]:
        """A round has given an average.

        Returns:
            those who are named now, each once in the life of this peer
        """
        if not report.judged:
            return []
        named = []
        for peer, ticket in report.group.members:
            if not ticket.samples:
                continue  # it has said nothing
            rounds = self._was_far.setdefault(peer, deque(maxlen=ROUNDS))
            rounds.append(peer in report.outside)
            if sum(rounds) >= MANY and self._named.first(peer):
                named.append(peer)
        while len(self._was_far) > MAX_REMEMBERED:
            self._was_far.pop(next(iter(self._was_far)))
        return named
