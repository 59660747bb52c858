"""Who is in the swarm and how far it is: every peer keeps one small record in the DHT and reads those of the others.

Records come from strangers: they are bounded, checked, and believed only as far as it is harmless. In particular a
claim to be at a later step is never adopted; it makes a peer *ask* for the state of that step, and a peer whose claim
does not hold is left out for a while.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgpack
from hivemind import DHT
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time, get_logger

from swarm.rounds import MAX_GROUP_SIZE, MAX_SAMPLES, MAX_STEP, Member

logger = get_logger(__name__)

RECORD_SECONDS = 15.0  # a peer that says nothing for so long is no longer expected
REPORT_SECONDS = 1.0  # how often a training peer reports and looks, unless the end of the step is nearer
MIN_REFRESH_SECONDS = 0.2
FUTURE_SECONDS = 5.0  # clocks agree within 3 s (the DHT checks that); later than this is nonsense
DISTRUST_SECONDS = 60.0
MAX_RATE = 1e7  # samples per second
MAX_NAME_LENGTH = 64

JOINING, WAITING, TRAINING = "joining", "waiting for peers", "training"
AVERAGING, VALIDATING = "averaging", "validating"
PHASES = (JOINING, WAITING, TRAINING, AVERAGING, VALIDATING)


@dataclass(frozen=True)
class PeerProgress:
    """One peer's record.

    :param name: public name
    :param step: global updates that its weights have seen
    :param samples: samples it has accumulated towards the next one
    :param rate: samples per second while it computes
    :param joined: DHT time in seconds when it joined
    :param time: DHT time in seconds of this record
    :param client_mode: it cannot be dialled
    :param phase: what it is doing, one of ``PHASES``
    :param loss: mean training loss of its last step, nan if it has none
    :param accuracy: its last validation accuracy between 0 and 1, nan if it has none
    """

    name: str
    step: int
    samples: int
    rate: float
    joined: float
    time: float
    client_mode: bool
    phase: str
    loss: float = math.nan
    accuracy: float = math.nan

    def to_bytes(self) -> bytes:
        return msgpack.packb(
            (
                self.name,
                self.step,
                self.samples,
                float(self.rate),
                self.joined,
                self.time,
                self.client_mode,
                PHASES.index(self.phase),
                float(self.loss),
                float(self.accuracy),
            )
        )

    @classmethod
    def from_bytes(cls, data: bytes, now: float) -> PeerProgress:
        """:raises ValueError: for everything that no honest peer can send"""
        if not isinstance(data, bytes) or len(data) > 512:
            raise ValueError("not a short bytestring")
        try:
            name, step, samples, rate, joined, at, client_mode, phase, loss, accuracy = msgpack.unpackb(data)
        except Exception as error:
            raise ValueError(f"not a record: {error}") from error
        if type(name) is not str or not 1 <= len(name) <= MAX_NAME_LENGTH or not name.isprintable():
            raise ValueError("a name that is not printable")
        if type(step) is not int or type(samples) is not int or type(phase) is not int or type(client_mode) is not bool:
            raise ValueError("a field of the wrong type")
        if not 0 <= step <= MAX_STEP or not 0 <= samples <= MAX_SAMPLES or not 0 <= phase < len(PHASES):
            raise ValueError("a number out of bounds")
        if any(type(value) is not float for value in (rate, joined, at, loss, accuracy)):
            raise ValueError("a field of the wrong type")
        if not (math.isnan(accuracy) or 0 <= accuracy <= 1) or math.isinf(loss):
            raise ValueError("a loss or an accuracy out of bounds")
        if not 0 <= rate <= MAX_RATE or not 0 <= joined <= at <= now + FUTURE_SECONDS:
            raise ValueError("a rate or a time out of bounds")
        return cls(name, step, samples, rate, joined, at, client_mode, PHASES[phase], loss, accuracy)

    def samples_by(self, now: float, step: int, computing_since: float, in_last_group: bool) -> float:
        """Samples it probably has by ``now`` towards the update after ``step``; records are a little old always.

        :param computing_since: since when this peer computes, without a pause; the others pause when it does
        :param in_last_group: it finished the last round with us, whatever its record says
        """
        since = max(self.time, computing_since)
        if self.step == step:
            return self.samples + (self._samples_in(now - since) if self.phase == TRAINING else 0.0)
        return self._samples_in(now - computing_since) if in_last_group and self.step < step else 0.0

    def _samples_in(self, seconds: float) -> float:
        return self.rate * min(max(0.0, seconds), 2 * REPORT_SECONDS)


class ProgressTracker(threading.Thread):
    """Reports this peer's progress and keeps a picture of the others', in a thread of its own.

    :param dht: a running DHT
    :param namespace: run and recipe
    :param target_batch_size: samples over all peers per global update
    :param name: public name
    """

    def __init__(self, dht: DHT, namespace: str, target_batch_size: int, name: str):
        super().__init__(name="progress", daemon=True)
        self._dht, self._key = dht, f"{namespace}.progress"
        self.target_batch_size = target_batch_size
        self.peer_id: PeerID = dht.peer_id
        now = get_dht_time()
        self._own = PeerProgress(name, 0, 0, 0.0, now, now, bool(dht.client_mode), JOINING)
        self._others: dict[PeerID, PeerProgress] = {}
        self._last_group: frozenset[PeerID] = frozenset()
        self._distrusted: dict[PeerID, float] = {}
        self._absent: dict[PeerID, int] = {}
        self._complained: set[PeerID] = set()
        self._computing_since = now
        self._lock = threading.Lock()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._refreshed = threading.Condition()
        self._refreshes = 0

    # ---- what this peer says ----------------------------------------------------------------------------------------

    @property
    def own(self) -> PeerProgress:
        return self._own

    def report(self, *, urgent: bool = False, **changes) -> None:
        """Change fields of the own record; it travels within ``REPORT_SECONDS``, or at once if ``urgent``."""
        with self._lock:
            self._own = replace(self._own, time=get_dht_time(), **changes)
        if urgent:
            self._wake.set()

    def begin_step(self, step: int, group: frozenset[PeerID] = frozenset()) -> None:
        """A new step begins; ``group`` are those who finished the last one with us."""
        with self._lock:
            self._computing_since, self._last_group = get_dht_time(), group
        self.report(step=step, samples=0, phase=TRAINING)

    def resume(self) -> None:
        """A pause (validation, a checkpoint) ends."""
        with self._lock:
            self._computing_since = get_dht_time()
        self.report(phase=TRAINING)

    # ---- what the others say ----------------------------------------------------------------------------------------

    @property
    def others(self) -> dict[PeerID, PeerProgress]:
        """The other peers whose records are fresh."""
        oldest = get_dht_time() - RECORD_SECONDS
        with self._lock:
            return {peer: record for peer, record in self._others.items() if record.time >= oldest}

    def _believed(self) -> dict[PeerID, PeerProgress]:
        now = time.monotonic()
        return {peer: record for peer, record in self.others.items() if self._distrusted.get(peer, 0) < now}

    @property
    def members(self) -> list[Member]:
        """Everyone to expect in the next round, this peer included.

        Whatever step their records name: records are older than the steps of a fast swarm. Who was waited for in vain
        is not expected again until its record shows that it has caught up.
        """
        members = [Member(self.peer_id, self._own.joined, self._own.client_mode)]
        for peer, record in self._believed().items():
            if record.phase != JOINING and record.step > self._absent.get(peer, -1):
                members.append(Member(peer, record.joined, record.client_mode))
        return members

    def missed(self, peers: Iterable[PeerID]) -> None:
        """These did not come to the round that ends the present step."""
        for peer in peers:
            self._absent[peer] = self._own.step

    @property
    def swarm_step(self) -> int:
        """The latest step that a full peer who is believed claims, at least our own."""
        records = self._believed().values()
        steps = (record.step for record in records if not record.client_mode and record.phase != JOINING)
        return max([self._own.step, *steps])

    def donors(self, min_step: int) -> list[PeerID]:
        """Full peers that claim to hold the state of ``min_step`` or later: the latest first, then the senior."""
        candidates = [
            (-record.step, record.joined, peer.to_bytes(), peer)
            for peer, record in self._believed().items()
            if not record.client_mode and record.step >= min_step and record.phase != JOINING
        ]
        return [peer for *_, peer in sorted(candidates)]

    @property
    def superiors(self) -> list[PeerID]:
        """Full peers whose state counts and not ours: at a later step, or at ours and here before us."""
        own, own_id = self._own, self.peer_id
        mine = (-own.step, own.joined, own_id.to_bytes())
        return [
            peer
            for peer, record in self._believed().items()
            if not record.client_mode and (-record.step, record.joined, peer.to_bytes()) < mine
        ]

    def distrust(self, peer_id: PeerID) -> None:
        """Ignore a peer for a while: what it claims did not hold."""
        self._distrusted[peer_id] = time.monotonic() + DISTRUST_SECONDS

    def samples_by_now(self) -> float:
        """Samples that the swarm has probably accumulated towards the next update."""
        now, own = get_dht_time(), self._own
        others = self._believed().items()
        return own.samples + sum(
            record.samples_by(now, own.step, self._computing_since, peer in self._last_group) for peer, record in others
        )

    @property
    def step_is_over(self) -> bool:
        """Whether the swarm has the target batch, as far as this peer can tell, or somebody else says so."""
        own = self._own
        if any(r.step == own.step and r.phase == AVERAGING for r in self._believed().values()):
            return True
        return self.samples_by_now() >= self.target_batch_size

    def seconds_to_target(self) -> float:
        """Estimated seconds until the swarm has the target batch; infinite when nobody computes."""
        rate = self._own.rate + sum(r.rate for r in self._believed().values() if r.phase == TRAINING)
        missing = self.target_batch_size - self.samples_by_now()
        return max(0.0, missing) / rate if rate > 0 else math.inf

    def wait_refreshed(self, timeout_seconds: float) -> bool:
        """Wait until records that were asked for after this call have come."""
        with self._refreshed:
            wanted = self._refreshes + 2  # the refresh that is running may have asked before
            self._wake.set()
            deadline = time.monotonic() + timeout_seconds
            while self._refreshes < wanted:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self.is_alive():
                    return False
                self._refreshed.wait(remaining)
                self._wake.set()
            return True

    # ---- the thread -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        while not self._closing.is_set():
            try:
                self._store(self._own, get_dht_time() + RECORD_SECONDS)
                self._read()
            except Exception as error:
                logger.debug(f"could not exchange progress records: {error!r}")
            with self._refreshed:
                self._refreshes += 1
                self._refreshed.notify_all()
            self._wake.wait(min(max(self.seconds_to_target() / 2, MIN_REFRESH_SECONDS), REPORT_SECONDS))
            self._wake.clear()

    def _store(self, record: PeerProgress | None, expiration: float) -> None:
        value = replace(record, time=get_dht_time()).to_bytes() if record is not None else None
        future = self._dht.store(
            self._key, subkey=self.peer_id.to_bytes(), value=value, expiration_time=expiration, return_future=True
        )
        future.result(timeout=RECORD_SECONDS / 3)

    def _read(self) -> None:
        found = self._dht.get(self._key, latest=True, return_future=True).result(timeout=RECORD_SECONDS / 3)
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        now, others = get_dht_time(), {}
        for subkey, entry in list(entries.items())[: 2 * MAX_GROUP_SIZE]:
            try:
                peer_id = PeerID(subkey)
                if peer_id != self.peer_id and isinstance(entry, ValueWithExpiration) and entry.value is not None:
                    others[peer_id] = PeerProgress.from_bytes(entry.value, now)
            except Exception as error:
                self._complain_once(subkey, error)
        with self._lock:
            self._others = others

    def _complain_once(self, subkey, error: Exception) -> None:
        key = subkey if isinstance(subkey, bytes) else b""
        if key not in self._complained and len(self._complained) < MAX_GROUP_SIZE:
            self._complained.add(key)
            logger.warning(f"Ignoring a peer whose progress record makes no sense ({error})")

    def close(self) -> None:
        """Stop, and tell the others that this peer has left."""
        self._closing.set()
        self._wake.set()
        self.join(timeout=2)
        try:
            self._store(None, get_dht_time() + RECORD_SECONDS)
        except Exception as error:
            logger.debug(f"could not say goodbye: {error!r}")
