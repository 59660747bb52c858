"""Whether a member has given to be averaged what it says that it has computed.

Its list says what the gradients of its micro-batches were at some places. A reducer has what the member gave at those
places that are in its own share. The list is named in the member's ticket, and the round after all tickets; and the
member has signed for the round what it gave. So if both differ, the reducer can prove it to everybody.
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
"""What a member gave and what its list says may differ by this share of the longer of both. Honest ones differ by a
thousandth in fp16."""
CANCELLED = 1e-3
"""Both may also differ by this share of the micro-batches' numbers at a place, added up without their signs. Where
micro-batches cancel out, rounding is what is left.

A liar can say that they do, in lines that it has made up. These are far larger than others, and so they are computed
again far more often (`WorkAudits`).
"""
SMALLEST = {NoCompression: 1e-12, Float16: 2.0**-20}
"""Size of numbers of which the codec leaves too little: sixteen times its smallest one. Others are coarser yet."""

PlacesOf = Callable[[bytes], Sequence[int]]
"""Of the numbers of the vector that lists are about, by the lineage of the weights; none where nobody has lists."""


@dataclass(frozen=True)
class PartWithPlaces:
    """One of a reducer's parts.

    Args:
        stripe, part_index: its numbers
        size: numbers in it
        places: of a list's places, which are in it, and where: (number of the place, place in the part)
    """

    stripe: int
    part_index: int
    size: int
    places: Sequence[tuple[int, int]]


def is_compared(codec: CompressionBase) -> bool:
    """Whether numbers travel so exactly that what arrives can be held against who sent it."""
    return type(codec) in SMALLEST


def check_signature(group: Group, reducer: PeerID, stripe: int, given: SignedPart) -> None:
    """Raises ValueError: the member has not signed that for this reducer, in this stripe of the round"""
    name = stripe_of(group, 0, stripe).group_id
    check_commitment(given.commitment, given.sender, name, reducer, root_of(given.hashes))


class GivenWork:
    """Compares what a member gave with what it says it has computed; knows no more than every member does.

    Args:
        judge: knows how vectors are divided, and how numbers travel
        places_of: where lists are about
    """

    def __init__(self, judge: Judge, places_of: PlacesOf):
        self._judge, self._places_of = judge, places_of

    def parts(self, group: Group, reducer: PeerID, sender: PeerID) -> list[PartWithPlaces]:
        """A reducer's parts that tell something about this sender; none where the codec is too coarse for that."""
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
        """Whether what a member has given is not what it says that it has computed.

        Args:
            group: as it was closed
            part: one of a reducer's
            given: what the member gave for it, which it has signed
            listed: the member's list

        Raises:
            ValueError: it is not what was signed, it is not its list, or nothing can be said of it
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
        most = largest_number(codec)  # where gradients blow up, all honest members send this one
        total = said.sum(0).clamp(-most, most)
        gap, longer = float((total - sent).norm()), max(float(total.norm()), float(sent.norm()))
        smallest = SMALLEST[type(codec)] * len(part.places) ** 0.5
        return gap > DIFFERENCE * longer + CANCELLED * float(said.abs().sum(0).norm()) + smallest
