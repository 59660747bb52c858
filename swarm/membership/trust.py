"""What this peer has learnt about other peers: which have trained with it, and which have failed it or lied."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from hivemind.p2p import PeerID

from swarm.membership.backoff import BLAME_SECONDS, MAX_BLAME_SECONDS, Backoff, BlameBackoff
from swarm.membership.no_shows import NoShows
from swarm.protocol.messages import MAX_GROUP_SIZE, Blame
from swarm.runtime.timeouts import seconds_since_boot

MAX_KNOWN = 2 * MAX_GROUP_SIZE
"""Peers that this one remembers from its groups. At this number it begins anew: names cost a stranger nothing."""


class Trust:
    """What this peer knows about the reliability of other peers.

    `last_group`, `proven` and `trained_with` are replaced, not changed: other threads may be reading them.
    """

    def __init__(self) -> None:
        self.has_trained = False
        """Whether this peer has been in a group since it started. Then it knows itself about where the swarm is."""
        self._in_group_at = seconds_since_boot()
        self.last_group: frozenset[PeerID] = frozenset()
        """Peers that finished the last step with this one."""
        self.proven: dict[PeerID, float] = {}
        """Peers that were in a group with this one since it last came back, and when each had joined then."""
        self.trained_with: frozenset[PeerID] = frozenset()
        """Peers that were in a group with this one at any time, also before it came back: they are no strangers."""
        self.distrusted = Backoff()
        """Peers that claimed something (a step, a state) that proved false."""
        self.blamed = BlameBackoff()
        """Peers that have spoilt a round or held it up."""
        self.false_donors = Backoff(MAX_BLAME_SECONDS)
        """Peers that have handed over something that other peers do not hold."""
        self.unreachable = Backoff()
        """Peers that could not be asked for their state."""
        self.no_shows = NoShows()
        """Peers that were expected in a group and did not come."""
        self._went_alone: frozenset[PeerID] = frozenset()
        """Peers blamed with `Blame.GOES_ON_ALONE`, until their backoff ends."""

    # ---- its groups -------------------------------------------------------------------------------------------------

    def finished_step(self, group: frozenset[PeerID], joined: Mapping[PeerID, float]) -> None:
        """Note the peers that have finished a step with this one.

        Args:
            group: all members of the group, this peer included
            joined: when each had joined, as its record says
        """
        self.last_group = group
        before = self.proven if len(self.proven) < MAX_KNOWN else {}
        self.proven = before | {peer: joined[peer] for peer in group & joined.keys()}
        self.trained_with = group | (self.trained_with if len(self.trained_with) < MAX_KNOWN else frozenset())
        if len(group) > 1:
            self.has_trained, self._in_group_at = True, seconds_since_boot()

    @property
    def away_seconds(self) -> float:
        """Seconds since this peer was in a group, or started. The time that a machine sleeps counts, too."""
        return seconds_since_boot() - self._in_group_at

    def came_back(self) -> None:
        """Note that this peer has been away: forget which peers it missed and which are proven."""
        self.no_shows.forget()
        self.proven = {}

    def came(self, peers: Collection[PeerID]) -> None:
        """Note that these peers have come to end a step."""
        for peer in peers:
            self.no_shows.came(peer)

    def missed(self, peers: Collection[PeerID], step: int, joined: Mapping[PeerID, float]) -> None:
        """Note that these peers have not come to end this step."""
        for peer in peers:
            since = joined.get(peer, math.nan)
            self.no_shows.note(peer, step, since, self.proven.get(peer) == since)

    # ---- what they did ----------------------------------------------------------------------------------------------

    def blame(self, peer: PeerID, what: Blame) -> None:
        """Leave out a peer that has spoilt a round or held it up: each time for longer, and for good if proven."""
        self.blamed.blame(peer, what)
        if what is Blame.GOES_ON_ALONE:
            self._went_alone |= {peer}
        self.trained_with -= {peer}  # its claims count again after it has been in another group
        self.proven = {other: since for other, since in self.proven.items() if other != peer}

    def is_left_out(self, peer: PeerID) -> bool:
        """Whether the peer is neither believed nor met now."""
        return peer in self.distrusted or peer in self.blamed

    @property
    def left_out_leaders(self) -> frozenset[PeerID]:
        """Leaders that are left out now because they said that the swarm had gone on, and all witnesses denied it."""
        self._went_alone = frozenset(peer for peer in self._went_alone if peer in self.blamed)
        return self._went_alone

    def handed_over(self, peer: PeerID) -> None:
        """Note that this peer handed over its state: it is no longer distrusted or unreachable."""
        self.distrusted.end(peer)
        self.unreachable.end(peer)

    def handed_over_false(self, peer: PeerID) -> None:
        """Note that this peer gave something that other peers do not hold: it is not asked again for a while.

        It is still met as a member, since other peers follow it if it leads.
        """
        self.false_donors.add(peer, BLAME_SECONDS)

    def did_not_hand_over(self, peer: PeerID, is_outbound_only: bool) -> None:
        """Note that this peer was asked for its state in vain.

        Args:
            is_outbound_only: it cannot be dialled, so the failure is no reason to distrust it
        """
        if peer not in self.false_donors:
            (self.unreachable if is_outbound_only else self.distrusted).add(peer)
