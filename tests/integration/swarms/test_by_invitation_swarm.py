"""A run by invitation: its members train with each other only. What strangers get: `tests/e2e/attacks`."""

import time
from collections import defaultdict
from concurrent.futures import Future
from functools import partial
from threading import Event, Thread

import lightning as L
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm.network.record_push import push_list
from swarm.network.signed_records import REMOVED
from swarm.protocol.admission import OPEN
from swarm.protocol.certificates import Removals
from swarm.protocol.messages import ShortBatch
from swarm.training.options import CoordinatorOptions
from swarm.training.strategy import SwarmStrategy
from tests.helpers.owners import admission_of, signer_of
from tests.helpers.strategy_runs import (
    Outcome,
    Plan,
    Record,
    Task,
    assert_equal_updates,
    loader,
    member_watch,
    trainer_for,
)
from tests.helpers.swarm_peers import Peers, running_dht

pytestmark = pytest.mark.timeout(180)
TARGET, NAMESPACE = 32, "closed"


class RemovesInRound(L.Callback):
    """Pushes a list of removed members when a round of all three begins; no other code ever does.

    Args:
        signed: the list; empty if this peer only counts its rounds
    """

    def __init__(self, dht, signed: bytes, record: Record):
        self._dht, self._signed, self._record = dht, signed, record
        self._rounds = defaultdict[int, list[Future]](list)
        """Rounds by step."""
        self.removed_at: float | None = None
        self.step = -1
        """Step of the round that was under way then."""

    def on_train_start(self, trainer, pl_module):
        averager = trainer.strategy.coordinator.averager
        run_round = averager.run_round

        def count_and_run(order):
            future = run_round(order)
            self._rounds[order.ticket.step].append(future)
            are_together = [update.num_peers for update in self._record.updates[-2:]] == [3, 3]
            if self._signed and self.removed_at is None and are_together:
                self.step, self.removed_at = order.ticket.step, time.monotonic()
                Thread(target=push_list, args=(self._dht, NAMESPACE, REMOVED, self._signed), daemon=True).start()
            return future

        averager.run_round = count_and_run

    @property
    def rounds(self) -> int:
        """Rounds of that step with enough samples; more than one if a round failed."""
        return sum(not _is_short(future) for future in self._rounds[self.step])


def _is_short(future: Future) -> bool:
    return future.done() and not future.cancelled() and isinstance(future.exception(), ShortBatch)


def train(
    name,
    initial_peers,
    line,
    key,
    serial=None,
    max_steps=-1,
    min_peers=1,
    until=lambda updates: False,
    compute_seconds=0.02,
    removes=b"",
):
    """Run a peer. Without a serial number it has no certificate. A removed peer leaves, and returns the sentence.

    Args:
        removes: list that it pushes itself, in the middle of a round
    """
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

        watch = member_watch(strategy, dht, admission, NAMESPACE, on_end)
        if serial is not None:
            watch.start()
        record, task = Record(line, until), Task(Plan(compute_seconds=compute_seconds))
        removal = RemovesInRound(dht, removes, record)
        trainer = trainer_for(strategy, [record, removal], max_steps=max_steps)
        try:
            trainer.fit(task, loader(ord(name)))
        finally:
            watch.stop()
        state = {key: value.clone() for key, value in task.net.state_dict().items()}
        outcome = Outcome(str(dht.peer_id), record.updates, record.joined_at, state, {})
        return outcome, said, (removal.rounds, removal.removed_at)


@pytest.fixture
def key() -> bytes:
    return Ed25519PrivateKey.generate().private_bytes_raw()


def test_members_train_together_and_an_outsider_does_not(key):
    with Peers() as peers:
        peers.start("a", partial(train, max_steps=12, min_peers=2), key, 1)
        peers.start("b", partial(train, max_steps=12, min_peers=2), key, 2)
        peers.start("x", partial(train, max_steps=3), key, None)
        (a, *_), (b, *_), (x, *_) = (peers.results()[name] for name in "abx")
    assert_equal_updates(a, b)
    assert max(update.num_peers for update in a.updates) == 2
    assert {update.num_peers for update in x.updates} == {1}, "it trains by itself"
    assert x.peer_id not in set().union(*(update.peer_ids for update in a.updates))


def test_a_forged_certificate_opens_nothing(key):
    """A stranger makes up an organiser's key for the same run."""
    other = Ed25519PrivateKey.generate().private_bytes_raw()
    with Peers() as peers:
        peers.start("a", partial(train, max_steps=12, min_peers=2), key, 1)
        peers.start("b", partial(train, max_steps=12, min_peers=2), key, 2)
        peers.start("x", partial(train, max_steps=3), other, 3)
        (a, *_), (b, *_), (x, *_) = (peers.results()[name] for name in "abx")
    assert_equal_updates(a, b)
    assert x.peer_id not in set().union(*(update.peer_ids for update in a.updates))


def test_a_removed_member_is_out_within_one_update_and_no_round_is_lost(key):
    """The organiser is absent: members pass her signed list on while a round is under way."""
    signed = Removals("run", 0, {}).with_removed([3], "it sent noise").signed_by(signer_of(key))
    peer = partial(train, min_peers=3, compute_seconds=0.5)
    with Peers() as peers:
        peers.start("a", partial(peer, until=_has_left, removes=signed), key, 1)
        peers.start("b", partial(peer, until=_has_left), key, 2)
        peers.start("c", peer, key, 3)
        (a, _, (rounds, removed_at)), (b, *_), (c, said, _) = (peers.results()[name] for name in "abc")
    assert [str(why) for why in said] == ["The organiser has removed this peer from the run: it sent noise."]
    assert rounds == 1, "the round that was under way"
    assert_equal_updates(a, b)
    under_way, *later = (update for update in a.updates if update.at > removed_at)
    assert under_way.complete
    assert [update.num_peers for update in later if c.peer_id in update.peer_ids] == []


def _has_left(updates) -> bool:
    """Whether a third peer was there, and has not been for some updates."""
    numbers = [update.num_peers for update in updates]
    return 3 in numbers and numbers[-4:] == [2] * 4
