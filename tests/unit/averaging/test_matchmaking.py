"""Who has come early to a leader, and whether the leader ends its step for that."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2

from swarm.averaging.matchmaking import Matchmaking
from swarm.averaging.matchmaking_messages import to_knock
from swarm.membership.backoff import Backoff
from swarm.network.signed_records import peer_of
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.messages import Member, Ticket
from swarm.protocol.wire import LINEAGE_BYTES
from tests.helpers.owners import Organiser, subkey_of

ME, FRIEND, STRANGER = (PeerID(bytes([number])) for number in (1, 2, 3))
BEFORE, AFTER, OTHER = (bytes([number]) * LINEAGE_BYTES for number in (1, 2, 3))


@pytest.mark.parametrize(
    ("who", "ticket", "waits"),
    [
        (FRIEND, Ticket(4, 64, False, 1.0, AFTER), True),
        (FRIEND, Ticket(4, 64, False, 1.0, OTHER), False),
        (FRIEND, Ticket.of_listener(4, False), False),
        (STRANGER, Ticket(4, 64, False, 1.0, AFTER), False),
    ],
    ids=["a member", "other weights", "a listener", "a stranger"],
)
def test_only_a_member_with_the_same_weights_and_samples_makes_a_leader_end_its_step(who, ticket, waits):
    async def test():
        leader = Matchmaking(
            SimpleNamespace(peer_id=ME), object, "run", b"schema", BatchTarget(64), SimpleNamespace(), Backoff()
        )
        leader.met([FRIEND])
        leader.set_step(3, BEFORE)
        request = averaging_pb2.JoinRequest(schema_hash=b"schema", gather=to_knock(ticket.to_bytes()))
        probe = leader.serve(request, SimpleNamespace(remote_id=who))
        assert (await anext(probe)).code == averaging_pb2.ACCEPTED, "it is early"
        assert not leader.waits_for(3)
        leader.set_step(4, AFTER)
        assert leader.waits_for(4) == waits
        await probe.aclose()
        assert not leader.waits_for(4), "it has left"

    asyncio.run(test())


def test_a_guest_whose_certificate_has_ended_is_in_no_group(monkeypatch):
    """It was let into the lobby, and all others would refuse a group with it."""

    async def test():
        organiser = Organiser()
        me, ada, ben = (peer_of(subkey_of(name)) for name in ("me", "ada", "ben"))
        detector = SimpleNamespace(doubts=lambda peer: False, usual_seconds=0.0)
        admission = organiser.admission(me)
        leader = Matchmaking(
            SimpleNamespace(peer_id=me), object, "run", b"", BatchTarget(64), detector, Backoff(), admission=admission
        )
        leader.set_step(4, AFTER)
        ticket, doors = Ticket(4, 64, False, 1.0, AFTER), []
        for peer, ends in ((ada, 1000), (ben, 50)):
            shown = organiser.admission(peer, end=ends).show(ticket.to_bytes())
            request = averaging_pb2.JoinRequest(schema_hash=b"", gather=to_knock(shown))
            doors.append(leader.serve(request, SimpleNamespace(remote_id=peer)))
            assert (await anext(doors[-1])).code == averaging_pb2.ACCEPTED
        monkeypatch.setattr("swarm.protocol.admission.get_dht_time", lambda: time.time() + 100)
        group = await leader.meet(ticket, [Member(me, 0.0, False)], 1.0, asyncio.get_running_loop().time() + 5)
        assert set(group.peer_ids) == {me, ada}
        assert (await anext(doors[1])).code == averaging_pb2.PROTOCOL_VIOLATION
        assert (await anext(doors[0])).code == averaging_pb2.BEGIN_ALLREDUCE
        for door in doors:
            await door.aclose()

    asyncio.run(test())
