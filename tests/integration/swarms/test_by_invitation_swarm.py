"""A run by invitation: its members train with each other and nobody else. What others get: `tests/e2e/attacks`."""

import time
from functools import partial
from threading import Event

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm.network.record_push import push_list
from swarm.network.signed_records import REMOVED
from swarm.peer.membership.member_watch import MemberWatch
from swarm.protocol.admission import OPEN, Admission
from swarm.protocol.certificates import EVERYTHING, Authority, Certificate, Removals, Signer
from swarm.training.options import CoordinatorOptions
from swarm.training.strategy import SwarmStrategy
from tests.helpers.owners import DAY_SECONDS
from tests.helpers.strategy_runs import Outcome, Plan, Record, Task, assert_equal_updates, loader, trainer_for
from tests.helpers.swarm_peers import Peers, running_dht

pytestmark = pytest.mark.timeout(180)
TARGET, NAMESPACE = 32, "closed"


def signer_of(key: bytes) -> Signer:
    return Signer(Ed25519PrivateKey.from_private_bytes(key))


def admission_of(key: bytes, peer_id, serial: int) -> Admission:
    """Of a member that the owner of this key has enrolled."""
    signer, now = signer_of(key), int(time.time())
    made = Certificate("run", peer_id, serial, EVERYTHING, now - DAY_SECONDS, now + DAY_SECONDS, "ada")
    return Admission(Authority("run", signer.public_key), made.signed_by(signer))


def train(name, initial_peers, line, key, serial=None, max_steps=-1, min_peers=1, until=lambda updates: False):
    """A peer; without a serial number it has no certificate. It tells when it is removed, and then leaves."""
    with running_dht(initial_peers, line) as dht:
        admission = OPEN if serial is None else admission_of(key, dht.peer_id, serial)
        removed = Event()
        options = CoordinatorOptions(
            min_peers,
            matchmaking_seconds=3.0,
            averaging_timeout_seconds=20.0,
            join_timeout_seconds=12.0,
            admission=admission,
        )
        strategy = SwarmStrategy(
            TARGET, "run", dht=dht, name=name, namespace=NAMESPACE, options=options, stop_requested=removed
        )
        said = []

        def on_end(sentence):
            said.append(sentence)
            removed.set()

        def tell(certificate, lists):
            if strategy.coordinator is None:
                return False
            strategy.coordinator.averager.set_admission(certificate, lists)
            return True

        watch = MemberWatch(dht, admission, NAMESPACE, tell, lambda before: before, on_end)
        if serial is not None:
            watch.start()
        record, task = Record(line, until), Task(Plan(compute_seconds=0.02))
        trainer = trainer_for(strategy, [record], max_steps=max_steps)
        try:
            trainer.fit(task, loader(ord(name)))
        finally:
            watch.stop()
        state = {key: value.clone() for key, value in task.net.state_dict().items()}
        outcome = Outcome(str(dht.peer_id), record.updates, record.joined_at, state, {})
        return outcome, said


def remove(name, initial_peers, line, key, serial):
    """The organiser: she removes a member and goes; when she has told the others, in seconds of this machine."""
    signer = signer_of(key)
    signed = Removals("run", 0, {}).with_removed([serial], "it sent noise").signed_by(signer)
    with running_dht(initial_peers, line, client_mode=True) as dht:
        dht.take_part(NAMESPACE, Authority("run", signer.public_key), b"")
        push_list(dht, NAMESPACE, REMOVED, signed)
        return time.monotonic()


@pytest.fixture
def key() -> bytes:
    return Ed25519PrivateKey.generate().private_bytes_raw()


def test_members_train_together_and_an_outsider_does_not(key):
    with Peers() as peers:
        peers.start("a", partial(train, max_steps=12, min_peers=2), key, 1)
        peers.start("b", partial(train, max_steps=12, min_peers=2), key, 2)
        peers.start("x", partial(train, max_steps=3), key, None)
        (a, _), (b, _), (x, _) = (peers.results()[name] for name in "abx")
    assert_equal_updates(a, b)
    assert max(update.num_peers for update in a.updates) == 2
    assert {update.num_peers for update in x.updates} == {1}, "it trains by itself"
    assert x.peer_id not in set().union(*(update.peer_ids for update in a.updates))


def test_a_forged_certificate_opens_nothing(key):
    """Somebody makes up an organiser's key of her own for the same run."""
    other = Ed25519PrivateKey.generate().private_bytes_raw()
    with Peers() as peers:
        peers.start("a", partial(train, max_steps=12, min_peers=2), key, 1)
        peers.start("b", partial(train, max_steps=12, min_peers=2), key, 2)
        peers.start("x", partial(train, max_steps=3), other, 3)
        (a, _), (b, _), (x, _) = (peers.results()[name] for name in "abx")
    assert_equal_updates(a, b)
    assert x.peer_id not in set().union(*(update.peer_ids for update in a.updates))


def test_a_removed_member_leaves_and_the_others_go_on(key):
    """Also when the organiser has gone by then."""
    with Peers() as peers:
        peers.start("a", partial(train, min_peers=3, until=_has_left), key, 1)
        peers.start("b", partial(train, min_peers=3, until=_has_left), key, 2)
        bad = peers.start("c", partial(train, min_peers=3), key, 3)
        peers.until(lambda: any(num_peers == 3 for _, num_peers, _ in bad.messages))
        peers.start("o", remove, key, 3)
        (a, _), (b, _), (c, said), removed_at = (peers.results()[name] for name in "abco")
    assert said == ["The organiser has removed this peer from the run: it sent noise."]
    assert_equal_updates(a, b)
    late = [update.at - removed_at for update in a.updates if update.num_peers == 3 and update.at > removed_at]
    print(f"{len(late)} more updates with it, the last {max(late, default=0):.2f} s after the removal")
    assert max(late, default=0) < 10
    assert c.peer_id not in a.updates[-1].peer_ids


def _has_left(updates) -> bool:
    """A third peer was there, and has not been for ten updates."""
    numbers = [update.num_peers for update in updates]
    return 3 in numbers and numbers[-10:] == [2] * 10
