"""Bounds on how far ahead another peer can be: a peer's claim about itself is not enough to believe it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from hivemind.p2p import PeerID

from swarm.membership.progress_record import JOINING, WAITING, PeerProgress

MAX_AHEAD = 1000
"""Updates that other peers can have made without this one, where only one of them claims it."""
MAX_UPDATES_PER_SECOND = 20.0
"""Updates per second that a swarm makes at most. Each second since this peer's last group allows for so many more."""
MAX_APART = 100
"""Updates by which the records of two peers with the same weights can differ: records are seconds old, and swarms are
fast."""


def reach_of(
    own_step: int,
    max_step: int,
    has_trained: bool,
    away_seconds: float,
    proven: Mapping[PeerID, float],
    others: Mapping[PeerID, PeerProgress],
) -> Callable[[PeerID], int]:
    """Compute the latest step that each of the other peers is believed to hold.

    A peer that has trained asks more of a claim:

    - A second peer that was in a group with this one has to be about as far.
    - Where no second one is, only few updates can have been made since its last group. After a long absence (a laptop
      slept, or its line was down all night) there can be more.
    - A stranger is never ahead of all peers that this one was in a group with.

    For a peer that has not trained yet, any other server-mode peer that trains has to be about as far, if there is one.

    Args:
        own_step: step of this peer
        max_step: step at which the run is over
        has_trained: this peer has been in a group since it started
        away_seconds: seconds since this peer was in a group, or started
        proven: peers that were in a group with this one, and when each had joined then
        others: records of the other peers

    Returns:
        function from a peer to that step
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
