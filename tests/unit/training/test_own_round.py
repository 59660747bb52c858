"""A round ends with one value, and its consequences come in an order on which other code relies."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hivemind.p2p import PeerID

from swarm.protocol.messages import (
    Behind,
    Blame,
    Group,
    OtherOrders,
    Refused,
    RoundFailed,
    ShortBatch,
    Ticket,
    WentBack,
)
from swarm.protocol.round_report import RoundReport
from swarm.training.rounds.own_round import OwnRound
from swarm.training.throughput import Work

OWN, OTHER = PeerID(b"own"), PeerID(b"other")
LINEAGE, STEP = bytes(16), 7
TICKET = Ticket(STEP, 32, False, 1.0, LINEAGE)


def group_of(*peers: PeerID, ticket: Ticket = TICKET) -> Group:
    return Group.close(bytes(16), peers, tuple(ticket for _ in peers))


class Listened:
    """A round that ends as the test says."""

    def __init__(self, end: RoundReport | Exception):
        self.ticket, self.work, self.expected, self._end = TICKET, Work(samples=32), {OWN, OTHER}, end

    def wait(self, members, should_stop) -> RoundReport:
        if isinstance(self._end, Exception):
            raise self._end
        return self._end

    def failed(self, error: Exception) -> str:
        return f"failed: {error}"


class Peer:
    """A peer with its own round. It notes everything that the round asks of the peer's other parts."""

    def __init__(self, end: RoundReport | Exception):
        self.parts = Mock()
        self.parts.version.step, self.parts.version.lineage = STEP, LINEAGE
        shared = ("averager", "tracker", "version", "control", "contribution", "attendance")
        own = SimpleNamespace(
            **{name: getattr(self.parts, name) for name in shared},
            options=SimpleNamespace(),
            averaging=SimpleNamespace(overlaps=True),
            should_stop=lambda: False,
        )
        parts = {"step_orders": self.parts.orders, "going_back": self.parts.going_back, "tell": self.parts.tell}
        self.round = OwnRound(own, **parts)
        self.round.take_over(Listened(end))
        self.parts.reset_mock()

    @property
    def asked(self) -> list[str]:
        return [name for name, _, _ in self.parts.mock_calls]


@pytest.mark.parametrize(
    "error",
    [
        RoundFailed("somebody is gone"),
        Behind(STEP + 1, OTHER),
        Refused(OTHER),
        OtherOrders(b""),
        WentBack(group_of(OWN, OTHER), 4),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_round_without_an_average_ends_with_the_reason(error):
    peer = Peer(error)
    ended = peer.round.wait()
    assert (ended.error, ended.report, ended.found_nobody) == (error, None, False)
    assert peer.round.is_running, "what was brought to it is not taken back yet"
    assert not peer.asked


def test_a_group_that_met_too_early_has_met_all_the_same():
    peer = Peer(short := ShortBatch(group_of(OWN, OTHER)))
    assert peer.round.wait().error is short
    assert peer.asked == ["control.met", "tracker.met"]


@pytest.mark.parametrize("peers", [(OWN,), (OWN, OTHER)])
def test_an_average_of_this_peer_alone_is_told_from_others(peers):
    report = RoundReport.of(group_of(*peers), meeting_seconds=1.0, exchange_seconds=1.0)
    ended = Peer(report).round.wait()
    assert (ended.report, ended.error, ended.found_nobody) == (report, None, peers == (OWN,))


def test_a_peer_that_has_listened_to_the_round_of_other_weights_is_behind():
    others = group_of(OTHER, ticket=Ticket(STEP, 32, False, 1.0, bytes(15) + b"x"))
    report = RoundReport.of(others, meeting_seconds=1.0, exchange_seconds=1.0, blamed={OTHER: Blame.TOO_SLOW})
    peer = Peer(report)
    assert isinstance(peer.round.wait().error, Behind)
    assert peer.asked == ["tracker.blame"], "it was not a round of this peer's"


def test_people_learn_of_a_failure_before_any_peer_is_blamed_for_it():
    peer = Peer(error := RoundFailed("somebody is gone"))
    peer.round.note_failure(error)
    assert peer.asked == ["tell", "tracker.note_failure", "tracker.blame"]


def test_work_brought_in_vain_comes_back_before_any_peer_may_download_the_state():
    peer = Peer(RoundFailed("somebody is gone"))
    was_running = []
    peer.parts.contribution.take_back.side_effect = lambda work: was_running.append(peer.round.is_running)
    peer.round.take_back()
    assert was_running == [False]
    assert peer.asked == ["contribution.take_back", "version.settled.set", "tracker.end_ahead", "orders.follow"]
