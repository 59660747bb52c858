"""What peers tell each other about a round: tickets survive the wire, nonsense does not, losses are weighted right."""

import math
import pickle
import random
from dataclasses import replace

import pytest
from hivemind.p2p import PeerID

from swarm.protocol.auto_mode import Pace, Plan
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.messages import ANY_LINEAGE, NOWHERE, Behind, Blame, Group, RoundFailed, ShortBatch, Ticket
from swarm.protocol.round_report import RoundEvent, RoundReport
from swarm.protocol.wire import LINEAGE_BYTES, MAX_SAMPLES, MAX_STEP
from tests.helpers.mutation import mutated

LINEAGE = bytes(range(LINEAGE_BYTES))
TICKETS = [
    Ticket(step=0, samples=0, client_mode=False, loss=0.0, lineage=LINEAGE),
    Ticket(step=17, samples=96, client_mode=True, loss=2.302585, lineage=LINEAGE),
    Ticket(step=MAX_STEP, samples=MAX_SAMPLES, client_mode=False, loss=-1e300, lineage=LINEAGE),
]


def group(*tickets: Ticket) -> Group:
    return Group(b"round", tuple(PeerID(bytes([i])) for i in range(len(tickets))), tickets)


def report(*tickets: Ticket, parts=(4, 4), inputs=(6, 6)) -> RoundReport:
    return RoundReport(group(*tickets), *parts, *inputs, 0.1, 0.2, bytes_sent=8, bytes_received=9)


@pytest.mark.parametrize("ticket", TICKETS)
def test_tickets_survive_the_wire(ticket):
    assert Ticket.from_bytes(ticket.to_bytes()) == ticket


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_becomes_nan(loss):
    assert math.isnan(Ticket.from_bytes(Ticket(1, 8, False, loss, LINEAGE).to_bytes()).loss)


@pytest.mark.parametrize(
    "ticket",
    [
        Ticket(MAX_STEP + 1, 8, False, 0.0, LINEAGE),
        Ticket(-1, 8, False, 0.0, LINEAGE),
        Ticket(1, MAX_SAMPLES + 1, False, 0.0, LINEAGE),
        Ticket(1, -8, False, 0.0, LINEAGE),
        Ticket(True, 8, False, 0.0, LINEAGE),
        Ticket(1.0, 8, False, 0.0, LINEAGE),
        Ticket(1, 8, 1, 0.0, LINEAGE),
        Ticket(1, 8, False, "0" * 250, LINEAGE),
    ],
)
def test_tickets_out_of_bounds(ticket):
    with pytest.raises(ValueError, match=r"."):
        Ticket.from_bytes(ticket.to_bytes())


def test_mutated_tickets_are_tickets_or_a_value_error():
    chance = random.Random(0)
    refused = 0
    for _ in range(2000):
        try:
            ticket = Ticket.from_bytes(mutated(chance.choice(TICKETS).to_bytes(), chance))
        except ValueError:
            refused += 1
        else:
            assert 0 <= ticket.step <= MAX_STEP
            assert 0 <= ticket.samples <= MAX_SAMPLES
            assert not math.isinf(ticket.loss)
    assert 1000 < refused < 2000


def bring(*fields) -> Ticket:
    return Ticket(*fields, LINEAGE)


def test_the_loss_is_the_mean_over_samples():
    assert report(bring(3, 30, False, 1.0), bring(3, 10, False, 2.0)).loss == (30 * 1.0 + 10 * 2.0) / 40
    assert group(bring(3, 30, False, 1.0), bring(3, 10, False, 2.0)).samples == 40


def test_listeners_and_unknown_losses_do_not_count():
    assert report(bring(3, 30, False, 1.5), bring(3, 0, False, 9.0), bring(3, 8, True, math.nan)).loss == 1.5
    assert math.isnan(report(bring(3, 0, False, 1.0)).loss)


def test_complete_means_every_part_both_ways():
    ticket = bring(3, 8, False, 1.0)
    assert report(ticket).complete
    assert not report(ticket, parts=(4, 3)).complete
    assert not report(ticket, inputs=(6, 5)).complete


def test_a_group_s_name_tells_whether_all_were_told_the_same():
    peers = tuple(PeerID(bytes([number])) for number in range(3))
    tickets = tuple(Ticket(1, samples, False, 0.5, LINEAGE) for samples in (8, 16, 24))
    group = Group.close(LINEAGE, peers, tickets)
    assert group == Group.close(LINEAGE, peers, tickets)
    swapped = (tickets[1], tickets[0], tickets[2])
    others = [
        Group.close(bytes(LINEAGE_BYTES), peers, tickets),
        Group.close(LINEAGE, peers[::-1], tickets),
        Group.close(LINEAGE, peers, swapped),
        Group.close(LINEAGE, peers[:2], tickets[:2]),
        Group.close(LINEAGE, peers, tickets, "another run"),
    ]
    assert len({group.group_id, *(other.group_id for other in others)}) == 6
    wild = replace(tickets[0], loss=math.inf, sketch=(math.nan,))
    read = Ticket.from_bytes(wild.to_bytes())
    assert Group.close(LINEAGE, peers[:1], (wild,)).group_id == Group.close(LINEAGE, peers[:1], (read,)).group_id


def test_a_round_that_failed_names_its_members_and_the_lost_ones():
    met = group(*TICKETS[:2])
    short = RoundEvent.of_failure(TICKETS[1], ShortBatch(met), 1.0, 0.5)
    assert (short.group_size, short.samples, short.member_samples) == (2, 96, (0, 96))
    assert short.members == tuple(peer.to_base58() for peer in met.peer_ids)
    lost = RoundEvent.of_failure(TICKETS[1], RoundFailed("it broke", frozenset(met.peer_ids[:1])), 1.0, 0.5)
    assert (lost.group_size, lost.lost, lost.own_samples) == (0, (met.peer_ids[0].to_base58(),), 96)


@pytest.mark.parametrize("error", [Behind(9), RoundFailed("it broke"), ShortBatch(group(TICKETS[1]))], ids=str)
def test_a_blamed_peer_is_named_however_the_round_ended(error):
    blamed = {PeerID(b"liar"): Blame.STUCK}
    arrived = pickle.loads(pickle.dumps(error.blames(blamed)))  # the error comes out of another process
    assert arrived.blamed == blamed
    assert str(arrived) == str(error)
    assert RoundEvent.of_failure(TICKETS[1], arrived, 1.0, 0.5).blamed == (PeerID(b"liar").to_base58(),)


def test_no_member_counts_for_more_than_two_updates():
    liar, honest = Ticket(1, MAX_SAMPLES, False, 0.5, LINEAGE), Ticket(1, 60, False, 0.5, LINEAGE)
    said = group(liar, honest)
    bounded = said.bounded(BatchTarget(64))
    assert [bounded.ticket_of(peer).samples for peer in said.peer_ids] == [128, 60]
    assert bounded.group_id == said.group_id, "named by what was said"
    assert said.bounded(BatchTarget(0)).samples == said.samples, "without a target there is no bound"


def test_a_member_that_is_alone_in_its_group_does_not_go_back():
    assert group(*going(3)).back_to is None
    assert group(*going(3, 3)).back_to == 3


def going(*back_to: int, samples: int = 8) -> list[Ticket]:
    """Tickets of members that want to go back to these steps."""
    return [Ticket(40, samples, False, 1.0, LINEAGE, back_to=step) for step in back_to]


@pytest.mark.parametrize(
    ("tickets", "expected"),
    [
        (going(NOWHERE, NOWHERE, NOWHERE), None),
        (going(16, NOWHERE, NOWHERE), None),  # one liar of three
        (going(16, 16, NOWHERE), 16),  # one liar cannot keep two members from it either
        (going(16, 16, 32), 16),  # or lead them to another step
        (going(16, 16, NOWHERE, NOWHERE), None),
        (going(16, 16, 32, 32), None),
        (going(0, 0), 0),
        (going(16, NOWHERE) + going(NOWHERE, NOWHERE, samples=0), None),
        (going(16, 16, NOWHERE) + going(NOWHERE, NOWHERE, samples=0), 16),  # helpers that have nothing to say
        (going(NOWHERE, NOWHERE, NOWHERE) + going(16, 16, 16, 16, samples=0), None),  # names that give nothing
        (going(16, 16, 16, NOWHERE) + going(8, 8, 8, 8, samples=0), 16),  # nor do they keep others from it
        (going(16, 16, NOWHERE, samples=0), 16),  # no gradient is finite any more
        (going(16, 16, NOWHERE) + [replace(one, lineage=ANY_LINEAGE) for one in going(0, 0, 0, samples=0)], 16),
    ],
)
def test_a_group_goes_back_where_more_than_half_of_it_want_to(tickets, expected):
    assert group(*tickets).back_to == expected


def test_a_member_that_gives_nothing_has_no_say_in_how_all_average():
    one, other = Plan(0, 0, 3, 3), Plan(1, 0, 20, 20)
    giver = Ticket(30, 8, False, 1.0, bytes(LINEAGE_BYTES), pace=Pace(one))
    idle = Ticket(30, 0, False, 0.0, bytes(LINEAGE_BYTES), pace=Pace(other))
    assert group(giver, idle, idle).plan == one
    assert group(giver, *[replace(giver, pace=Pace(other))] * 2).plan == other
    assert group(idle, idle).plan == other, "a group without gifts follows its members all the same"
