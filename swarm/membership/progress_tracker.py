"""Who is in the swarm and how far it is: every peer keeps one small record in the DHT and reads those of the others.

Records come from strangers: they are bounded, checked, and believed only as far as it is harmless. In particular a
claim to be at a later step is never adopted; it makes a peer *ask* for the state of that step, and a peer whose claim
does not hold is left out for a while.
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
"""Of its own earlier weights, which a peer still knows by name."""

logger = get_logger(__name__)


class ProgressTracker:
    """Keeps this peer's record, and what it knows of the others.

    Args:
        dht: a running DHT, of `start_dht`
        namespace: run and recipe
        target: samples over all peers per global update
        name: public name
        max_step: at which the run is over; nobody is believed to be further
        admission: tells whose records count
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
        """Which weights this peer has held lately."""
        self._attestations = Attestations()
        self._computing_since, self._recounted = now, 0.0
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

    # ---- what this peer says ----------------------------------------------------------------------------------------

    @property
    def own(self) -> PeerProgress:
        """Its record as it is now."""
        return self._own

    def report(self, *, urgent: bool = False, **changes) -> None:
        """Change fields of the own record; it travels within `report_seconds`, or at once if `urgent`.

        What the weights are is only changed by `holds`.
        """
        if not changes.keys().isdisjoint({"step", "lineage"}):
            raise TypeError("step and lineage belong together")
        self._change(changes)
        if urgent:
            self.exchange.wake()

    def holds(self, step: int, lineage: bytes, **changes) -> None:
        """This peer has the weights of this step and lineage now; `changes` of other fields go with that."""
        if self._own.failed is not None and step > self._own.failed.step + TOLD_STEPS:
            changes["failed"] = None
        self._held = dict([*self._held.items(), ((step, lineage), None)][-MAX_OWN:])
        self._change({"step": step, "lineage": lineage, **changes})

    def _change(self, changes: dict) -> None:
        with self._lock:
            self._own = replace(self._own, time=get_dht_time(), **changes)

    def begin_step(self, step: int, lineage: bytes, group: frozenset[PeerID] = frozenset()) -> None:
        """A new step begins; `group` are those who finished the last one with us."""
        with self._lock:
            self._computing_since = get_dht_time()
            self._note(group)
        self.holds(step, lineage, ahead=False, samples=0, phase=TRAINING)

    def _note(self, group: frozenset[PeerID]) -> None:
        """These have finished a step with us: when they joined is not only what they say."""
        self.trust.finished_step(group, _joined(self._others | {self.peer_id: self._own}))
        self._liveness.met(group)
        self._dht.meet(group)

    def begin_ahead(self) -> None:
        """The present step ends in the background, and the next one begins."""
        with self._lock:
            self._computing_since = get_dht_time()
        self.report(urgent=True, ahead=True, samples=0, phase=TRAINING)

    def end_ahead(self, step: int, lineage: bytes, samples: int, group: frozenset[PeerID] | None = None) -> None:
        """The step in the background has ended: with `group`, or in vain and nothing has begun."""
        with self._lock:
            if group is None:
                self._recounted = get_dht_time()  # who is said to wait until now waits no more: the round has failed
            else:
                self._note(group)
        self.holds(step, lineage, ahead=False, samples=samples, phase=TRAINING)

    def aim(self, target: BatchTarget, max_step: int) -> None:
        """The organiser may have ordered another batch for the present step, or another end of the run."""
        self._target, self._max_step = target, max_step

    def resume(self) -> None:
        """A pause (validation, a checkpoint) ends."""
        with self._lock:
            self._computing_since = get_dht_time()
        self.report(phase=TRAINING)

    def came_back(self) -> None:
        """This peer has taken over the swarm's state: the others have a leader, and it is the newest member now."""
        self.trust.came_back()
        self.report(urgent=True, joined=get_dht_time())

    # ---- what the others say ----------------------------------------------------------------------------------------

    @property
    def others(self) -> dict[PeerID, PeerProgress]:
        """The other peers whose records are fresh."""
        oldest = get_dht_time() - self._timeouts.record_seconds
        with self._lock:
            return {peer: record for peer, record in self._others.items() if record.time >= oldest}

    def name_of(self, peer: PeerID) -> str:
        """Its public name, with its id where another peer has the same one; its id alone if it says nothing.

        A member's name is the one under which the organiser knows it, whatever it says.
        """
        if (member := self._admission.member(peer)) is not None:
            return f"{member.name} ({peer})"
        record = self.others.get(peer)
        if record is None:
            return str(peer)
        names = [self._own.name, *(other.name for other in self.others.values())]
        return record.name if names.count(record.name) == 1 else f"{record.name} ({peer})"

    def blame(self, blamed: Mapping[PeerID, Blame]) -> None:
        """These have spoilt a round or held it up: they are not met for a while, each further time for longer."""
        for peer, what in blamed.items():
            self.trust.blame(peer, what)
            how_long = "for good" if what.is_proven else "for a while"
            logger.warning(f"{self.name_of(peer)} {what}: it is left out {how_long}")

    def note_failure(self, step: int, error: RoundEnded) -> None:
        """A round has given no average: people can read why.

        Args:
            step: the update that it was to make
        """
        self.report(failed=FailedRound.after(self._own.failed, step, self.why(error)))

    def why(self, error: RoundEnded) -> str:
        """What a round failed by, with the names of those who spoilt it or were lost."""
        if error.blamed and not isinstance(error, WentBack):  # which says itself whom it convicts
            return "; ".join(f"{self.name_of(peer)} {what}" for peer, what in error.blamed.items())
        if lost := getattr(error, "lost", ()):
            return f"{', '.join(sorted(map(self.name_of, lost)))} did not send in time"
        reason = str(error)
        for peer in self.others:
            reason = reason.replace(peer.to_base58(), self.name_of(peer))
        return reason

    @property
    def swarm(self) -> GlobalProgress:
        """How far the swarm is now, as this peer sees it."""
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
        )

    def _member_since(self, others: Iterable[PeerID]) -> dict[PeerID, float]:
        """When this peer and these others became members, as the organiser has signed."""
        certificates = {peer: self._admission.member(peer) for peer in others} | {self.peer_id: self._admission.own}
        return {peer: found.member_since for peer, found in certificates.items() if found is not None}

    @property
    def knows_nobody(self) -> bool:
        """Whether the others can be anybody: names cost nothing in an open run, and this peer has trained with none."""
        return self._admission.is_open and not self.trust.has_trained

    def attestations(self, step: int, lineage: bytes, sources: Collection[PeerID]) -> dict[PeerID, Attestation]:
        """What others say of these weights. Who has trained asks only those with whom it has.

        Args:
            sources: from whom this peer has the weights: their own word says nothing
        """
        asked = self.swarm.records.keys() - set(sources)
        if self.trust.has_trained:
            asked &= self.trust.trained_with
        said = self._attestations.of(step, lineage)
        return {peer: attestation for peer, attestation in said.items() if peer in asked}

    def holders(self, step: int, lineage: bytes, sources: Collection[PeerID]) -> set[PeerID]:
        """Others with whom this peer has trained, who have said lately that they hold these weights."""
        asked = {peer for peer in self.others if peer not in self.trust.blamed} - set(sources)
        return asked & self.trust.trained_with & self._attestations.holders(step, lineage)

    @property
    def shares_weights(self) -> bool:
        """Whether somebody, of those who were in the last group with this peer, holds its weights still."""
        swarm, own = self.swarm, (self._own.step, self._own.lineage)
        records = [record for peer, record in swarm.records.items() if peer in swarm.last_group]
        return any((record.step, record.lineage) == own for record in records)

    @property
    def is_odd_one_out(self) -> bool:
        """Whether two others who train, and have trained with this peer, hold the same weights as each other, which are
        of a history that is not its own."""
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
                logger.warning(f"{said}: no other peer is near that")

    def met(self, group: Collection[PeerID], expected: Collection[PeerID], lost: Collection[PeerID] = ()) -> None:
        """A group has met to end the present step: not all who were expected have come, and some were lost then."""
        self.trust.came(group)
        self.missed({*expected, *lost} - ({*group} - {*lost}))

    def missed(self, peers: Collection[PeerID]) -> None:
        """These are not there to end the present step."""
        self.trust.missed(peers, self._own.step, _joined(self.others))

    def recount(self, group: Group) -> None:
        """The group has met too early: these are its true numbers of samples, and everybody computes on."""
        self._recounted = now = get_dht_time()
        tickets = dict(group.members)
        with self._lock:
            for peer, record in self._others.items():
                if peer in tickets:
                    ticket = tickets[peer]
                    told = {"step": ticket.step, "samples": ticket.samples, "ahead": False, "phase": TRAINING}
                    self._others[peer] = replace(record, time=now, **told)

    def has_handed_over(self, peer: PeerID) -> None:
        """It has kept its word."""
        self.trust.handed_over(peer)
        self._liveness.met([peer])

    def cannot_hand_over(self, peer: PeerID) -> None:
        """It was asked for its state in vain."""
        record = self.others.get(peer)
        self.trust.did_not_hand_over(peer, is_outbound_only=record is not None and record.client_mode)

    # ---- the exchange of records ------------------------------------------------------------------------------------

    def start(self) -> None:
        """From now on records go out and come in."""
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
        """Stop, and tell the others that this peer has left."""
        self.exchange.close(says_goodbye=self._dht.is_alive())


def _joined(records: Mapping[PeerID, PeerProgress]) -> dict[PeerID, float]:
    """When each joined, as it says."""
    return {peer: record.joined for peer, record in records.items()}
