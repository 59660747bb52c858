"""Who has come early to a leader, and whether the leader ends its step for that."""

import asyncio
from types import SimpleNamespace

import pytest
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2

from swarm.averaging.matchmaking import Matchmaking
from swarm.membership.backoff import Backoff
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.messages import Ticket
from swarm.protocol.wire import LINEAGE_BYTES

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
        request = averaging_pb2.JoinRequest(schema_hash=b"schema", gather=ticket.to_bytes())
        probe = leader.serve(request, SimpleNamespace(remote_id=who))
        assert (await anext(probe)).code == averaging_pb2.ACCEPTED, "it is early"
        assert not leader.waits_for(3)
        leader.set_step(4, AFTER)
        assert leader.waits_for(4) == waits
        await probe.aclose()
        assert not leader.waits_for(4), "it has left"

    asyncio.run(test())
