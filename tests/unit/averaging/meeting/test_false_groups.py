"""A leader's false answer to a join request is refused, with the reason."""

from dataclasses import replace

import pytest

from swarm.averaging.meeting.matchmaking_messages import group_reply, parse_group
from swarm.network.signed_records import peer_of
from swarm.protocol.admission import OPEN
from swarm.protocol.messages import Group, Ticket
from swarm.protocol.wire import LINEAGE_BYTES
from tests.helpers.owners import subkey_of

LEA, ADA, BEN, EVE = (peer_of(subkey_of(name)) for name in ("lea", "ada", "ben", "eve"))
NONCE, LINEAGE, OTHER_LINEAGE = (bytes([number]) * LINEAGE_BYTES for number in (1, 2, 3))
TICKET = Ticket(7, 64, False, 1.0, LINEAGE)
LISTENER = Ticket.of_listener(7, False)


def read_by_ada(peers, tickets, own: Ticket = TICKET, nonce: bytes = NONCE) -> Group:
    """The group that Lea answers to Ada."""
    reply = group_reply(Group(nonce, tuple(peers), tuple(tickets)), nonce, [ticket.to_bytes() for ticket in tickets])
    return parse_group(reply, LEA, ADA, own, OPEN, "night-1")


@pytest.mark.parametrize("own", [TICKET, LISTENER], ids=["a member", "a listener"])
def test_an_honest_group_is_read(own):
    peers, tickets = (LEA, ADA, BEN), (TICKET, own, LISTENER)
    assert read_by_ada(peers, tickets, own) == Group.close(NONCE, peers, tickets, "night-1")


@pytest.mark.parametrize(
    ("peers", "tickets", "reason"),
    [
        ([ADA], [TICKET], "a wrong size"),
        ([LEA, ADA], [TICKET, TICKET, TICKET], "a wrong size"),
        ([LEA, ADA, BEN, BEN], [TICKET] * 4, "there twice"),
        ([ADA, BEN], [TICKET, TICKET], "the leader is missing"),
        ([LEA, BEN], [TICKET, TICKET], "our ticket is missing"),
        ([LEA, ADA], [TICKET, replace(TICKET, samples=1)], "our ticket is missing or was changed"),
        ([LEA, ADA], [LISTENER, TICKET], "its leader has no weights"),
        ([LEA, ADA], [replace(TICKET, client_mode=True), TICKET], "its leader cannot be called"),
        ([LEA, ADA, BEN], [TICKET, TICKET, replace(TICKET, step=8)], "different weights"),
        ([LEA, ADA, BEN], [TICKET, TICKET, replace(TICKET, lineage=OTHER_LINEAGE)], "different weights"),
        ([LEA, ADA, BEN], [TICKET, TICKET, replace(LISTENER, step=6)], "different weights"),
        ([LEA, ADA, BEN], [TICKET, TICKET, replace(TICKET, orders=bytes(8))], "different orders"),
    ],
)
def test_a_false_group_is_refused(peers, tickets, reason):
    with pytest.raises(ValueError, match=reason):
        read_by_ada(peers, tickets)


def test_a_nonce_of_another_length_is_refused():
    with pytest.raises(ValueError, match="a wrong size"):
        read_by_ada([LEA, ADA], [TICKET, TICKET], nonce=NONCE[1:])


def test_a_listener_refuses_a_group_of_different_weights_and_takes_those_of_any_history():
    peers, own = [LEA, ADA, BEN], LISTENER
    others = replace(TICKET, lineage=OTHER_LINEAGE)
    assert read_by_ada(peers, [others, own, others], own).lineage == OTHER_LINEAGE
    with pytest.raises(ValueError, match="different weights"):
        read_by_ada(peers, [TICKET, own, others], own)
