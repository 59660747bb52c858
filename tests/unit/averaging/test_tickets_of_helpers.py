"""A peer that may only serve gives nothing to an average, whatever it claims."""

import pytest
from hivemind.p2p import PeerID

from swarm.averaging.meeting.matchmaking_messages import group_reply, parse_group, read_ticket
from swarm.network.signed_records import peer_of
from swarm.protocol.admission import OPEN, NotAMember
from swarm.protocol.certificates import EVERYTHING, HELPER, Role
from swarm.protocol.messages import Group, Ticket
from swarm.protocol.wire import LINEAGE_BYTES
from tests.helpers.owners import Organiser, subkey_of

ADA, HELGA = (peer_of(subkey_of(name)) for name in ("ada", "helga"))
LINEAGE, NONCE = bytes(LINEAGE_BYTES), bytes(LINEAGE_BYTES)


def ticket(samples: int, client_mode: bool = False) -> Ticket:
    return Ticket(3, samples, client_mode, 1.0, LINEAGE)


@pytest.mark.parametrize(
    ("roles", "counted"), [(EVERYTHING, 500), (Role.TRAIN | Role.SERVE, 500), (HELPER, 0), (Role.SERVE, 0)]
)
def test_samples_count_only_of_a_peer_that_may_train(roles, counted):
    organiser = Organiser()
    here = organiser.admission(ADA)
    shown = organiser.admission(HELGA, roles=roles).show(ticket(500).to_bytes())
    assert read_ticket(shown, HELGA, here) == ticket(counted)
    again = organiser.admission(HELGA, roles=EVERYTHING).show(ticket(500).to_bytes())
    assert read_ticket(again, HELGA, here) == ticket(500), "what was shown last counts"


@pytest.mark.parametrize(("roles", "client_mode"), [(Role.WATCH, True), (Role(0), True), (Role.TRAIN, False)])
def test_a_peer_that_may_neither_train_nor_serve_is_in_no_round(roles, client_mode):
    organiser = Organiser()
    shown = organiser.admission(HELGA, roles=roles).show(ticket(0, client_mode).to_bytes())
    with pytest.raises(NotAMember, match="does not allow this"):
        read_ticket(shown, HELGA, organiser.admission(ADA))


def test_a_peer_with_another_kind_of_key_is_in_no_round():
    """A ledger names peers by ids of 34 bytes.

    With another kind of id in a group, every honest line of it would be false.
    """
    stranger = PeerID(bytes([0, 36, 8, 1, 18, 32, *range(32)]))  # Ed25519
    with pytest.raises(ValueError, match="another kind of key"):
        read_ticket(ticket(500).to_bytes(), stranger, OPEN)
    assert read_ticket(ticket(500).to_bytes(), HELGA, OPEN) == ticket(500)


def test_all_members_count_a_lying_helper_alike_and_the_helper_alone_finds_another_group():
    organiser = Organiser()
    shown = [organiser.admission(ADA).show(ticket(64).to_bytes())]
    shown.append(organiser.admission(HELGA, roles=HELPER).show(ticket(500).to_bytes()))
    peers, true = (ADA, HELGA), (ticket(64), ticket(0))
    reply = group_reply(Group(NONCE, peers, true), NONCE, shown)
    group = parse_group(reply, HELGA, ADA, ticket(64), organiser.admission(ADA), "night-1")
    assert group == Group.close(NONCE, peers, true, "night-1")
    assert group.samples == 64
    assert group.group_id != Group.close(NONCE, peers, (ticket(64), ticket(500)), "night-1").group_id
