"""What this peer has learnt of the others: who has trained with it, and who did not keep its word."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from hivemind.p2p import PeerID

from swarm.membership.backoff import BLAME_SECONDS, MAX_BLAME_SECONDS, Backoff, BlameBackoff
from swarm.membership.no_shows import NoShows
from swarm.protocol.messages import MAX_GROUP_SIZE, Blame
from swarm.runtime.timeouts import seconds_since_boot

MAX_KNOWN = 2 * MAX_GROUP_SIZE
"""Peers that this one remembers from its groups; with more it begins anew, since names cost a stranger nothing."""


class Trust:
    """Of one peer, in the others. Sets and mappings are replaced, not changed: other threads may be reading them."""

    def __init__(self) -> None:
        self.has_trained = False
        """Whether this peer has been in a group since it started: then it knows itself about where the swarm is."""
        self._in_group_at = seconds_since_boot()
        self.last_group: frozenset[PeerID] = frozenset()
        """Who finished the last step with this peer."""
        self.proven: dict[PeerID, float] = {}
        """Who was in a group with this peer, and when each had joined then."""
        self.trained_with: frozenset[PeerID] = frozenset()
        """The same, also from before this peer came back: who has been in a group with it is no stranger."""
        self.distrusted = Backoff()
        """Whose claims did not hold."""
        self.blamed = BlameBackoff()
        """Who has spoilt a round or held it up."""
        self.false_donors = Backoff(MAX_BLAME_SECONDS)
        """Who has handed over something that others do not hold."""
        self.unreachable = Backoff()
        """Who could not be asked for its state."""
        self.no_shows = NoShows()
        """Who was expected and did not come."""
        self._went_alone: frozenset[PeerID] = frozenset()

    # ---- its groups -------------------------------------------------------------------------------------------------

    def finished_step(self, group: frozenset[PeerID], joined: Mapping[PeerID, float]) -> None:
        """These have finished a step with this peer.

        Args:
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
        """Since this peer was in a group, or started."""
        return seconds_since_boot() - self._in_group_at

    def came_back(self) -> None:
        """This peer has been away: nobody was missed by it, and nobody has proven anything since."""
        self.no_shows.forget()
        self.proven = {}

    def came(self, peers: Collection[PeerID]) -> None:
        """These have met to end a step."""
        for peer in peers:
            self.no_shows.came(peer)

    def missed(self, peers: Collection[PeerID], step: int, joined: Mapping[PeerID, float]) -> None:
        """These are not there to end this step."""
        for peer in peers:
            since = joined.get(peer, math.nan)
            self.no_shows.note(peer, step, since, self.proven.get(peer) == since)

    # ---- what they did ----------------------------------------------------------------------------------------------

    def blame(self, peer: PeerID, what: Blame) -> None:
        """It has spoilt a round or held it up: it is not met for a while, each further time for longer."""
        self.blamed.blame(peer, what)
        if what is Blame.GOES_ON_ALONE:
            self._went_alone |= {peer}
        self.trained_with -= {peer}  # its word counts again when it has been in a group again
        self.proven = {other: since for other, since in self.proven.items() if other != peer}

    def is_left_out(self, peer: PeerID) -> bool:
        """Whether it is neither believed nor met now."""
        return peer in self.distrusted or peer in self.blamed

    @property
    def left_out_leaders(self) -> frozenset[PeerID]:
        """Who has said that the swarm has gone on, which all denied, and is left out now."""
        self._went_alone = frozenset(peer for peer in self._went_alone if peer in self.blamed)
        return self._went_alone

    def handed_over(self, peer: PeerID) -> None:
        """It has kept its word, and given its state."""
        self.distrusted.end(peer)
        self.unreachable.end(peer)

    def handed_over_false(self, peer: PeerID) -> None:
        """What it gave is not what others hold: it is not asked again for a while. As a member it is met all the same,
        since others follow it if it leads."""
        self.false_donors.add(peer, BLAME_SECONDS)

    def did_not_hand_over(self, peer: PeerID, is_outbound_only: bool) -> None:
        """It was asked for its state in vain: nothing can be said against who cannot be dialled."""
        if peer not in self.false_donors:
            (self.unreachable if is_outbound_only else self.distrusted).add(peer)
