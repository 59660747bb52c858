"""Members whose gradients are far from the others' most of the time are named, once."""

from hivemind.p2p import PeerID

from swarm.membership.far_members import MANY, MAX_REMEMBERED, ROUNDS, FarMembers
from swarm.protocol.messages import Group, Ticket
from swarm.protocol.round_report import RoundEvent, RoundReport, StepReport

A, B, LISTENER = (PeerID(bytes([number])) for number in range(3))


def report(*outside: PeerID, members=(A, B, LISTENER), judged: bool = True) -> RoundReport:
    """The report of a round in which these peers were far away."""
    tickets = tuple(Ticket(1, 0 if peer == LISTENER else 10, False, 1.0, bytes(16)) for peer in members)
    counts = dict.fromkeys(("parts_expected", "parts_received", "inputs_expected", "inputs_received"), 1)
    return RoundReport(
        Group(bytes(16), tuple(members), tickets),
        **counts,
        meeting_seconds=0.0,
        exchange_seconds=0.0,
        bytes_sent=0,
        bytes_received=0,
        judged=judged,
        outside=frozenset(outside),
    )


def test_a_member_that_is_far_away_in_most_rounds_is_named_once():
    far = FarMembers()
    named = [far.note(report(B)) for _ in range(3 * ROUNDS)]
    assert named[MANY - 1] == [B]
    assert sum(map(len, named)) == 1


def test_a_member_that_is_far_away_now_and_then_is_not_named():
    far = FarMembers()
    pattern = [True] * (MANY - 1) + [False] * (ROUNDS - MANY + 1)
    assert not any(far.note(report(*([B] if away else []))) for away in 5 * pattern)


def test_rounds_in_which_this_peer_has_combined_nothing_say_nothing():
    far = FarMembers()
    for _ in range(MANY - 1):
        far.note(report(B))
    for _ in range(ROUNDS):
        assert far.note(report(judged=False)) == []
    assert far.note(report(B)) == [B]


def test_names_that_cost_nothing_do_not_fill_the_memory():
    far = FarMembers()
    strangers = [PeerID(number.to_bytes(4, "big")) for number in range(10, MAX_REMEMBERED + 50)]
    for _ in range(MANY - 1):
        far.note(report(B))
    far.note(report(members=strangers))
    assert far.note(report(B)) == [], "it has been forgotten, as the oldest"


def test_the_line_of_a_round_names_members_that_were_far_away():
    exchanged = report(B)
    update = StepReport(2, 3, 20, 10, 1.0, 1.0, 0.0, exchanged)
    assert RoundEvent.of_update(update).outside == (B.to_base58(),)
