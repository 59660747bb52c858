"""The organiser steers a run: all peers follow at the stated step, also peers that the list does not reach at first."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field
from functools import partial

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.dht.routing import DHTID

from swarm.membership.progress_record import PAUSED, WAITING
from swarm.network.record_push import push_list
from swarm.network.signed_records import records_of
from swarm.protocol.certificates import Authority, Right, Signer, warrant
from swarm.protocol.order_book import OrderBook, merged, revoke
from swarm.protocol.orders import Order, Orders, What
from swarm.protocol.signed_lists import ORDERS
from swarm.training.limits import Limit
from swarm.training.options import CoordinatorOptions
from swarm.training.strategy import SwarmStrategy
from tests.helpers.owners import admission_of, signer_of
from tests.helpers.strategy_runs import (
    Outcome,
    Plan,
    Record,
    Task,
    assert_equal_updates,
    assert_same_bits,
    learning_rate_factor,
    loader,
    member_watch,
    trainer_for,
)
from tests.helpers.swarm_peers import Peers, running_dht

pytestmark = pytest.mark.timeout(180)
TARGET, NAMESPACE, BASE_RATE = 32, "steered", 0.01
LOOK_SECONDS = 0.02


class HearNoOrders:
    """Make this node refuse all records of orders, as if none had been sent; runs in the DHT process."""

    async def __call__(self, _dht, node) -> None:
        records, key = records_of(node.protocol), DHTID.generate(source=f"{NAMESPACE}.{ORDERS}").to_bytes()
        validate = records.validate
        records.validate = lambda record: record.key != key and validate(record)


@dataclass(frozen=True)
class Steered:
    """How a peer takes part.

    Args:
        key: of the organiser
        serial: of its certificate
        hears: whether orders reach it through the DHT
        signed: orders that it knows from the start
        max_steps: total steps of the recipe
        leaves_while: the phase in which it leaves after a second
    """

    key: bytes
    serial: int
    hears: bool = True
    signed: bytes = b""
    max_steps: int = 14
    min_peers: int = 1
    averaging: str = "sync"
    leaves_while: str | None = None


@dataclass
class Came(Outcome):
    """The result of a peer, and when it began micro-batches, on this machine's clock."""

    computed_at: list[float] = field(default_factory=list)


class TimedTask(Task):
    """A task that notes when a micro-batch begins."""

    def __init__(self, plan: Plan):
        super().__init__(plan)
        self.computed_at: list[float] = []

    def training_step(self, batch, batch_idx):
        self.computed_at.append(time.monotonic())
        return super().training_step(batch, batch_idx)


class TimeInPhase(Limit):
    """Stops training a second after the peer has entered this phase, however late that is."""

    def __init__(self, phase: str):
        self._phase, self._until = phase, math.inf

    def look(self, trainer):
        coordinator = trainer.strategy.coordinator  # None as long as this peer has not begun to join
        if coordinator is not None and coordinator.tracker.own.phase == self._phase:
            self._until = min(self._until, time.monotonic() + 1)
        trainer.should_stop |= time.monotonic() >= self._until


def train(name, initial_peers, line, plan: Steered):
    """Run a peer. It reports pauses, and takes further lists as if the organiser had handed them to it."""
    with running_dht(initial_peers, line) as dht:
        known = {ORDERS: plan.signed} if plan.signed else {}
        admission = admission_of(plan.key, dht.peer_id, plan.serial, name, **known)
        if not plan.hears:
            dht.run_coroutine(HearNoOrders())
        options = CoordinatorOptions(plan.min_peers, 3.0, 20.0, admission=admission)
        strategy = SwarmStrategy(
            TARGET,
            "run",
            dht=dht,
            name=name,
            namespace=NAMESPACE,
            options=options,
            averaging=plan.averaging,
            max_step=plan.max_steps,
        )
        watch = member_watch(strategy, dht, admission, NAMESPACE)
        watch.start()
        record, task = Record(line), TimedTask(Plan(compute_seconds=0.02))
        limits = [] if plan.leaves_while is None else [TimeInPhase(plan.leaves_while)]
        trainer, ended = trainer_for(strategy, [record, *limits], max_steps=plan.max_steps), threading.Event()
        threading.Thread(target=_tell_pauses, args=(strategy, line, ended), daemon=True).start()
        threading.Thread(target=_take_lists, args=(dht, line), daemon=True).start()
        try:
            trainer.fit(task, loader(ord(name)))
        finally:
            ended.set()
            watch.stop()
        state = {key: value.clone() for key, value in task.net.state_dict().items()}
        return Came(str(dht.peer_id), record.updates, record.joined_at, state, {}, task.computed_at)


def _tell_pauses(strategy, line, ended) -> None:
    was_paused = False
    while not ended.wait(LOOK_SECONDS):
        if (coordinator := strategy.coordinator) is not None:
            is_paused = coordinator.tracker.own.phase == PAUSED
            if is_paused and not was_paused:
                line.put(("paused", coordinator.step, time.monotonic()))
            was_paused = is_paused


def _take_lists(dht, line) -> None:
    while True:
        push_list(dht, NAMESPACE, ORDERS, line.get())


@pytest.fixture
def key() -> bytes:
    return Ed25519PrivateKey.generate().private_bytes_raw()


def pause_of(peer):
    """Return when the peer was paused, and at which step; None as long as it is not."""
    return next((message for message in peer.messages if message[0] == "paused"), None)


def test_two_peers_that_miss_the_orders_at_first_follow_them_at_the_same_step(key):
    """The orders are half the learning rate, a larger batch, an extension and an end."""
    orders = Orders("run", 1, ()).with_order(Order(4, What.LEARNING_RATE, 0.5)).with_order(Order(6, What.TARGET, 48))
    orders = orders.with_order(Order(8, What.EXTEND, 20)).with_order(Order(16, What.END))
    signed = orders.signed_by(signer_of(key))
    with Peers(90) as peers:
        peers.start("a", train, Steered(key, 1, signed=signed, min_peers=3))
        for serial, name in enumerate("bc", 2):
            peers.start(name, train, Steered(key, serial, hears=False, min_peers=3))
        a, b, c = (peers.results()[name] for name in "abc")
    for other in (b, c):
        assert_equal_updates(a, other)
        assert_same_bits(a.state, other.state)
    for came in (a, b, c):
        assert [came.updates[0].step, came.updates[-1].step] == [1, 16]
        for update in came.updates:
            assert update.samples >= (48 if update.step > 6 else TARGET)
            assert update.learning_rate == pytest.approx(BASE_RATE * rate_after(update.step), rel=1e-12)


def rate_after(step: int) -> float:
    """Return the learning rate factor of the next update under these orders and the schedule of 14 updates."""
    position = step if step < 8 else 8 + (step - 8) * (14 - 8) / (20 - 8)
    return (0.5 if step >= 4 else 1.0) * learning_rate_factor(position)


def test_all_pause_at_the_same_step_and_go_on_together(key):
    pause = Orders("run").with_order(Order(5, What.PAUSE))
    resume = pause.with_order(Order(5, What.RESUME))
    signer = signer_of(key)
    with Peers(90) as peers:
        peers.start("a", train, Steered(key, 1, signed=pause.signed_by(signer), min_peers=3))
        for serial, name in enumerate("bc", 2):
            peers.start(name, train, Steered(key, serial, hears=False, min_peers=3))
        paused = [peers.until(partial(pause_of, peers[name])) for name in "abc"]
        last_paused_at, resumed_at = max(at for _, _, at in paused), time.monotonic()
        peers["a"].tell(resume.signed_by(signer))
        a, b, c = (peers.results()[name] for name in "abc")
    assert [step for _, step, _ in paused] == [5, 5, 5]
    for came in (a, b, c):
        assert not [at for at in came.computed_at if last_paused_at < at < resumed_at], "no peer computes meanwhile"
        assert came.updates[-1].step == 14
    for other in (b, c):
        assert_equal_updates(a, other)
        assert_same_bits(a.state, other.state)


@pytest.mark.parametrize(("phase", "min_peers", "steps"), [(PAUSED, 1, [1, 2]), (WAITING, 2, [])])
def test_a_peer_whose_time_is_over_leaves_also_while_it_waits(key, phase, min_peers, steps):
    pause = Orders("run").with_order(Order(2, What.PAUSE))
    plan = Steered(key, 1, signed=pause.signed_by(signer_of(key)), min_peers=min_peers, leaves_while=phase)
    with Peers(60) as peers:
        peers.start("a", train, plan)
        came = peers.results()["a"]
    assert [update.step for update in came.updates] == steps


@pytest.mark.parametrize("hears", [True, False])
def test_a_paused_run_that_is_ended_ends_on_all_peers_where_it_stands(key, hears):
    """Also on a peer that orders cannot be sent to, such as one behind a router: it has to look for them itself."""
    pause = Orders("run").with_order(Order(5, What.PAUSE))
    signer = signer_of(key)
    with Peers(60) as peers:
        for serial, name in enumerate("ab", 1):
            steered = Steered(key, serial, hears=hears or name == "a", signed=pause.signed_by(signer), min_peers=2)
            peers.start(name, train, steered)
        for name in "ab":
            peers.until(partial(pause_of, peers[name]))
        peers["a"].tell(pause.with_order(Order(5, What.END)).signed_by(signer))
        a, b = (peers.results()[name] for name in "ab")
    assert a.updates[-1].step == b.updates[-1].step == 5
    assert_same_bits(a.state, b.state)


def test_a_deputy_that_is_revoked_while_all_train_is_followed_no_further(key):
    """Orders that have begun stay, its other orders fall away, and no peer follows its later ones."""
    organiser, deputys_key = signer_of(key), Ed25519PrivateKey.generate()
    authority, public_key = Authority("run", organiser.public_key, "run"), deputys_key.public_key().public_bytes_raw()
    deputy = Signer(deputys_key, warrant(organiser, "run", public_key, Right.CONTROL, 0, 2**32))
    given = Orders("run").with_order(Order(4, What.LEARNING_RATE, 0.5)).with_order(Order(5, What.PAUSE))
    given = given.with_order(Order(8, What.END))
    again = given.with_order(Order(9, What.END))
    resumed = Orders("run", 0, again.with_order(Order(5, What.RESUME)).given[-1:])
    known = merged(OrderBook("run"), given.signed_by(deputy), authority).given
    revoked = revoke(public_key, [one for one in known if one.order.at_step <= 5], organiser, authority)
    told = merged(revoked, resumed.signed_by(organiser), authority).to_bytes()
    with Peers(90) as peers:
        peers.start("a", train, Steered(key, 1, signed=given.signed_by(deputy), min_peers=3))
        peers.start("b", train, Steered(key, 2, min_peers=3))
        peers.start("c", train, Steered(key, 3, hears=False, min_peers=3))
        for name in "abc":
            peers.until(partial(pause_of, peers[name]))
        peers["b"].tell(again.signed_by(deputy))
        peers["a"].tell(told)
        a, b, c = (peers.results()[name] for name in "abc")
    for other in (b, c):
        assert_equal_updates(a, other)
        assert_same_bits(a.state, other.state)
    assert [update.step for update in a.updates] == [*range(1, 15)], "neither of its ends counts"
    for update in a.updates:
        factor = 0.5 if update.step >= 4 else 1.0
        assert update.learning_rate == pytest.approx(BASE_RATE * factor * learning_rate_factor(update.step), rel=1e-12)


@pytest.mark.parametrize("averaging", ["sync", "local-fp16"])
def test_a_pause_leaves_the_bits_as_they_would_be(key, averaging):
    """Both runs have one peer, with the same samples."""
    pause = Orders("run", 1, ()).with_order(Order(5, What.PAUSE))
    signer = signer_of(key)
    with Peers(60) as peers:
        peers.start("a", train, Steered(key, 1, signed=pause.signed_by(signer), averaging=averaging))
        peers.until(partial(pause_of, peers["a"]))
        peers["a"].tell(pause.with_order(Order(5, What.RESUME)).signed_by(signer))
        steered = peers.results()["a"]
    with Peers(60) as peers:
        peers.start("a", train, Steered(key, 1, averaging=averaging))
        plain = peers.results()["a"]
    assert steered.updates[-1].step == plain.updates[-1].step == 14
    assert_same_bits(steered.state, plain.state)
