"""Join requests and what leaders answer to them, as messages of Hivemind's matchmaking, and how these are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import msgspec
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.proto.averaging_pb2 import MessageFromLeader
from msgspec import Meta

from swarm.protocol.admission import MAX_SHOWN_BYTES, Admission
from swarm.protocol.certificates import IN_ROUNDS, Role
from swarm.protocol.messages import MAX_GROUP_SIZE, Group, Ticket
from swarm.protocol.order_book import MAX_BOOK_BYTES
from swarm.protocol.wire import LINEAGE_BYTES, PEER_ID_BYTES, Step, from_wire, to_wire

MAX_STEP_BYTES = 16
LATE_SECONDS = 10.0
"""Seconds for which a leader may not have heard yet that a member was removed: its group goes on with that member."""
_STEP = msgspec.msgpack.Decoder(tuple[Step])
_KNOCK = msgspec.msgpack.Decoder(tuple[bytes, Annotated[bytes, Meta(max_length=MAX_BOOK_BYTES)]])
MAX_KNOCK_BYTES = MAX_SHOWN_BYTES + MAX_BOOK_BYTES


def to_knock(shown: bytes, orders: bytes = b"") -> bytes:
    """The content of a join request.

    Args:
        shown: the sender's ticket, as it shows it
        orders: the organiser's orders, as they were signed, for a leader that follows others
    """
    return to_wire(shown, orders)


def parse_knock(data: bytes) -> tuple[bytes, bytes]:
    """The ticket and the orders in a join request, as of `to_knock`.

    Raises:
        ValueError: it is malformed
    """
    return from_wire(_KNOCK, data, MAX_KNOCK_BYTES)


def orders_reply(signed: bytes) -> MessageFromLeader:
    """Answer that this peer follows other orders of the organiser: these, or an empty list if it knows none."""
    return MessageFromLeader(code=averaging_pb2.NOT_DECLARED, gathered=[signed])


def parse_orders(reply: MessageFromLeader) -> bytes | None:
    """The orders in an `orders_reply`, empty if they are too long; None if it is no such reply."""
    if reply.code != averaging_pb2.NOT_DECLARED or not reply.gathered:
        return None
    return reply.gathered[0] if len(reply.gathered[0]) <= MAX_BOOK_BYTES else b""


def step_reply(step: int) -> MessageFromLeader:
    """Answer that this peer works on that step."""
    return MessageFromLeader(code=averaging_pb2.CANCELLED, gathered=[to_wire(step)])


def parse_step(reply: MessageFromLeader) -> int | None:
    """The step in a `step_reply`, None if there is none."""
    if reply.code != averaging_pb2.CANCELLED or not reply.gathered:
        return None
    try:
        (step,) = from_wire(_STEP, reply.gathered[0], MAX_STEP_BYTES)
    except ValueError:
        return None
    return step


def refusal(code: averaging_pb2.MessageCode) -> MessageFromLeader:
    """Answer that this peer does not let the sender in; the code says why."""
    return MessageFromLeader(code=code)


def redirect(leader: PeerID) -> MessageFromLeader:
    """Answer that this peer follows that leader."""
    return MessageFromLeader(code=averaging_pb2.NOT_A_LEADER, suggested_leader=leader.to_bytes())


def read_ticket(shown: bytes, peer: PeerID, admission: Admission, late_seconds: float = 0.0) -> Ticket:
    """The ticket that a member has shown; a member that may not train brings no samples.

    Args:
        late_seconds: as of `Admission.admit`

    Raises:
        ValueError: the peer is no member, or its ticket is malformed
    """
    if len(peer.to_bytes()) != PEER_ID_BYTES:
        raise ValueError("its id is of another kind of key, with which no ledger could name the group")
    ticket = Ticket.from_bytes(admission.admit(shown, peer, IN_ROUNDS, late_seconds))
    if not ticket.client_mode:
        admission.admit(shown, peer, Role.SERVE, late_seconds)  # other members send it their parts
    return ticket if admission.may(peer, Role.TRAIN) else replace(ticket, samples=0)


def group_reply(group: Group, nonce: bytes, shown: Sequence[bytes]) -> MessageFromLeader:
    """Answer that the group is closed and begins. Each member works out its name from the nonce.

    Args:
        shown: the tickets as their members have shown them
    """
    return MessageFromLeader(
        code=averaging_pb2.BEGIN_ALLREDUCE,
        group_id=nonce,
        ordered_peer_ids=[peer.to_bytes() for peer in group.peer_ids],
        gathered=list(shown),
    )


def parse_group(
    reply: MessageFromLeader, leader: PeerID, me: PeerID, ticket: Ticket, admission: Admission, run: str
) -> Group:
    """The group in a `group_reply`.

    Args:
        ticket: what this peer brought
        admission: tells which peers may be in it
        run: namespace of the run, which is part of the group's name

    Raises:
        ValueError: it is malformed, or does not fit this peer's ticket; the leader is not trusted
    """
    num_members = len(reply.ordered_peer_ids)
    if not 2 <= num_members == len(reply.gathered) <= MAX_GROUP_SIZE or len(reply.group_id) != LINEAGE_BYTES:
        raise ValueError("it has a wrong size")
    peer_ids = tuple(PeerID(peer) for peer in reply.ordered_peer_ids)
    tickets = tuple(
        read_ticket(shown, peer, admission, LATE_SECONDS) for shown, peer in zip(reply.gathered, peer_ids, strict=True)
    )
    if len(set(peer_ids)) != len(peer_ids) or leader not in peer_ids:
        raise ValueError("a member is there twice or the leader is missing")
    if me not in peer_ids or tickets[peer_ids.index(me)] != ticket:
        raise ValueError("our ticket is missing or was changed")
    if tickets[peer_ids.index(leader)].listens:
        raise ValueError("its leader has no weights")
    if tickets[peer_ids.index(leader)].client_mode:
        raise ValueError("its leader cannot be called")
    group = Group.close(bytes(reply.group_id), peer_ids, tickets, run)
    lineage = group.lineage if ticket.listens else ticket.lineage
    if any(member.step != ticket.step or not (member.listens or member.lineage == lineage) for member in tickets):
        raise ValueError("its members have different weights")
    if any(member.orders != ticket.orders for member in tickets):
        raise ValueError("its members follow different orders of the organiser")
    return group
