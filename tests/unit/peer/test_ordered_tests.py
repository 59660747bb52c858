"""Where the organiser orders tests of the weights, one member of the round makes each, and tells its result."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from recipe.errors import InputError
from swarm.membership.progress_record import PeerProgress
from swarm.peer.callbacks import evaluation
from swarm.peer.callbacks.evaluation import Evaluation, drawn
from swarm.protocol.messages import Group, Ticket
from swarm.protocol.notes import Score
from swarm.protocol.orders import Order, Orders, What
from swarm.protocol.round_report import RoundReport, StepReport
from tests.helpers.ledgers.ledger_run import owner
from tests.helpers.records import RECORD

SAMPLES = {"fast": 96, "usual": 64, "slow": 8, "helper": 0}
TICKET = Ticket(0, 96, False, 1.0, bytes(16))
RESULT = {"images": 10, "loss": 0.25, "top1": 0.75, "top5": 1.0}


def group_of(step: int, salt: int = 0) -> Group:
    tickets = tuple(replace(TICKET, step=step, samples=samples) for samples in SAMPLES.values())
    salted = bytes([salt, *bytes(15)])
    return Group.close(salted, tuple(owner(name).own for name in SAMPLES), tickets)


class Peer:
    """A peer that has made updates with the others, and comes to validations."""

    def __init__(self, name: str, folder, *orders: Order, every: int | None = None):
        self.record: PeerProgress = RECORD
        self.said: list[str] = []
        self.callback = Evaluation(every, 10, folder / name, self.said.append)
        given = Orders("run", 1, orders)
        tracker = SimpleNamespace(peer_id=owner(name).own, report=self.report)
        self.coordinator = SimpleNamespace(control=SimpleNamespace(orders=given), tracker=tracker, last_step=None)
        self.trainer = SimpleNamespace(
            global_step=0,
            max_steps=100,
            strategy=SimpleNamespace(coordinator=self.coordinator),
            datamodule=None,
            callback_metrics={"val/top1": 0.5},
        )

    def report(self, **changes) -> None:
        self.record = replace(self.record, **changes)

    def validates(self, step: int, group: Group | None, made_at: int | None = None) -> bool:
        """Whether it tests the weights of this step."""
        report = None if group is None else RoundReport.of(group, meeting_seconds=0.0, exchange_seconds=0.0)
        made = replace(TICKET, step=(step if made_at is None else made_at) - 1)
        self.coordinator.last_step, self.trainer.global_step = StepReport.of(made, 1.0, 0.0, report), step
        before, self.record = self.record, replace(self.record, tested=None)
        self.callback.on_validation_end(self.trainer, None)
        has_tested, self.record = self.record.tested is not None, self.record if self.record.tested else before
        return has_tested


@pytest.fixture(autouse=True)
def test_data(monkeypatch):
    """A pass over the test images takes long, and has a test of its own."""
    monkeypatch.setattr(evaluation, "evaluate", lambda *_: RESULT)


def test_all_members_draw_the_same_one_of_those_that_are_fast_enough():
    chosen = {drawn(group_of(9, salt)) for salt in range(64)}
    assert chosen == {owner("fast").own, owner("usual").own}, "another one each time, and no slow one and no helper"


@pytest.mark.parametrize("step", [50, 53, 100])
def test_exactly_one_tests_after_each_so_many_updates(tmp_path, step):
    peers = [Peer(name, tmp_path, Order(10, What.EVALUATE, 50)) for name in SAMPLES]
    group = group_of(step - 1)
    assert [peer.validates(step, group) for peer in peers].count(True) == 1
    (one,) = [peer for peer in peers if peer.record.tested]
    assert one.record.tested == Score(step, 0.75, 0.25)
    assert one.coordinator.tracker.peer_id == drawn(group)


def test_no_peer_tests_in_between_or_without_an_order(tmp_path):
    peers = [Peer(name, tmp_path, Order(10, What.EVALUATE, 50), Order(90, What.EVALUATE, 0)) for name in SAMPLES]
    for step in (10, 40, 60, 90, 100):
        assert not any(peer.validates(step, group_of(step - 1)) for peer in peers)
    assert not Peer("fast", tmp_path).validates(50, group_of(49))


def test_the_last_weights_are_tested(tmp_path):
    peers = [Peer(name, tmp_path, Order(10, What.EVALUATE, 70)) for name in SAMPLES]
    assert [peer.validates(100, group_of(99)) for peer in peers].count(True) == 1


def test_a_peer_that_is_alone_tests_and_one_that_was_not_in_the_round_does_not(tmp_path):
    peer = Peer("slow", tmp_path, Order(10, What.EVALUATE, 50))
    assert peer.validates(50, None)
    assert not peer.validates(100, None, made_at=99), "it has made that update up"


def test_a_peer_whose_options_say_so_tests_as_well(tmp_path):
    peer = Peer("slow", tmp_path, every=20)
    assert [step for step in range(10, 100, 10) if peer.validates(step, group_of(step - 1))] == [20, 40, 60, 80]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (InputError("there are no samples to test with here"), "there are no samples to test with here"),
        (OSError("the disk is gone"), "The weights cannot be tested: OSError('the disk is gone')"),
    ],
)
def test_a_peer_that_cannot_test_says_so_once_and_trains_on(tmp_path, monkeypatch, error, said):
    def fail(*_):
        raise error

    monkeypatch.setattr(evaluation, "evaluate", fail)
    peer = Peer("slow", tmp_path, Order(10, What.EVALUATE, 20))
    assert not any(peer.validates(step, None) for step in (20, 40, 60))
    assert peer.said == [said]


def test_a_peer_whose_options_ask_for_tests_ends_where_a_test_fails(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(evaluation, "evaluate", fail)
    with pytest.raises(OSError, match="gone"):
        Peer("slow", tmp_path, every=20).validates(20, None)
