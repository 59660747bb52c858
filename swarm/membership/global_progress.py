"""How far the swarm is, as one peer sees it at one moment: who comes to the next round, and when that is due."""

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
    """What follows from the records of one moment. Nothing here changes anything.

    Args:
        me: this peer
        own: its record
        records: those of the others that are fresh, without who is left out
        doubted: who claims to be ahead and has not answered yet: it is not followed
        silent: who of them was called in vain: it is not met either
        proven: who was in a group with this peer, and when each had joined then
        member_since: when each became a member, seconds since 1970, as the organiser has signed; empty in an open run
        last_group: who finished the last step with this peer
        false_donors: who has handed over something that others do not hold: it is not asked
        unreachable: who could not be asked for its state
        no_shows: who was expected and did not come
        has_trained: this peer has been in a group since it started
        away_seconds: since it was in one, or started
        max_step: at which the run is over
        target: samples over all peers per global update
        now: DHT time in seconds
        computing_since: DHT time at which this peer began to compute for its step
        recounted: DHT time before which nobody's word counts that it waits for this step's round
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

    # ---- who is believed --------------------------------------------------------------------------------------------

    def may_hold(self, peer: PeerID, step: int) -> bool:
        """Whether the state of this step can be the swarm's, as far as this peer knows, if that peer hands it over."""
        return step <= self._reach(self.records)(peer)

    def _reach(self, records: Mapping[PeerID, PeerProgress]) -> Callable[[PeerID], int]:
        return reach_of(self.own.step, self.max_step, self.has_trained, self.away_seconds, self.proven, records)

    def _without(self, left_out: Container[PeerID]) -> dict[PeerID, PeerProgress]:
        """Records of those who claim no more than can be."""
        records = {peer: record for peer, record in self.records.items() if peer not in left_out}
        reach = self._reach(records)
        return {peer: record for peer, record in records.items() if record.step <= reach(peer)}

    @cached_property
    def _believed(self) -> dict[PeerID, PeerProgress]:
        """Those whom this peer would follow."""
        return self._without(self.doubted)

    @property
    def impossible(self) -> list[PeerID]:
        """Who claims to be ahead, further than can be."""
        reach = self._reach(self.records)
        return [peer for peer, record in self.records.items() if record.step > max(self.own.step, reach(peer))]

    # ---- who comes to the next round --------------------------------------------------------------------------------

    @cached_property
    def members(self) -> list[Member]:
        """Everyone who may come to the next round, this peer included.

        Whatever step their records name: records are older than a fast swarm's steps. But who waits at an earlier one
        takes over our state first. Who was missed is none of them until its record shows a later step, and is not
        awaited before it shows that it has our state, by when it joined; the other half of a divided network gets on.
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
            # Who has just come back is the junior until it has been in a group, however early it became a member.
            since = self._since(peer, record) if is_proven else record.joined
            members.append(Member(peer, since, record.client_mode, is_awaited, is_proven))
        return first_members(members, self.me)

    def _since(self, peer: PeerID, record: PeerProgress) -> float:
        """What its seniority goes by: not by what it says where an organiser has signed when it became a member."""
        return self.member_since.get(peer, record.joined)

    @property
    def num_trainers(self) -> int:
        """Of these, who train: helpers do not."""
        records = {**self.records, self.me: self.own}
        return sum(not records[member.peer_id].helps for member in self.members)

    @property
    def next_round(self) -> int:
        """The step that the next round is going to end, by what those say who train."""
        rounds = [record.round for record in self._believed.values() if record.phase not in (JOINING, WAITING)]
        return max(rounds, default=self.own.round)

    # ---- whose state counts -----------------------------------------------------------------------------------------

    @property
    def latest_step(self) -> int:
        """The latest step that somebody claims who is believed and could hand over its state, at least our own."""
        claims = [
            record.step
            for peer, record in self._believed.items()
            if self._can_ask(peer, record) and record.phase != JOINING
        ]
        return max([self.own.step, *claims])

    @cached_property
    def seconded_step(self) -> int:
        """The latest step at which the swarm is by the word of more than one, at least our own.

        Where this peer has trained with more than one who is there, what one of them alone says is no reason to give up
        its own weights.
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
        """Server-mode peers that claim to hold the state of `min_step` or later.

        Those first that say something of it, which a newcomer does not, then those that have been in a group with this
        peer, then who is no further than a second one says, then the latest, then the senior.

        Where there is none, client-mode ones.
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
        """Whose state counts and not ours: at a later step; or a full one at ours, before us, with other weights."""
        own, mine, found = self.own, (self._since(self.me, self.own), self.me.to_bytes()), []
        for peer, record in self._believed.items():
            is_ahead = record.step > own.step and self._can_ask(peer, record)
            is_other = record.step == own.step and record.lineage != own.lineage
            is_senior = not record.client_mode and (self._since(peer, record), peer.to_bytes()) < mine
            if is_ahead or (is_other and is_senior and peer not in self.false_donors):
                found.append(peer)
        return found

    def _can_ask(self, peer: PeerID, record: PeerProgress) -> bool:
        """Who cannot be dialled hands over its state as well, if it has made a connection to this peer, a full one."""
        cannot = record.client_mode and (self.own.client_mode or peer in self.unreachable)
        return not cannot and peer not in self.false_donors

    # ---- when a step is over ----------------------------------------------------------------------------------------

    @cached_property
    def _present(self) -> dict[PeerID, PeerProgress]:
        """The others whose samples are still to be had for this step."""
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
    def step_is_over(self) -> bool:
        """Whether the swarm has the target batch, as far as this peer can tell, or somebody else says so."""
        own = self.own
        for record in self._present.values():
            waits = record.round == own.round and record.phase == AVERAGING
            goes_on = record.round > own.round and record.step <= own.round
            if (waits or goes_on) and record.time >= self.recounted:
                return True
        return self.target.is_reached_by(self.samples_by_now)

    @property
    def seconds_to_target(self) -> float:
        """Estimated seconds until the swarm has the target batch; infinite when nobody computes."""
        rate = self.own.rate + sum(record.rate for record in self._present.values() if record.phase == TRAINING)
        return self.target.missing(self.samples_by_now) / rate if rate > 0 else math.inf
