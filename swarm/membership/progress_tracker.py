"""Tracks which peers are in the swarm and how far it is. Each keeps a small record in the DHT and reads all others.

Records come from strangers: they are bounded, checked, and believed only as far as it is harmless. In particular, a
claim to be at a later step is never adopted. It makes a peer *ask* for the state of that step. A peer whose claim does
not hold is left out for a while.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from hivemind import DHT
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time, get_logger

from swarm.membership.attestations import Attestations
from swarm.membership.claim_bounds import MAX_APART
from swarm.membership.global_progress import GlobalProgress
from swarm.membership.liveness_probe import LivenessProbe
from swarm.membership.progress_record import (
    JOINING,
    TRAINING,
    WAITING,
    PeerProgress,
)
from swarm.membership.progress_store import ProgressStore
from swarm.membership.record_exchange import RecordExchange
from swarm.membership.trust import Trust
from swarm.network.signed_records import PROGRESS
from swarm.protocol.admission import OPEN, Admission
from swarm.protocol.attestation import Attestation
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.certificates import Role
from swarm.protocol.messages import Blame, Group, RoundEnded, WentBack
from swarm.protocol.notes import FailedRound
from swarm.protocol.wire import MAX_STEP
from swarm.runtime.once import Once
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts

TOLD_STEPS = 50
"""Steps for which a record still says why an earlier round failed."""
MAX_OWN = 2 * MAX_APART
"""Number of its own latest weights (step and lineage) that a peer remembers."""
LEAST_HOLD = 0.25
"""From the second group that met too early on, the step goes on for at least this share of what has been computed."""
MAX_HOLD_SECONDS = 4.0
"""Longest time for which a step goes on after a group that met too early. With the usual
`--matchmaking-time` a leader waits longer for its members, and a member far longer for its leader. So no peer is missed
or blamed because of it."""

logger = get_logger(__name__)


class ProgressTracker:
    """Keeps this peer's record, and what it knows about the other peers.

    Args:
        dht: a running DHT, of `start_dht`
        namespace: run and recipe
        target: samples over all peers per global update
        name: public name
        max_step: step at which the run is over; no peer is believed to be further
        admission: decides which peers' records count
    """

    def __init__(
        self,
        dht: DHT,
        namespace: str,
        target: BatchTarget,
        name: str,
        max_step: int = MAX_STEP,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        admission: Admission = OPEN,
    ):
        self._dht, self._timeouts, self._admission = dht, timeouts, admission
        self._target, self._max_step = target, max_step
        self.trust = Trust()
        self.peer_id: PeerID = dht.peer_id
        now = get_dht_time()
        self._own = PeerProgress(name, 0, 0, 0.0, now, now, bool(dht.client_mode), JOINING)
        self._others: dict[PeerID, PeerProgress] = {}
        self._held: dict[tuple[int, bytes], None] = {}
        """Step and lineage of the weights that this peer has held lately, the oldest first."""
        self._attestations = Attestations()
        self._computing_since, self._recounted = now, 0.0
        self._hold_seconds = 0.0
        self._lock = threading.Lock()
        self._called_impossible = Once()
        self.exchange = RecordExchange(
            ProgressStore(dht, f"{namespace}.{PROGRESS}", timeouts, admission),
            own=lambda: self._own,
            take_in=self._take_in,
            seconds_to_round=lambda: self.swarm.seconds_to_target,
            timeouts=timeouts,
        )
        self._liveness = LivenessProbe(dht, namespace, self.exchange.wake, timeouts, admission)

    # ---- the own record ---------------------------------------------------------------------------------------------

    @property
    def own(self) -> PeerProgress:
        """This peer's record as it is now."""
        return self._own

    def report(self, *, urgent: bool = False, **changes) -> None:
        """Change fields of the own record. It is published within `report_seconds`, or at once if `urgent`.

        `step` and `lineage` are changed only by `holds`.
        """
        if not changes.keys().isdisjoint({"step", "lineage"}):
            raise TypeError("step and lineage belong together")
        self._change(changes)
        if urgent:
            self.exchange.wake()

    def holds(self, step: int, lineage: bytes, **changes) -> None:
        """Note that this peer now has the weights of this step and lineage, and change other fields with that."""
        if self._own.failed is not None and step > self._own.failed.step + TOLD_STEPS:
            changes["failed"] = None
        self._held = dict([*self._held.items(), ((step, lineage), None)][-MAX_OWN:])
        self._change({"step": step, "lineage": lineage, **changes})

    def _change(self, changes: dict) -> None:
        with self._lock:
            self._own = replace(self._own, time=get_dht_time(), **changes)

    def begin_step(self, step: int, lineage: bytes, group: frozenset[PeerID] = frozenset()) -> None:
        """Begin a new step; `group` finished the last one with this peer."""
        with self._lock:
            self._computing_since = get_dht_time()
            self._note(group)
        self.holds(step, lineage, ahead=False, samples=0, phase=TRAINING)

    def _note(self, group: frozenset[PeerID]) -> None:
        """Note that these peers finished a step with this one: their `joined` is proven. The caller holds the lock."""
        self._hold_seconds = 0.0
        self.trust.finished_step(group, _joined(self._others | {self.peer_id: self._own}))
        self._liveness.met(group)
        self._dht.meet(group)

    def begin_ahead(self) -> None:
        """Begin the next step while the present one ends in the background."""
        with self._lock:
            self._computing_since = get_dht_time()
        self.report(urgent=True, ahead=True, samples=0, phase=TRAINING)

    def end_ahead(self, step: int, lineage: bytes, samples: int, group: frozenset[PeerID] | None = None) -> None:
        """Note that the step in the background has ended: with `group`, or in vain if that is None."""
        with self._lock:
            if group is None:
                # The round has failed: older records that wait for it do not count.
                self._recounted, self._hold_seconds = get_dht_time(), 0.0
            else:
                self._note(group)
        self.holds(step, lineage, ahead=False, samples=samples, phase=TRAINING)

    def aim(self, target: BatchTarget, max_step: int) -> None:
        """Set the target of the present step and the end of the run, which the organiser's orders may have changed."""
        self._target, self._max_step = target, max_step

    def resume(self) -> None:
        """Compute again after a pause (validation, a checkpoint)."""
        with self._lock:
            self._computing_since = get_dht_time()
        self.report(phase=TRAINING)

    def came_back(self) -> None:
        """Note that this peer has taken over the swarm's state.

        The swarm has a leader, so this peer becomes its newest member.
        """
        self.trust.came_back()
        self.report(urgent=True, joined=get_dht_time())

    # ---- the records of the other peers -----------------------------------------------------------------------------

    @property
    def others(self) -> dict[PeerID, PeerProgress]:
        """Fresh records of the other peers."""
        oldest = get_dht_time() - self._timeouts.record_seconds
        with self._lock:
            return {peer: record for peer, record in self._others.items() if record.time >= oldest}

    def name_of(self, peer: PeerID) -> str:
        """A peer's public name, with its id if another peer has the same name; its id alone if it has no record.

        A member's name is the one in its certificate, whatever its record says.
        """
        if (member := self._admission.member(peer)) is not None:
            return f"{member.name} ({peer})"
        record = self.others.get(peer)
        if record is None:
            return str(peer)
        names = [self._own.name, *(other.name for other in self.others.values())]
        return record.name if names.count(record.name) == 1 else f"{record.name} ({peer})"

    def blame(self, blamed: Mapping[PeerID, Blame]) -> None:
        """Leave out peers that have spoilt a round or held it up: each time for longer, and for good if proven."""
        for peer, what in blamed.items():
            self.trust.blame(peer, what)
            how_long = "for good" if what.is_proven else "for a while"
            logger.warning(f"{self.name_of(peer)} {what}: it is left out {how_long}")

    def note_failure(self, step: int, error: RoundEnded) -> None:
        """Put the reason why a round has given no average into the own record, for people to read.

        Args:
            step: the update that the round was to make
            error: how the round ended
        """
        self.report(failed=FailedRound.after(self._own.failed, step, self.why(error)))

    def why(self, error: RoundEnded) -> str:
        """Why a round failed, with the names of the peers that spoilt it or were lost."""
        if error.blamed and not isinstance(error, WentBack):  # its own text names the liars
            return "; ".join(f"{self.name_of(peer)} {what}" for peer, what in error.blamed.items())
        if lost := getattr(error, "lost", ()):
            return f"{', '.join(sorted(map(self.name_of, lost)))} did not send in time"
        reason = str(error)
        for peer in self.others:
            reason = reason.replace(peer.to_base58(), self.name_of(peer))
        return reason

    @property
    def swarm(self) -> GlobalProgress:
        """How far the swarm is now, as this peer sees it. It is computed at each access."""
        own, others, trust = self._own, self.others, self.trust
        return GlobalProgress(
            me=self.peer_id,
            own=own,
            records={peer: record for peer, record in others.items() if not trust.is_left_out(peer)},
            doubted=self._liveness.doubted(own, others, trust.has_trained),
            silent=self._liveness.silent(own, others, trust.has_trained),
            proven=trust.proven,
            member_since=self._member_since(others),
            last_group=trust.last_group,
            false_donors=trust.false_donors,
            unreachable={
                peer for peer in others if peer in trust.unreachable or not self._admission.may(peer, Role.SERVE)
            },
            no_shows=trust.no_shows,
            has_trained=trust.has_trained,
            away_seconds=trust.away_seconds,
            max_step=self._max_step,
            target=self._target,
            now=get_dht_time(),
            computing_since=self._computing_since,
            recounted=self._recounted,
            hold_seconds=self._hold_seconds,
        )

    def _member_since(self, others: Iterable[PeerID]) -> dict[PeerID, float]:
        """When this peer and the given ones became members, as the organiser has signed."""
        certificates = {peer: self._admission.member(peer) for peer in others} | {self.peer_id: self._admission.own}
        return {peer: found.member_since for peer, found in certificates.items() if found is not None}

    @property
    def knows_nobody(self) -> bool:
        """Whether all other peers may be strangers: names cost nothing in an open run, and this peer knows none yet."""
        return self._admission.is_open and not self.trust.has_trained

    def attestations(self, step: int, lineage: bytes, sources: Collection[PeerID]) -> dict[PeerID, Attestation]:
        """What other peers say of these weights. If this peer has trained, only peers that trained with it count.

        Args:
            step: step of the weights
            lineage: lineage of the weights
            sources: peers from which this one has the weights; what they say confirms nothing
        """
        asked = self.swarm.records.keys() - set(sources)
        if self.trust.has_trained:
            asked &= self.trust.trained_with
        said = self._attestations.of(step, lineage)
        return {peer: attestation for peer, attestation in said.items() if peer in asked}

    def holders(self, step: int, lineage: bytes, sources: Collection[PeerID]) -> set[PeerID]:
        """Peers that have trained with this one and have said lately that they hold these weights.

        Blamed peers and `sources` do not count.
        """
        asked = {peer for peer in self.others if peer not in self.trust.blamed} - set(sources)
        return asked & self.trust.trained_with & self._attestations.holders(step, lineage)

    @property
    def shares_weights(self) -> bool:
        """Whether a peer of the last group still holds the same weights as this peer."""
        swarm, own = self.swarm, (self._own.step, self._own.lineage)
        records = [record for peer, record in swarm.records.items() if peer in swarm.last_group]
        return any((record.step, record.lineage) == own for record in records)

    @property
    def is_odd_one_out(self) -> bool:
        """Whether two peers hold the same weights as each other, of a history that is not this peer's.

        Only peers that train now, and have trained with this one, count.
        """
        known = {peer: record for peer, record in self.swarm.records.items() if peer in self.trust.trained_with}
        at_work = [record for record in known.values() if record.phase not in (JOINING, WAITING) and not record.helps]
        held = Counter((record.step, record.lineage) for record in at_work)
        least_step = self._own.step - MAX_APART
        return any(
            number > 1 and step >= least_step and (step, lineage) not in self._held
            for (step, lineage), number in held.items()
        )

    def _call_impossible_once(self, peer: PeerID, record: PeerProgress) -> None:
        if self._called_impossible.first(peer):
            said = f"Ignoring {record.name}, which claims to be at step {record.step}"
            if record.step > self._max_step:
                logger.warning(f"{said}: this run ends after {self._max_step} updates")
            else:
                logger.warning(f"{said}: no other peer is near that step")

    def met(self, group: Collection[PeerID], expected: Collection[PeerID], lost: Collection[PeerID] = ()) -> None:
        """Note which peers have met to end the present step.

        Args:
            group: members of the group
            expected: peers that were waited for
            lost: members that were lost during the round
        """
        self.trust.came(group)
        self.missed({*expected, *lost} - ({*group} - {*lost}))

    def missed(self, peers: Collection[PeerID]) -> None:
        """Note that these peers have not come to end the present step."""
        self.trust.missed(peers, self._own.step, _joined(self.others))

    def recount(self, group: Group) -> None:
        """Take the numbers of samples from the tickets of a group that has met too early; its members compute on.

        The step goes on for half of the time that the missing samples take: the group needed as long for its samples as
        this peer for its own. Else a member that gives nothing could make the group meet after each micro-batch: with a
        join request, a record that waits for the round, or one that claims samples. Its ticket may claim some, too, so
        that few seem to be missing. So it is longer if this happens again in one step.
        """
        now, tickets = get_dht_time(), dict(group.members)
        with self._lock:
            is_again, self._recounted = self._hold_seconds > 0, now
            own_samples = tickets[self.peer_id].samples
            computed_seconds = own_samples / self._own.rate if self._own.rate else 0.0
            missing_seconds = computed_seconds * self._target.missing(group.samples) / max(1, group.samples)
            least_seconds = LEAST_HOLD * computed_seconds if is_again else 0.0
            self._hold_seconds = min(max(missing_seconds / 2, least_seconds), MAX_HOLD_SECONDS)
            for peer, record in self._others.items():
                if peer in tickets:
                    ticket = tickets[peer]
                    told = {"step": ticket.step, "samples": ticket.samples, "ahead": False, "phase": TRAINING}
                    self._others[peer] = replace(record, time=now, **told)

    def has_handed_over(self, peer: PeerID) -> None:
        """Note that this peer handed over its state: it is no longer distrusted, unreachable or doubted."""
        self.trust.handed_over(peer)
        self._liveness.met([peer])

    def cannot_hand_over(self, peer: PeerID) -> None:
        """Note that this peer was asked for its state in vain."""
        record = self.others.get(peer)
        self.trust.did_not_hand_over(peer, is_outbound_only=record is not None and record.client_mode)

    # ---- the exchange of records ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to exchange records."""
        self.exchange.start()

    def _take_in(self, others: dict[PeerID, PeerProgress], corrected: dict[PeerID, PeerProgress]) -> None:
        with self._lock:
            self._others = corrected
        self._attestations.note(others)
        self._liveness.check(self._own, others, self.trust.has_trained)
        swarm = self.swarm
        for peer in swarm.impossible:
            self._call_impossible_once(peer, swarm.records[peer])

    def close(self) -> None:
        """Stop, and tell the other peers that this one has left, if the DHT process still runs."""
        self.exchange.close(says_goodbye=self._dht.is_alive())


def _joined(records: Mapping[PeerID, PeerProgress]) -> dict[PeerID, float]:
    """When each peer joined, as its record says."""
    return {peer: record.joined for peer, record in records.items()}
