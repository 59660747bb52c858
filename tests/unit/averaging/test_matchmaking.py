"""How a leader answers peers that come early, and whether it ends its step for them."""

import asyncio
import math
import time
from types import SimpleNamespace

import pytest
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2

from swarm.averaging.meeting.matchmaking import Matchmaking
from swarm.averaging.meeting.matchmaking_messages import parse_orders, to_knock
from swarm.membership.backoff import Backoff
from swarm.network.signed_records import peer_of
from swarm.protocol.admission import OPEN
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.messages import Member, OtherOrders, Ticket
from swarm.protocol.orders import Order, Orders, What
from swarm.protocol.signed_lists import ORDERS
from swarm.protocol.wire import LINEAGE_BYTES
from tests.helpers.owners import Organiser, subkey_of

ME, FRIEND, STRANGER = (PeerID(bytes([18, 32, *[number] * 32])) for number in (1, 2, 3))
BEFORE, AFTER, OTHER = (bytes([number]) * LINEAGE_BYTES for number in (1, 2, 3))


@pytest.mark.parametrize(
    ("who", "ticket", "waits"),
    [
        (FRIEND, Ticket(4, 64, False, 1.0, AFTER), True),
        (FRIEND, Ticket(4, 0, False, 1.0, AFTER), False),
        (FRIEND, Ticket(4, 64, False, 1.0, OTHER), False),
        (FRIEND, Ticket.of_listener(4, False), False),
        (STRANGER, Ticket(4, 64, False, 1.0, AFTER), False),
    ],
    ids=["a member", "no samples", "other weights", "a listener", "a stranger"],
)
def test_only_a_member_with_the_same_weights_and_samples_makes_a_leader_end_its_step(who, ticket, waits):
    async def test():
        leader = Matchmaking(
            SimpleNamespace(peer_id=ME), "run", b"schema", BatchTarget(64), SimpleNamespace(), Backoff()
        )
        leader.met([FRIEND])
        leader.lobby.set_step(3, BEFORE)
        request = averaging_pb2.JoinRequest(schema_hash=b"schema", gather=to_knock(ticket.to_bytes()))
        probe = leader.lobby.serve(request, SimpleNamespace(remote_id=who))
        assert (await anext(probe)).code == averaging_pb2.ACCEPTED, "it is early"
        assert not leader.waits_for(3)
        leader.lobby.set_step(4, AFTER)
        assert leader.waits_for(4) == waits
        await probe.aclose()
        assert not leader.waits_for(4), "it has left"

    asyncio.run(test())


def test_a_guest_whose_certificate_has_ended_is_in_no_group(monkeypatch):
    """Its certificate ends after it was let into the lobby. All other members would refuse a group with it."""

    async def test():
        organiser = Organiser()
        me, ada, ben = (peer_of(subkey_of(name)) for name in ("me", "ada", "ben"))
        detector = SimpleNamespace(doubts=lambda peer: False, usual_seconds=0.0)
        admission = organiser.admission(me)
        leader = Matchmaking(
            SimpleNamespace(peer_id=me), "run", b"", BatchTarget(64), detector, Backoff(), admission=admission
        )
        leader.lobby.set_step(4, AFTER)
        ticket, doors = Ticket(4, 64, False, 1.0, AFTER), []
        for peer, ends in ((ada, 1000), (ben, 50)):
            shown = organiser.admission(peer, end=ends).show(ticket.to_bytes())
            request = averaging_pb2.JoinRequest(schema_hash=b"", gather=to_knock(shown))
            doors.append(leader.lobby.serve(request, SimpleNamespace(remote_id=peer)))
            assert (await anext(doors[-1])).code == averaging_pb2.ACCEPTED
        monkeypatch.setattr("swarm.protocol.admission.get_dht_time", lambda: time.time() + 100)
        group = await leader.meet(ticket, [Member(me, 0.0, False)], 1.0, asyncio.get_running_loop().time() + 5)
        assert set(group.peer_ids) == {me, ada}
        assert (await anext(doors[1])).code == averaging_pb2.PROTOCOL_VIOLATION
        assert (await anext(doors[0])).code == averaging_pb2.BEGIN_ALLREDUCE
        for door in doors:
            await door.aclose()

    asyncio.run(test())


def leader_of(me, admission, detector=None) -> Matchmaking:
    """A leader that waits for guests to step 4."""
    detector = detector or SimpleNamespace()
    leader = Matchmaking(
        SimpleNamespace(peer_id=me), "run", b"", BatchTarget(64), detector, Backoff(), admission=admission
    )
    leader.lobby.set_step(4, AFTER)
    return leader


def test_a_leader_that_was_alone_and_meets_again_for_the_same_step_lets_others_in():
    """It has the target's samples by itself.

    Its trainer makes no update without the members that hold the same weights.
    """

    async def test():
        detector = SimpleNamespace(usual_seconds=0.0, doubts=lambda peer: False, lost=lambda *_, **__: forever.wait())
        leader, forever = leader_of(ME, OPEN, detector), asyncio.Event()
        ticket, alone = Ticket(4, 64, False, 1.0, AFTER), [Member(ME, 0.0, False)]
        knock = averaging_pb2.JoinRequest(schema_hash=b"", gather=to_knock(ticket.to_bytes()))

        async def meet():
            return await leader.meet(ticket, alone, 1.0, asyncio.get_running_loop().time() + 5)

        assert (await meet()).peer_ids == (ME,)
        door = leader.lobby.serve(knock, SimpleNamespace(remote_id=FRIEND))
        assert (await anext(door)).code == averaging_pb2.CANCELLED, "that group is closed"
        leader.lobby.grace.hold(FRIEND)
        meeting = asyncio.ensure_future(meet())
        await asyncio.sleep(0)
        door = leader.lobby.serve(knock, SimpleNamespace(remote_id=FRIEND))
        assert (await anext(door)).code == averaging_pb2.ACCEPTED
        assert set((await meeting).peer_ids) == {ME, FRIEND}
        await door.aclose()

    asyncio.run(test())


@pytest.mark.parametrize("who_knows", ["the leader", "the guest"])
def test_a_peer_that_lacks_the_newest_orders_gets_them_when_it_asks_to_join(who_knows):
    """The leader says which orders it follows. If its list is older, the guest comes again with the newer one."""

    async def test():
        organiser = Organiser()
        me, ada = (peer_of(subkey_of(name)) for name in ("me", "ada"))
        admission, guest = organiser.admission(me), organiser.admission(ada)
        leader = leader_of(me, admission)
        ordered = Orders("run").with_order(Order(5, What.LEARNING_RATE, 0.5))
        signed = ordered.signed_by(organiser.signer)
        (admission if who_knows == "the leader" else guest).lists.take(ORDERS, signed)

        async def come(orders: bytes = b""):
            ticket = Ticket(4, 64, False, 1.0, AFTER, orders=guest.lists.orders.digest(4))
            request = averaging_pb2.JoinRequest(schema_hash=b"", gather=to_knock(guest.show(ticket.to_bytes()), orders))
            door = leader.lobby.serve(request, SimpleNamespace(remote_id=ada))
            reply = await anext(door)
            await door.aclose()
            return reply

        theirs = parse_orders(await come())
        assert theirs == admission.lists.signed(ORDERS)
        if who_knows == "the leader":
            guest.lists.take(ORDERS, theirs)
            reply = await come()
        else:
            reply = await come(guest.lists.signed(ORDERS))
        assert reply.code == averaging_pb2.ACCEPTED
        assert admission.lists.orders == guest.lists.orders == ordered
        with pytest.raises(OtherOrders) as told:
            await leader.meet(Ticket(4, 64, False, 1.0, AFTER), [Member(me, 0.0, False)], 1.0, math.inf)
        assert told.value.signed == signed, "its own trainer follows none yet"

    asyncio.run(test())


def test_orders_without_the_organisers_signature_are_not_followed(caplog):
    async def test():
        organiser, other = Organiser(), Organiser()
        me, ada = (peer_of(subkey_of(name)) for name in ("me", "ada"))
        admission, guest = organiser.admission(me), organiser.admission(ada)
        leader = leader_of(me, admission)
        forged = Orders("run").with_order(Order(5, What.END))
        ticket = Ticket(4, 64, False, 1.0, AFTER, orders=forged.digest(4))
        brings = to_knock(guest.show(ticket.to_bytes()), forged.signed_by(other.signer))
        for _ in range(3):
            request = averaging_pb2.JoinRequest(schema_hash=b"", gather=brings)
            door = leader.lobby.serve(request, SimpleNamespace(remote_id=ada))
            assert parse_orders(await anext(door)) == b""
            await door.aclose()
        assert admission.lists.orders == Orders("run")

    asyncio.run(test())
    assert len([message for message in caplog.messages if "was not signed by the organiser" in message]) == 1
