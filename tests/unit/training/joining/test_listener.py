"""A peer that has nearly caught up goes to the next round before it has the weights."""

from concurrent.futures import Future
from threading import Timer
from types import SimpleNamespace

import pytest
import torch
from hivemind.p2p import PeerID

from swarm.averaging.commands import RunRound
from swarm.protocol.admission import OPEN
from swarm.protocol.messages import ANY_LINEAGE, Behind, Blame, Member, RoundFailed, Ticket
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS
from swarm.training.joining.listener import LISTEN_BYTES, Listener
from swarm.training.options import CoordinatorOptions
from swarm.training.run_control import RunControl

ME, OTHER = (PeerID(bytes([number])) for number in (1, 2))
LINEAGE = bytes(LINEAGE_BYTES)


class Averager:
    """An averager that takes rounds, and says nothing about them."""

    can_listen, timeouts = True, DEFAULT_TIMEOUTS

    def __init__(self, size: int = LISTEN_BYTES // 4):
        self.vector, self.tickets, self.rounds, self.cancelled = torch.ones(size), [], [], 0
        self.ends_after_seconds = 0.0

    def is_alive(self) -> bool:
        return True

    def longest_round_seconds(self, timeout_seconds: float, members) -> float:
        return timeout_seconds

    def run_round(self, order: RunRound) -> Future:
        assert [member.peer_id for member in order.members] == [OTHER], "it cannot lead"
        self.tickets.append(order.ticket)
        self.rounds.append(Future())
        return self.rounds[-1]

    def cancel_round(self) -> None:
        self.cancelled += 1
        Timer(self.ends_after_seconds, self.rounds[-1].set_exception, [RoundFailed("cancelled")]).start()


def listener(averager: Averager, next_round: int = 7, overlaps: bool = True, blame=lambda blamed: None) -> Listener:
    members = [Member(ME, 0.0, False), Member(OTHER, 1.0, False)]
    swarm = SimpleNamespace(members=members, next_round=next_round)
    tracker = SimpleNamespace(swarm=swarm, peer_id=ME, own=SimpleNamespace(client_mode=False), blame=blame)
    own = SimpleNamespace(
        averager=averager,
        tracker=tracker,
        version=SimpleNamespace(step=next_round - 1),
        options=CoordinatorOptions(),
        control=RunControl(OPEN, 64, 100),
        averaging=SimpleNamespace(overlaps=overlaps),
    )
    return Listener(own)


def test_it_goes_on_with_the_round_of_its_step():
    averager = Averager()
    listening = listener(averager)
    listening.begin()
    listening.begin()
    assert averager.tickets == [Ticket.of_listener(7, False)], "one at a time"
    assert not averager.vector.any(), "what was there is not sent"
    assert listening.is_at(7)
    assert not listening.is_at(6)
    listened = listening.take(7, LINEAGE)
    assert listened.future is averager.rounds[0]
    assert (listened.ticket.step, listened.ticket.lineage, listened.ticket.samples) == (7, LINEAGE, 0)
    assert listening.take(7, LINEAGE) is None
    assert averager.cancelled == 0


@pytest.mark.parametrize("leave", [lambda listening: listening.take(6, LINEAGE), Listener.leave])
def test_a_listener_that_has_other_weights_or_leaves_listens_no_longer(leave):
    averager = Averager()
    listening = listener(averager)
    listening.begin()
    leave(listening)
    assert averager.cancelled == 1
    assert not listening.is_at(7)


def test_a_listener_with_other_weights_waits_until_the_vector_is_free():
    averager = Averager()
    averager.ends_after_seconds = 0.3
    listening = listener(averager)
    listening.begin()
    assert listening.take(6, LINEAGE) is None
    assert averager.rounds[0].done(), "or the trainer would write where the round still writes its averages"


def test_a_listener_that_comes_too_late_goes_to_the_round_after_that():
    averager = Averager()
    listening = listener(averager)
    listening.begin()
    averager.rounds[0].set_exception(Behind(9))
    assert not listening.is_at(7)
    listening.begin()
    assert [ticket.step for ticket in averager.tickets] == [7, 9]


def test_a_listener_blames_a_peer_that_spoils_its_round():
    averager, blamed = Averager(), {}
    listening = listener(averager, blame=blamed.update)
    listening.begin()
    averager.rounds[0].set_exception(RoundFailed("of nonsense").blames({OTHER: Blame.SENT_NONSENSE}))
    assert not listening.is_at(7)
    assert blamed == {OTHER: Blame.SENT_NONSENSE}


@pytest.mark.parametrize(("size", "overlaps"), [(LISTEN_BYTES // 4 - 1, True), (LISTEN_BYTES // 4, False)])
def test_a_peer_listens_only_where_an_average_takes_long_and_runs_beside_the_training(size, overlaps):
    averager = Averager(size)
    listener(averager, overlaps=overlaps).begin()
    assert not averager.tickets


def test_a_listener_that_claims_samples_is_refused():
    assert Ticket.from_bytes(Ticket.of_listener(3, True).to_bytes()).listens
    with pytest.raises(ValueError, match="no samples"):
        Ticket.from_bytes(Ticket(3, 1, True, 0.0, ANY_LINEAGE).to_bytes())
