"""Proofs that a member has lied, which every member can check: what it has signed, and what that is about.

There are three kinds:

- two receipts of one reducer that contradict each other;
- a receipt with all that one average was made of, if another average comes of that;
- a part that a member gave, with its list of what it has computed, if the list says something else.

No proof can be made without the key of the accused member. Nor can it be made of what that member has signed in another
run: a group's name is made of its run, and of bytes that each member has drawn for this round alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated

import msgspec
from hivemind.p2p import PeerID
from msgspec import Meta

from swarm.averaging.audit.given_work import GivenWork, check_signature
from swarm.averaging.audit.judge import MAX_EVIDENCE_BYTES, Commitment, Evidence, Judge, PartBytes, tensor_from
from swarm.averaging.audit.seals import SignedPart
from swarm.averaging.audit.statements import MAX_PARTS, MAX_RECEIPT_BYTES, Hashes, Receipt, StripeName
from swarm.averaging.shares import MAX_STRIPES, stripe_of
from swarm.protocol.messages import MAX_GROUP_SIZE, MAX_TICKET_BYTES, Blame, Group, Ticket
from swarm.protocol.wire import LINEAGE_BYTES, from_wire, to_wire
from swarm.protocol.work import MAX_LIST_BYTES

MAX_PROOF_BYTES = MAX_EVIDENCE_BYTES + 2**19
"""Most bytes of a proof: evidence, and the group as well."""

_Receipt = Annotated[bytes, Meta(max_length=MAX_RECEIPT_BYTES)]
_Member = tuple[Annotated[bytes, Meta(max_length=64)], Annotated[bytes, Meta(max_length=MAX_TICKET_BYTES)]]
_Members = Annotated[list[_Member], Meta(max_length=MAX_GROUP_SIZE)]
_Stripe = Annotated[int, Meta(ge=0, lt=MAX_STRIPES)]
_Index = Annotated[int, Meta(ge=0, lt=MAX_PARTS)]
_KIND = msgspec.msgpack.Decoder(tuple[str, bytes])
_TWO = msgspec.msgpack.Decoder(tuple[_Receipt, _Receipt])
_MADE_UP = msgspec.msgpack.Decoder(
    tuple[StripeName, _Members, _Stripe, _Index, _Receipt, Annotated[bytes, Meta(max_length=MAX_EVIDENCE_BYTES)]]
)
_PeerId = Annotated[bytes, Meta(max_length=64)]
_List = Annotated[bytes, Meta(max_length=MAX_LIST_BYTES)]
_GAVE_OTHER = msgspec.msgpack.Decoder(
    tuple[StripeName, _Members, _Stripe, _Index, _PeerId, _PeerId, Hashes, Commitment, PartBytes, _List]
)


@dataclass(frozen=True)
class Guilt:
    """What a proof proves.

    Args:
        peer: the member that has lied
        what: what it has done
        stripe: name of the stripe in which it has done so
    """

    peer: PeerID
    what: Blame
    stripe: bytes


def short_name(peer: PeerID) -> bytes:
    """The name under which members ask for a proof against a peer, 16 bytes."""
    return hashlib.sha256(peer.to_bytes()).digest()[:LINEAGE_BYTES]


def of_two_receipts(one: Receipt, other: Receipt) -> bytes:
    """Proof that a reducer has told members different things."""
    return to_wire("two receipts", to_wire(one.data, other.data))


def of_a_false_average(group: Group, stripe: int, part_index: int, receipt: Receipt, evidence: bytes) -> bytes:
    """Proof that an average does not come of what its reducer was given.

    Args:
        group: as it was closed
        evidence: as the reducer has shown it
    """
    content = to_wire(group.nonce, _members_of(group), stripe, part_index, receipt.data, evidence)
    return to_wire("a false average", content)


def of_other_work(
    group: Group, stripe: int, part_index: int, reducer: PeerID, given: SignedPart, listed: bytes
) -> bytes:
    """Proof that a member gave something else than it says that it has computed.

    Args:
        group: as it was closed
        reducer: the member that it gave the part to
        listed: its list
    """
    tensor = given.tensor.SerializeToString()
    peers = reducer.to_bytes(), given.sender.to_bytes()
    signed = [*given.hashes], given.commitment, tensor, listed
    return to_wire("other work", to_wire(group.nonce, _members_of(group), stripe, part_index, *peers, *signed))


def _members_of(group: Group) -> list[tuple[bytes, bytes]]:
    return [(peer.to_bytes(), ticket.to_bytes()) for peer, ticket in group.members]


def guilty(proof: bytes, judge: Judge, given_work: GivenWork | None = None) -> Guilt:
    """Check a proof, and tell what it proves. That takes as long as to make one part of an average three times.

    Args:
        given_work: compares what was given with lists; None where members have no lists

    Raises:
        ValueError: it proves nothing
    """
    kind, content = from_wire(_KIND, proof, MAX_PROOF_BYTES)
    if kind == "two receipts":
        one, other = (Receipt.from_bytes(data) for data in from_wire(_TWO, content, MAX_PROOF_BYTES))
        if not one.contradicts(other):
            raise ValueError("two receipts that do not contradict each other")
        return Guilt(one.reducer, Blame.EQUIVOCATED, one.stripe)
    if kind == "other work" and given_work is not None:
        return _guilty_of_other_work(content, judge.run, given_work)
    if kind != "a false average":
        raise ValueError("no proof of a known kind")
    nonce, members, stripe, part_index, signed, evidence = from_wire(_MADE_UP, content, MAX_PROOF_BYTES)
    group = _group_of(nonce, members, judge.run)
    receipt = Receipt.from_bytes(signed)
    if not judge.is_false(group, stripe, part_index, receipt, Evidence.from_bytes(evidence)):
        raise ValueError("an average that an honest reducer can have made")
    return Guilt(receipt.reducer, Blame.MADE_UP_AN_AVERAGE, receipt.stripe)


def _group_of(nonce: bytes, members: list[tuple[bytes, bytes]], run: str) -> Group:
    """The group as it was closed in this run. For a group of another run, it is one that no member has signed for."""
    peer_ids = tuple(PeerID(peer) for peer, _ in members)
    return Group.close(nonce, peer_ids, tuple(Ticket.from_bytes(ticket) for _, ticket in members), run)


def _guilty_of_other_work(content: bytes, run: str, given_work: GivenWork) -> Guilt:
    nonce, members, stripe, part_index, *rest = from_wire(_GAVE_OTHER, content, MAX_PROOF_BYTES)
    reducer, sender, hashes, commitment, tensor, listed = rest
    group, reducer, sender = _group_of(nonce, members, run), PeerID(reducer), PeerID(sender)
    if reducer == sender or not {reducer, sender} <= {*group.peer_ids}:
        raise ValueError("a part of a peer that is not in the group")
    given = SignedPart(sender, hashes, commitment, tensor_from(tensor))
    check_signature(group, reducer, stripe, given)
    parts = given_work.parts(group, reducer, sender)
    part = next((part for part in parts if (part.stripe, part.part_index) == (stripe, part_index)), None)
    if part is None:
        raise ValueError("a part of which no list says anything")
    if not given_work.differs(group, part, given, listed):
        raise ValueError("a part that is what its list says")
    return Guilt(sender, Blame.GAVE_OTHER_WORK, stripe_of(group, 0, stripe).group_id)
