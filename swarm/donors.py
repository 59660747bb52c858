"""Whom to ask for the state: a line that is slow is left for another one that may be faster."""

from __future__ import annotations

from collections.abc import Sequence

from hivemind.p2p import PeerID

from swarm.download import SLOWEST_BYTES_PER_SECOND

FAST_BYTES_PER_SECOND = 1e6
"""Who sends so much is not exchanged for another one."""
MAX_TRIED = 3
"""If so many are slow, the line of this peer itself may be."""


class Donors:
    """How fast those were that have been tried, while one state is looked for."""

    def __init__(self) -> None:
        self._rates: dict[PeerID, float] = {}

    def in_order(self, peer_ids: Sequence[PeerID]) -> list[tuple[PeerID, float]]:
        """Those that have not been tried, then the slow ones, the fastest of them first.

        :param peer_ids: who can hand over the state now, the best first
        :returns: each with the bytes per second that it has to send
        """
        untried = [peer_id for peer_id in peer_ids if peer_id not in self._rates]
        untried = untried[: max(0, MAX_TRIED - len(self._rates))]
        slow = sorted(self._rates.keys() & set(peer_ids), key=self._rates.__getitem__, reverse=True)
        if not untried and not slow:
            untried = list(peer_ids)  # those that were slow are gone
        fast = FAST_BYTES_PER_SECOND if len(peer_ids) > 1 else SLOWEST_BYTES_PER_SECOND
        return [(peer_id, fast) for peer_id in untried] + [(peer_id, SLOWEST_BYTES_PER_SECOND) for peer_id in slow]

    def was_slow(self, peer_id: PeerID, bytes_per_second: float) -> None:
        """Another one is tried before it gets its second chance."""
        self._rates[peer_id] = bytes_per_second
