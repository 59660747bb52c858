"""Compares what a member has given to be averaged with what it says that it has computed.

A member's list says what the gradients of its micro-batches were at some places. A reducer has what the member gave at
those places that are in its own share. The list is named in the member's ticket, and the round after all tickets; and
the member has signed for the round what it gave. So if both differ, the reducer can prove it to all members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hivemind.compression import CompressionBase, NoCompression
from hivemind.p2p import PeerID

from swarm.averaging.audit.judge import Judge
from swarm.averaging.audit.seals import SignedPart
from swarm.averaging.audit.statements import check_commitment, hash_of, root_of
from swarm.averaging.compression.codec import largest_number
from swarm.averaging.compression.float16 import Float16
from swarm.averaging.shares import decode, stripe_of
from swarm.protocol.messages import Group
from swarm.protocol.work import WorkList

DIFFERENCE = 1 / 4
"""What a member gave and what its list says may differ by this share of the longer of both. Honest members' differ by a
thousandth in fp16."""
CANCELLED = 1e-3
"""Both may also differ by this share of the micro-batches' numbers at a place, added up without their signs. Where
micro-batches cancel out, rounding is what is left.

A liar can claim that they do, in lines that it has made up. Such lines are far larger than others, so they are computed
again far more often (`WorkAudits`).
"""
SMALLEST = {NoCompression: 1e-12, Float16: 2.0**-20}
"""Size of numbers of which a codec leaves too little to compare: in fp16, sixteen times its smallest one. Other codecs
are coarser yet."""

PlacesOf = Callable[[bytes], Sequence[int]]
"""Places in the vector that lists are about, by the lineage of the weights; none where members have no lists."""


@dataclass(frozen=True)
class PartWithPlaces:
    """A part of a reducer that contains some of a list's places.

    Args:
        stripe, part_index: numbers of its stripe, and of the part in it
        size: how many numbers it has
        places: the list's places that are in it: (number of the place, place in the part)
    """

    stripe: int
    part_index: int
    size: int
    places: Sequence[tuple[int, int]]


def is_compared(codec: CompressionBase) -> bool:
    """Whether numbers travel so exactly that what arrives can be held against its sender."""
    return type(codec) in SMALLEST


def check_signature(group: Group, reducer: PeerID, stripe: int, given: SignedPart) -> None:
    """Check that a member has signed what it gave.

    Raises:
        ValueError: it has not signed that for this reducer, in this stripe of the round
    """
    name = stripe_of(group, 0, stripe).group_id
    check_commitment(given.commitment, given.sender, name, reducer, root_of(given.hashes))


class GivenWork:
    """Compares what a member gave with what it says it has computed, with no more knowledge than every member has.

    Args:
        judge: knows how vectors are divided, and how numbers travel
        places_of: tells which places lists are about
    """

    def __init__(self, judge: Judge, places_of: PlacesOf):
        self._judge, self._places_of = judge, places_of

    def parts(self, group: Group, reducer: PeerID, sender: PeerID) -> list[PartWithPlaces]:
        """A reducer's parts that contain places of this sender's list; none if the codec is too coarse to compare."""
        judge = self._judge.of(group)
        if not is_compared(judge.codec):
            return []
        places = self._places_of(group.ticket_of(sender).lineage)
        found = []
        for share in judge.stripes_of(group, reducer):
            for part_index, part in enumerate(share.parts):
                begin = share.offset + part.offset
                inside = [
                    (number, place - begin)
                    for number, place in enumerate(places)
                    if begin <= place < begin + len(part.numbers)
                ]
                if inside:
                    found.append(PartWithPlaces(share.stripe, part_index, len(part.numbers), inside))
        return found

    def differs(self, group: Group, part: PartWithPlaces, given: SignedPart, listed: bytes) -> bool:
        """Whether a member has given something else than what it says that it has computed.

        Args:
            group: as it was closed
            part: a part of a reducer
            given: what the member gave for it, which it has signed
            listed: the member's list

        Raises:
            ValueError: `given` is not what was signed, `listed` is not the member's list, or they cannot be compared
        """
        if part.part_index >= len(given.hashes) or hash_of(given.tensor) != given.hashes[part.part_index]:
            raise ValueError("another part than the one that was signed")
        ticket = group.ticket_of(given.sender)
        work = WorkList.from_bytes(listed, ticket.work, ticket.samples)
        if work.num_before:
            raise ValueError("a list of two versions of the weights, which have other places")
        codec = self._judge.of(group).codec
        numbers = decode(given.tensor, codec, part.size)
        if numbers is None or numbers.shape != (part.size,):
            raise ValueError("a part that no reducer takes")
        said = torch.tensor([line.numbers for line in work.lines], dtype=torch.float64) / work.samples
        chosen = torch.tensor([number for number, _ in part.places])
        said, sent = said[:, chosen], numbers[[place for _, place in part.places]].double()
        most = largest_number(codec)  # where gradients blow up, all honest members send this number
        total = said.sum(0).clamp(-most, most)
        gap, longer = float((total - sent).norm()), max(float(total.norm()), float(sent.norm()))
        smallest = SMALLEST[type(codec)] * len(part.places) ** 0.5
        return gap > DIFFERENCE * longer + CANCELLED * float(said.abs().sum(0).norm()) + smallest
