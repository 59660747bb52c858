"""Progress records without a network."""

from concurrent.futures import Future
from dataclasses import replace

from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time

from swarm.membership.liveness_probe import Call
from swarm.membership.progress_record import TRAINING, PeerProgress
from swarm.membership.progress_store import knows_no_node
from swarm.membership.progress_tracker import ProgressTracker
from swarm.network.acquaintances import Acquaintances
from swarm.network.record_push import Push, PushedHere
from swarm.network.signed_records import peer_of
from swarm.protocol.admission import OPEN
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.wire import MAX_STEP
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS
from tests.helpers.owners import Organiser, subkey_of

NOW = 1_700_000_000.0
RECORD = PeerProgress(
    *("anna", 12, 96, 250.0, NOW - 60, NOW - 1, False, TRAINING, 1.25, 0.5),
    lineage=b"0123456789abcdef",
    granularity=0.75,
)


def done(value) -> Future:
    """Return a future that has this value already."""
    future = Future()
    future.set_result(value)
    return future


class FakeDHT:
    """A DHT that keeps the records of one key in a dictionary."""

    def __init__(self, client_mode: bool = False):
        self.owner, self.client_mode = subkey_of("own"), client_mode
        self.peer_id = peer_of(self.owner)
        self.records = {}
        self.searches, self.is_told, self.answers = 0, True, True
        self.finds_an_end = True
        """Whether a search ends with an answer; else it times out."""
        self.knows_others = True
        """Whether it knows any other node; else a search ends at once, and finds nothing."""
        self.acquaintances = Acquaintances()

    def meet(self, peers):
        self.acquaintances.add(peers)

    def store(self, key, subkey, value, expiration_time, return_future):
        self.records[subkey] = ValueWithExpiration(value, expiration_time)
        return done(True)

    def get(self, key, latest, return_future):
        self.searches += 1
        if not self.finds_an_end:
            future = Future()
            future.set_exception(TimeoutError())
            return future
        if not self.knows_others:
            return done(None)
        return done(ValueWithExpiration(dict(self.records), get_dht_time() + DEFAULT_TIMEOUTS.record_seconds))

    def run_coroutine(self, coroutine, return_future):
        if isinstance(coroutine, Push):
            return self.store(coroutine.key, coroutine.subkey, coroutine.value, coroutine.expiration_time, True)
        if isinstance(coroutine, Call):
            return done(self.answers)
        if coroutine is knows_no_node:
            return done(not self.knows_others)
        assert isinstance(coroutine, PushedHere)
        pushed = ValueWithExpiration(dict(self.records), get_dht_time() + DEFAULT_TIMEOUTS.record_seconds)
        return done(pushed if self.is_told else None)


class SaidSwarm:
    """A tracker whose thread never runs, and other peers whose records the test writes."""

    def __init__(
        self, target_batch_size: int = 100, client_mode: bool = False, max_step: int = MAX_STEP, invites: bool = False
    ):
        self.dht = FakeDHT(client_mode)
        self.organiser, admission = Organiser(began=1000.0), OPEN
        if invites:
            admission = self.organiser.admission(self.dht.peer_id)
        self.tracker = ProgressTracker(
            self.dht, "run", BatchTarget(target_batch_size), "own", max_step, admission=admission
        )
        self.tracker.report(phase=TRAINING)

    def says(self, name: str, *, age: float = 0.0, joined_before: float = 0.0, **fields) -> PeerID:
        now = get_dht_time()
        record = PeerProgress(name, 0, 0, 0.0, now - 100 - joined_before, now - age, False, TRAINING)
        return self.says_bytes(name, replace(record, **fields).to_bytes())

    def says_bytes(self, name: str, data: bytes) -> PeerID:
        self.dht.store("", subkey_of(name), data, get_dht_time() + DEFAULT_TIMEOUTS.record_seconds, True)
        self.tracker.exchange.look()
        return peer_of(subkey_of(name))

    @property
    def members(self) -> set[PeerID]:
        return {member.peer_id for member in self.tracker.swarm.members}
