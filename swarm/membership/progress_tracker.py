"""Who is in the swarm and how far it is: every peer keeps one small record in the DHT and reads those of the others.

Records come from strangers: they are bounded, checked, and believed only as far as it is harmless. In particular a
claim to be at a later step is never adopted; it makes a peer *ask* for the state of that step, and a peer whose claim
does not hold is left out for a while.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace

from hivemind import DHT
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time, get_logger

from swarm.membership.backoff import Backoff, BlameBackoff
from swarm.membership.claim_bounds import reach_of
from swarm.membership.liveness_probe import LivenessProbe
from swarm.membership.no_shows import NoShows
from swarm.membership.progress_record import (
    AVERAGING,
    JOINING,
    TRAINING,
    WAITING,
    Clocks,
    OwnClock,
    PeerProgress,
)
from swarm.membership.progress_store import ProgressStore
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.messages import MAX_GROUP_SIZE, Blame, Group, Member, RoundFailed, first_members
from swarm.protocol.wire import MAX_STEP
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts

logger = get_logger(__name__)

MIN_REFRESH_SECONDS = 0.2


class ProgressTracker(threading.Thread):
    """Reports this peer's progress and keeps a picture of the others', in a thread of its own.

    :param dht: a running DHT, of :func:`~swarm.network.dht_options.start_dht`
    :param namespace: run and recipe
    :param target: samples over all peers per global update
    :param name: public name
    :param max_step: at which the run is over; nobody is believed to be further
    """

    def __init__(
        self,
        dht: DHT,
        namespace: str,
        target: BatchTarget,
        name: str,
        max_step: int = MAX_STEP,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
    ):
        super().__init__(name="progress", daemon=True)
        self._dht, self._board = dht, ProgressStore(dht, f"{namespace}.progress", timeouts)
        self._timeouts = timeouts
        self._target, self._max_step = target, max_step
        self.has_trained = False
        """Whether this peer has been in a group since it started: then it knows itself about where the swarm is."""
        self.peer_id: PeerID = dht.peer_id
        now = get_dht_time()
        self._own = PeerProgress(name, 0, 0, 0.0, now, now, bool(dht.client_mode), JOINING)
        self._others: dict[PeerID, PeerProgress] = {}
        self._last_group: frozenset[PeerID] = frozenset()
        self._proven: dict[PeerID, float] = {}
        self.distrusted, self._unreachable = Backoff(), Backoff()
        self._blamed = BlameBackoff()
        self._no_shows = NoShows()
        self._computing_since, self._recounted = now, 0.0
        self._lock = threading.Lock()
        self._wake, self._closing, self._has_to_search = threading.Event(), threading.Event(), True
        self._refreshed = threading.Condition()
        self._refreshes, self._clocks, self._own_clock = 0, Clocks(), OwnClock()
        self._telling: Future | None = None
        self._told, self._liveness = self._own, LivenessProbe(dht, namespace, self._wake.set, timeouts)
        self._called_impossible: set[PeerID] = set()

    # ---- what this peer says ----------------------------------------------------------------------------------------

    @property
    def own(self) -> PeerProgress:
        return self._own

    def report(self, *, urgent: bool = False, **changes) -> None:
        """Change fields of the own record; it travels within ``report_seconds``, or at once if ``urgent``.

        What the weights are is only changed by :meth:`holds`.
        """
        if not changes.keys().isdisjoint({"step", "lineage"}):
            raise TypeError("step and lineage belong together")
        self._change(changes)
        if urgent:
            self._wake.set()

    def holds(self, step: int, lineage: bytes, **changes) -> None:
        """This peer has the weights of this step and lineage now; ``changes`` of other fields go with that."""
        self._change({"step": step, "lineage": lineage, **changes})

    def _change(self, changes: dict) -> None:
        with self._lock:
            self._own = replace(self._own, time=get_dht_time(), **changes)

    def begin_step(self, step: int, lineage: bytes, group: frozenset[PeerID] = frozenset()) -> None:
        """A new step begins; ``group`` are those who finished the last one with us."""
        with self._lock:
            self._computing_since = get_dht_time()
            self._note(group)
        self.holds(step, lineage, ahead=False, samples=0, phase=TRAINING)

    def _note(self, group: frozenset[PeerID]) -> None:
        """These have finished a step with us: when they joined is not only what they say."""
        self._last_group, records = group, self._others | {self.peer_id: self._own}
        before = self._proven if len(self._proven) < 2 * MAX_GROUP_SIZE else {}
        self._proven = before | {peer: records[peer].joined for peer in group & records.keys()}
        self.has_trained |= len(group) > 1
        self._liveness.met(group)
        self._dht.meet(group)

    def begin_ahead(self) -> None:
        """The present step ends in the background, and the next one begins."""
        with self._lock:
            self._computing_since = get_dht_time()
        self.report(urgent=True, ahead=True, samples=0, phase=TRAINING)

    def end_ahead(self, step: int, lineage: bytes, samples: int, group: frozenset[PeerID] | None = None) -> None:
        """The step in the background has ended: with ``group``, or in vain and nothing has begun."""
        with self._lock:
            if group is None:
                self._recounted = get_dht_time()  # who is said to wait until now waits no more: the round has failed
            else:
                self._note(group)
        self.holds(step, lineage, ahead=False, samples=samples, phase=TRAINING)

    def resume(self) -> None:
        """A pause (validation, a checkpoint) ends."""
        with self._lock:
            self._computing_since = get_dht_time()
        self.report(phase=TRAINING)

    def came_back(self) -> None:
        """This peer has taken over the swarm's state: the others have a leader, and it is the newest member now."""
        self._no_shows.forget()
        self._proven.clear()
        self.report(urgent=True, joined=get_dht_time())

    # ---- what the others say ----------------------------------------------------------------------------------------

    @property
    def others(self) -> dict[PeerID, PeerProgress]:
        """The other peers whose records are fresh."""
        oldest = get_dht_time() - self._timeouts.record_seconds
        with self._lock:
            return {peer: record for peer, record in self._others.items() if record.time >= oldest}

    def name_of(self, peer: PeerID) -> str:
        """Its public name, or its id if it says nothing."""
        record = self.others.get(peer)
        return str(peer) if record is None else record.name

    def blame(self, blamed: Mapping[PeerID, Blame]) -> None:
        """These have spoilt a round or held it up: they are not met for a while, each further time for longer."""
        for peer, what in blamed.items():
            self._blamed.blame(peer, what)
            self._proven.pop(peer, None)  # its word counts again when it has been in a group again
            logger.warning(f"{self.name_of(peer)} {what}: it is left out for a while")

    def why(self, error: RoundFailed) -> str:
        """What a round failed by, with the names of those who spoilt it or were lost."""
        if error.blamed:
            return "; ".join(f"{self.name_of(peer)} {what}" for peer, what in error.blamed.items())
        if error.lost:
            return f"{', '.join(sorted(map(self.name_of, error.lost)))} did not send in time"
        reason = str(error)
        for peer in self.others:
            reason = reason.replace(peer.to_base58(), self.name_of(peer))
        return reason

    def _believed(self, followed: bool = True) -> dict[PeerID, PeerProgress]:
        """Without those whose claims did not hold or, if they are to be followed, may not."""
        own, others = self._own, self.others
        choose = self._liveness.doubted if followed else self._liveness.silent
        left_out = choose(own, others, self.has_trained)
        others = {p: record for p, record in self._trusted(others).items() if p not in left_out}
        reach = self._reach(others)
        believed = {peer: record for peer, record in others.items() if record.step <= reach(peer)}
        for peer in others.keys() - believed.keys():
            self._call_impossible_once(peer, others[peer])
        return believed

    def _trusted(self, records: dict[PeerID, PeerProgress]) -> dict[PeerID, PeerProgress]:
        """Without those who have not kept their word lately, or have spoilt a round."""
        left_out = (self.distrusted, self._blamed)
        return {peer: record for peer, record in records.items() if not any(peer in peers for peers in left_out)}

    def may_hold(self, peer: PeerID, step: int) -> bool:
        """Whether the state of this step can be the swarm's, as far as this peer knows, if that peer hands it over."""
        others = self._trusted(self.others)
        return step <= self._reach(others)(peer)

    def _reach(self, others: dict[PeerID, PeerProgress]) -> Callable[[PeerID], int]:
        return reach_of(self._own.step, self._max_step, self.has_trained, self._proven, others)

    def _call_impossible_once(self, peer: PeerID, record: PeerProgress) -> None:
        has_been_said = peer in self._called_impossible or len(self._called_impossible) >= MAX_GROUP_SIZE
        if record.step > self._own.step and not has_been_said:
            self._called_impossible.add(peer)
            said = f"Ignoring {record.name}, which claims to be at step {record.step}: nobody else is near that"
            logger.warning(f"{said} (if this peer was away for long, start it again)")

    @property
    def members(self) -> list[Member]:
        """Everyone who may come to the next round, this peer included.

        Whatever step their records name: records are older than a fast swarm's steps. But who waits at an earlier one
        takes over our state first. Who was missed is none of them until its record shows a later step, and is not
        awaited before it shows that it has our state, by when it joined; the other half of a divided network gets on.
        """
        own, proven = self._own, self._proven
        members = [Member(self.peer_id, own.joined, own.client_mode, proven=bool(proven))]
        for peer, record in self._believed(followed=False).items():
            waits = record.phase == WAITING and record.step < own.step and peer not in self._last_group
            if not waits and record.phase != JOINING and record.step > self._no_shows.missed_at(peer):
                awaited, is_proven = self._no_shows.is_over(peer, record.joined), proven.get(peer) == record.joined
                members.append(Member(peer, record.joined, record.client_mode, awaited, is_proven))
        return first_members(members, self.peer_id)

    def met(self, group: Iterable[PeerID], expected: Collection[PeerID], lost: Collection[PeerID] = ()) -> None:
        """A group has met to end the present step: not all who were expected have come, and some were lost then."""
        for peer in group:
            self._no_shows.came(peer)
        self.missed({*expected, *lost} - ({*group} - {*lost}))

    def missed(self, peers: Iterable[PeerID]) -> None:
        """These are not there to end the present step."""
        records = self.others
        for peer in peers:
            joined = records[peer].joined if peer in records else math.nan
            self._no_shows.note(peer, self._own.step, joined, self._proven.get(peer) == joined)

    def recount(self, group: Group) -> None:
        """The group has met too early: these are its true numbers of samples, and everybody computes on."""
        self._recounted = now = get_dht_time()
        tickets = dict(zip(group.peer_ids, group.tickets, strict=True))
        with self._lock:
            for peer, record in self._others.items():
                if peer in tickets:
                    ticket = tickets[peer]
                    told = {"step": ticket.step, "samples": ticket.samples, "ahead": False, "phase": TRAINING}
                    self._others[peer] = replace(record, time=now, **told)

    def _can_ask(self, peer: PeerID, record: PeerProgress) -> bool:
        """Who cannot be dialled hands over its state as well, if it has made a connection to this peer, a full one."""
        return not (record.client_mode and (self._own.client_mode or peer in self._unreachable))

    def has_handed_over(self, peer: PeerID) -> None:
        """It has kept its word."""
        self.distrusted.end(peer)
        self._unreachable.end(peer)
        self._liveness.met([peer])

    def cannot_hand_over(self, peer: PeerID) -> None:
        """It was asked for its state in vain: nothing can be said against who cannot be dialled."""
        record = self.others.get(peer)
        (self._unreachable if record is not None and record.client_mode else self.distrusted).add(peer)

    @property
    def swarm_step(self) -> int:
        """The latest step that somebody claims who is believed and could hand over its state, at least our own."""
        records = self._believed().items()
        return max([self._own.step, *(r.step for p, r in records if self._can_ask(p, r) and r.phase != JOINING)])

    @property
    def next_round(self) -> int:
        """The step that the next round is going to end, by what those say who train."""
        records = self._believed().values()
        return max((r.round for r in records if r.phase not in (JOINING, WAITING)), default=self._own.round)

    def donors(self, min_step: int) -> list[PeerID]:
        """Full peers that claim to hold the state of ``min_step`` or later: those first that have been in a group with
        this peer, then the latest, then the senior.

        Where there is none, outbound-only ones.
        """
        proven = self._proven
        candidates = sorted(
            (record.client_mode, proven.get(peer) != record.joined, -record.step, record.joined, peer.to_bytes(), peer)
            for peer, record in self._believed().items()
            if self._can_ask(peer, record) and record.step >= min_step and record.phase != JOINING
        )
        return [peer for client_mode, *_, peer in candidates if client_mode == candidates[0][0]]

    @property
    def superiors(self) -> list[PeerID]:
        """Whose state counts and not ours: at a later step; or a full one at ours, before us, with other weights."""
        own, believed = self._own, self._believed().items()
        mine = own.joined, self.peer_id.to_bytes()
        return [
            peer
            for peer, record in believed
            if (self._can_ask(peer, record) and record.step > own.step)
            or (
                (record.step == own.step and record.lineage != own.lineage)
                and (not record.client_mode and (record.joined, peer.to_bytes()) < mine)
            )
        ]

    def _present(self) -> dict[PeerID, PeerProgress]:
        """The others whose samples are still to be had for this step."""
        step, no_shows, records = self._own.step, self._no_shows, self._believed().items()
        return {p: r for p, r in records if no_shows.missed_at(p) < step and no_shows.is_over(p, r.joined)}

    def samples_by_now(self) -> float:
        """Samples that the swarm has probably accumulated towards the next update."""
        now, own, since = get_dht_time(), self._own, self._computing_since
        others = [r.samples_by(now, own.round, since, p in self._last_group) for p, r in self._present().items()]
        return own.samples + sum(others)

    @property
    def step_is_over(self) -> bool:
        """Whether the swarm has the target batch, as far as this peer can tell, or somebody else says so."""
        own = self._own
        for record in self._present().values():
            waits = record.round == own.round and record.phase == AVERAGING
            goes_on = record.round > own.round and record.step <= own.round
            if (waits or goes_on) and record.time >= self._recounted:
                return True
        return self._target.is_reached_by(self.samples_by_now())

    def seconds_to_target(self) -> float:
        """Estimated seconds until the swarm has the target batch; infinite when nobody computes."""
        rate = self._own.rate + sum(r.rate for r in self._present().values() if r.phase == TRAINING)
        return self._target.missing(self.samples_by_now()) / rate if rate > 0 else math.inf

    def wait_refreshed(self, timeout_seconds: float) -> bool:
        """Wait until records that were asked for after this call have come."""
        with self._refreshed:
            wanted = self.ask_refreshed()
            deadline = time.monotonic() + timeout_seconds
            while self._refreshes < wanted:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self.is_alive():
                    return False
                self._refreshed.wait(remaining)
                self._hurry()
            return True

    def ask_refreshed(self) -> int:
        """Have the records read again; when :attr:`refreshes` is as large as what is returned, they have come."""
        wanted = self._refreshes + 2  # the refresh that is running may have asked before
        self._hurry()
        return wanted

    @property
    def refreshes(self) -> int:
        """How often the records have been read."""
        return self._refreshes

    def hurry(self) -> None:
        """Somebody waits for :attr:`refreshes`."""
        self._hurry()

    def _hurry(self) -> None:
        self._has_to_search = True
        self._wake.set()

    # ---- the thread -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        while not self._closing.is_set():
            self._look_at_clock()
            try:
                if self._telling is None or self._telling.done():
                    self._told, self._telling = self._own, self._board.post(self._own)
                self._look()
            except Exception as error:
                logger.debug(f"could not exchange progress records: {error!r}")
            with self._refreshed:
                self._refreshes += 1
                self._refreshed.notify_all()
            self._wake.wait(min(max(self._pause_seconds(), MIN_REFRESH_SECONDS), self._timeouts.report_seconds))
            self._wake.clear()

    def _look_at_clock(self) -> None:
        if seconds := self._own_clock.set_by_seconds():
            self._clocks = Clocks()
            said = "if it is some seconds off now, the others do not see this peer (`timedatectl` tells)"
            logger.warning(f"This machine's clock was just set by {seconds:+.0f} s: {said}")

    def _pause_seconds(self) -> float:
        told, own = self._told, self._own
        return 0.0 if (told.phase, told.round) != (own.phase, own.round) else self.seconds_to_target() / 2

    def _look(self) -> None:
        if search := self._has_to_search:
            self._has_to_search = False  # who asks from now on is served by the search that begins
        others = self._board.look(search)
        with self._lock:
            self._others = self._clocks.corrected(others, get_dht_time())
        self._liveness.check(self._own, others, self.has_trained)

    def close(self) -> None:
        """Stop, and tell the others that this peer has left."""
        self._closing.set()
        self._wake.set()
        if self._dht.is_alive():
            self.join(timeout=2)
            try:
                self._board.post(None).result(timeout=self._timeouts.record_seconds / 3)
            except Exception as error:
                logger.debug(f"could not say goodbye: {error!r}")
