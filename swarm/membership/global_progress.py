"""How far the swarm is, as one peer sees it at one moment: the members of the next round, and when it is due."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import cached_property

from hivemind.p2p import PeerID

from swarm.membership.claim_bounds import reach_of
from swarm.membership.no_shows import NoShows
from swarm.membership.progress_record import AVERAGING, JOINING, TRAINING, WAITING, PeerProgress
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.messages import Member, first_members


@dataclass(frozen=True)
class GlobalProgress:
    """Conclusions from the progress records of one moment. It is never changed.

    Args:
        me: this peer
        own: record of this peer
        records: fresh records of the other peers, without the peers that are left out
        doubted: peers that claim to be ahead and have not answered yet; they are not followed
        silent: doubted peers that were called in vain; they are not met either
        proven: peers that were in a group with this one, and when each had joined then
        member_since: when each became a member, seconds since 1970, as the organiser has signed; empty in an open run
        last_group: peers that finished the last step with this one
        false_donors: peers that have handed over something that other peers do not hold; they are not asked
        unreachable: peers that could not be asked for their state
        no_shows: peers that were expected in a group and did not come
        has_trained: this peer has been in a group since it started
        away_seconds: seconds since this peer was in a group, or started
        max_step: step at which the run is over
        target: samples over all peers per global update
        now: DHT time in seconds
        computing_since: DHT time at which this peer began to compute for its step
        recounted: DHT time; records from before it do not count as waiting for the round of this step
        hold_seconds: seconds from `recounted` on in which this step does not end
    """

    me: PeerID
    own: PeerProgress
    records: Mapping[PeerID, PeerProgress]
    doubted: Container[PeerID]
    silent: Container[PeerID]
    proven: Mapping[PeerID, float]
    member_since: Mapping[PeerID, float]
    last_group: Container[PeerID]
    false_donors: Container[PeerID]
    unreachable: Container[PeerID]
    no_shows: NoShows
    has_trained: bool
    away_seconds: float
    max_step: int
    target: BatchTarget
    now: float
    computing_since: float
    recounted: float
    hold_seconds: float

    # ---- which peers are believed -----------------------------------------------------------------------------------

    def may_hold(self, peer: PeerID, step: int) -> bool:
        """Whether that peer can hold the swarm's state of this step, as far as this peer knows."""
        return step <= self._reach(self.records)(peer)

    def _reach(self, records: Mapping[PeerID, PeerProgress]) -> Callable[[PeerID], int]:
        return reach_of(self.own.step, self.max_step, self.has_trained, self.away_seconds, self.proven, records)

    def _without(self, left_out: Container[PeerID]) -> dict[PeerID, PeerProgress]:
        """Records of peers that claim no step beyond their bound (`reach_of`), without those left out."""
        records = {peer: record for peer, record in self.records.items() if peer not in left_out}
        reach = self._reach(records)
        return {peer: record for peer, record in records.items() if record.step <= reach(peer)}

    @cached_property
    def _believed(self) -> dict[PeerID, PeerProgress]:
        """Records of the peers that this one would follow."""
        return self._without(self.doubted)

    @property
    def impossible(self) -> list[PeerID]:
        """Peers that claim to be further ahead than is possible."""
        reach = self._reach(self.records)
        return [peer for peer, record in self.records.items() if record.step > max(self.own.step, reach(peer))]

    # ---- members of the next round ----------------------------------------------------------------------------------

    @cached_property
    def members(self) -> list[Member]:
        """All peers that may come to the next round, this peer included.

        They may be at any step: records are older than a fast swarm's steps. There are these exceptions:

        - A peer that joins, or waits at an earlier step, has to take over our state first. It is no member.
        - A peer that was missed is no member until its record shows a later step. It is not awaited until its `joined`
          shows that it has come back with our state. So half of a divided network can go on without the other half.
        """
        proven = bool(self.proven)
        since = self._since(self.me, self.own) if proven else self.own.joined
        members = [Member(self.me, since, self.own.client_mode, proven=proven)]
        for peer, record in self._without(self.silent).items():
            waits = record.phase == WAITING and record.step < self.own.step and peer not in self.last_group
            if waits or record.phase == JOINING or record.step <= self.no_shows.missed_at(peer):
                continue
            is_awaited = self.no_shows.is_over(peer, record.joined)
            is_proven = self.proven.get(peer) == record.joined
            # A peer that has just come back is the junior until it has been in a group, whenever it became a member.
            since = self._since(peer, record) if is_proven else record.joined
            members.append(Member(peer, since, record.client_mode, is_awaited, is_proven))
        return first_members(members, self.me)

    def _since(self, peer: PeerID, record: PeerProgress) -> float:
        """The time that decides a peer's seniority: signed by the organiser if there is one, else as the peer says."""
        return self.member_since.get(peer, record.joined)

    @property
    def num_trainers(self) -> int:
        """Number of `members` that train; helpers do not."""
        records = {**self.records, self.me: self.own}
        return sum(not records[member.peer_id].helps for member in self.members)

    @property
    def next_round(self) -> int:
        """The step that the next round is going to end, as the peers that train say."""
        rounds = [record.round for record in self._believed.values() if record.phase not in (JOINING, WAITING)]
        return max(rounds, default=self.own.round)

    # ---- which states count -----------------------------------------------------------------------------------------

    @property
    def latest_step(self) -> int:
        """The latest step of a believed peer that could hand over its state; at least the own step."""
        claims = [
            record.step
            for peer, record in self._believed.items()
            if self._can_ask(peer, record) and record.phase != JOINING
        ]
        return max([self.own.step, *claims])

    @cached_property
    def seconded_step(self) -> int:
        """The latest step that at least two known peers have reached; at least the own step.

        If this peer has trained with two or more of the present peers, it does not give up its weights for the claim of
        a single one. Otherwise this is `latest_step`.
        """
        known = sorted(
            record.step
            for peer, record in self._believed.items()
            if self.proven.get(peer) == record.joined and record.phase not in (JOINING, WAITING)
        )
        if not self.has_trained or len(known) < 2:
            return self.latest_step
        return max(self.own.step, min(self.latest_step, known[-2]))

    def donors(self, min_step: int) -> list[PeerID]:
        """Server-mode peers that claim to hold the state of `min_step` or later, the best first.

        These criteria apply one after the other:

        - The peer has an attestation of its state (a newcomer has none).
        - It has been in a group with this one.
        - It is at most at `seconded_step`.
        - Its step is later.
        - It is senior.

        If there is no server-mode peer, the list has client-mode peers.
        """
        candidates = sorted(
            (
                record.client_mode,
                record.attested is None,
                self.proven.get(peer) != record.joined,
                record.step > self.seconded_step,
                -record.step,
                self._since(peer, record),
                peer.to_bytes(),
                peer,
            )
            for peer, record in self._believed.items()
            if self._can_ask(peer, record) and record.step >= min_step and record.phase != JOINING
        )
        return [peer for client_mode, *_, peer in candidates if client_mode == candidates[0][0]]

    @property
    def superiors(self) -> list[PeerID]:
        """Peers whose state counts instead of this peer's.

        They are at a later step, or they are server-mode peers at the same step with other weights and senior to this
        peer.
        """
        own, mine, found = self.own, (self._since(self.me, self.own), self.me.to_bytes()), []
        for peer, record in self._believed.items():
            is_ahead = record.step > own.step and self._can_ask(peer, record)
            is_other = record.step == own.step and record.lineage != own.lineage
            is_senior = not record.client_mode and (self._since(peer, record), peer.to_bytes()) < mine
            if is_ahead or (is_other and is_senior and peer not in self.false_donors):
                found.append(peer)
        return found

    def _can_ask(self, peer: PeerID, record: PeerProgress) -> bool:
        """Whether a peer can be asked for its state.

        A client-mode peer can answer over a connection that it has made to this peer, if this one is in server mode.
        """
        cannot = record.client_mode and (self.own.client_mode or peer in self.unreachable)
        return not cannot and peer not in self.false_donors

    # ---- when a step is over ----------------------------------------------------------------------------------------

    @cached_property
    def _present(self) -> dict[PeerID, PeerProgress]:
        """Records of the other peers whose samples can still be had for this step."""
        step, no_shows = self.own.step, self.no_shows
        return {
            peer: record
            for peer, record in self._believed.items()
            if no_shows.missed_at(peer) < step and no_shows.is_over(peer, record.joined)
        }

    @property
    def samples_by_now(self) -> float:
        """Samples that the swarm has probably accumulated towards the next update."""
        samples: float = self.own.samples
        for peer, record in self._present.items():
            samples += record.samples_by(self.now, self.own.round, self.computing_since, peer in self.last_group)
        return samples

    @property
    def has_just_met(self) -> bool:
        """Whether a group has met for this step too early just now: then the step goes on, whatever other peers say."""
        # A clock that is set back in between does not prolong it.
        return 0 <= self.now - self.recounted < self.hold_seconds

    @property
    def step_is_over(self) -> bool:
        """Whether the swarm has the target batch, as far as this peer can tell, or another peer says so."""
        if self.has_just_met:
            return False
        own = self.own
        for record in self._present.values():
            waits = record.round == own.round and record.phase == AVERAGING
            goes_on = record.round > own.round and record.step <= own.round
            if (waits or goes_on) and record.time >= self.recounted:
                return True
        return self.target.is_reached_by(self.samples_by_now)

    @property
    def seconds_to_target(self) -> float:
        """Estimated seconds until the swarm has the target batch; infinite when no peer computes."""
        rate = self.own.rate + sum(record.rate for record in self._present.values() if record.phase == TRAINING)
        return self.target.missing(self.samples_by_now) / rate if rate > 0 else math.inf
