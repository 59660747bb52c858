"""How far others can be: what a peer says about itself is no reason to believe it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from hivemind.p2p import PeerID

from swarm.membership.progress_record import JOINING, WAITING, PeerProgress

MAX_AHEAD = 1000
"""Updates that others can have made without this peer, as far as one of them alone is believed."""
MAX_UPDATES_PER_SECOND = 20.0
"""That a swarm makes at most: others can be so much further for each second since this peer was in a group."""
MAX_APART = 100
"""Updates between what two peers say that hold the same weights: records are seconds old, and swarms are fast."""


def reach_of(
    own_step: int,
    max_step: int,
    has_trained: bool,
    away_seconds: float,
    proven: Mapping[PeerID, float],
    others: Mapping[PeerID, PeerProgress],
) -> Callable[[PeerID], int]:
    """The latest step that each of the others is believed to hold.

    If this peer knows others that it has been in a group with, one of them has to be about as far. Who has trained
    itself knows that few updates can have been made since, unless two such peers say otherwise, or it was away for
    long: a laptop may have slept, and its line may have been down all night. A stranger is not ahead of all whom it
    knows. For who has just come, another one has to confirm it, where there is one.

    Args:
        own_step: of this peer
        max_step: at which the run is over
        has_trained: it has been in a group since it started
        away_seconds: since it was in one, or started
        proven: who was in a group with it, and when they had joined then
        others: their records
    """
    known = {peer: record.step for peer, record in others.items() if proven.get(peer) == record.joined}
    if has_trained:
        words = known
    else:
        full = {peer: record for peer, record in others.items() if not record.client_mode}
        words = {peer: record.step for peer, record in full.items() if record.phase not in (JOINING, WAITING)}
    latest = heapq.nlargest(2, words.items(), key=lambda word: word[1])

    def reach(peer: PeerID) -> int:
        second = next((step for other, step in latest if other != peer), None)
        limits = [max_step]
        if second is not None:
            limits.append(max(second, own_step) + MAX_APART)
        if has_trained and known and peer not in known:
            limits.append(max(own_step, *known.values()))
        if has_trained and (second is None or peer not in known):
            limits.append(own_step + max(MAX_AHEAD, int(MAX_UPDATES_PER_SECOND * away_seconds)))
        return min(limits)

    return reach
