"""Judges whether an average can come of what its reducer was given: makes it again, by the same rule, and compares.

The two are not compared bit by bit. Other processors round otherwise, and an honest reducer adds what the codec has
left out of earlier averages, which no other member knows. So an average is false only if it is farther from the true
one than both explain. An honest reducer keeps to half of that (`is_faithful`). A member a little beyond the rule's
reach counts for much less than one a little within it, and rounding decides on which side a member is. So the rule is
applied with a reach that is a little shorter and a little longer as well. An average between the results is not held
against its reducer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Annotated

import msgspec
import torch
from hivemind.compression import CompressionBase, CompressionInfo
from hivemind.p2p import PeerID
from hivemind.proto import runtime_pb2
from hivemind.utils import TensorDescriptor
from msgspec import Meta

from swarm.averaging.audit.seals import RAW
from swarm.averaging.audit.statements import (
    HASH_BYTES,
    MAX_COMMITMENT_BYTES,
    Hashes,
    Receipt,
    check_commitment,
    hash_of,
    root_of,
)
from swarm.averaging.compression.codec import Codec
from swarm.averaging.compression.top_k import ChunkedTopK
from swarm.averaging.robust_mean import Combination, norm
from swarm.averaging.shares import Part, count_stripes, decode, partition, stripe_of, stripes_of
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.messages import MAX_GROUP_SIZE, Group
from swarm.protocol.wire import from_wire

AVERAGE_TOLERANCE = 1 / 16
"""Share of the true average's length by which an average may be away from it."""
LEFT_OUT = 4.0
"""An average may be farther away by so many times what the codec leaves out of the true one."""
HONEST_SHARE = 0.5
"""Share of both bounds that an honest reducer keeps to."""
NEAR_REACH = 1e-3
"""Relative to the rule's reach: a member that is so near to it may be on either side."""
ROUNDING = 1e-4
"""Share of the usual length of what members gave, by which an average may be farther away still. Where that cancels
out, two processors differ by far less."""
MAX_EVIDENCE_BYTES = 2**24
"""Most bytes of the evidence of one part: this part of all members, and hashes of all their other parts."""

PartBytes = Annotated[bytes, Meta(max_length=2**23)]
Commitment = Annotated[bytes, Meta(max_length=MAX_COMMITMENT_BYTES)]
_Input = tuple[Hashes, Commitment, PartBytes]
_EVIDENCE = msgspec.msgpack.Decoder(tuple[Hashes, PartBytes, Annotated[list[_Input], Meta(max_length=MAX_GROUP_SIZE)]])


class OtherOrders(ValueError):  # noqa: N818 (reads as what it says)
    """The round followed other orders of the organiser than those that are known here, so it cannot be judged."""


def can_be_judged(codec: CompressionBase) -> bool:
    """Whether averages in this codec can be judged: not if it leaves most of one out, and adds that to later ones."""
    return not isinstance(codec, ChunkedTopK)


def is_faithful(average: torch.Tensor, mean: torch.Tensor, codec: CompressionBase, info: CompressionInfo) -> bool:
    """Whether an honest reducer may send an average, shape [n], for the mean that it has found."""
    return not can_be_judged(codec) or _excess(average, mean, codec, info, HONEST_SHARE) <= 0


def _excess(
    average: torch.Tensor, mean: torch.Tensor, codec: CompressionBase, info: CompressionInfo, share: float = 1.0
) -> float:
    """By how much an average is farther from the mean than it may be; at most 0 if it is not.

    Args:
        share: share of the allowed distance
    """
    gap, allowed = norm(average - mean), share * AVERAGE_TOLERANCE * norm(mean)
    if gap > allowed:  # else what the codec leaves out need not be known
        allowed += share * LEFT_OUT * norm(codec.extract(codec.compress(mean, info)) - mean)
    return gap - allowed


@dataclass(frozen=True)
class Evidence:
    """What one average was made of, as its reducer shows it; it counts only if it fits the receipt.

    Args:
        averages: hashes of all averages of this share
        average: the encoded one
        inputs: for each member, the hashes of all that counted, its commitment, and the encoded part; empty if it gave
            none
    """

    averages: Sequence[bytes]
    average: runtime_pb2.Tensor
    inputs: Sequence[tuple[Sequence[bytes], bytes, runtime_pb2.Tensor | None]]

    @classmethod
    def from_bytes(cls, data: bytes) -> Evidence:
        """Read evidence.

        Raises:
            ValueError: it is malformed
        """
        averages, average, inputs = from_wire(_EVIDENCE, data, MAX_EVIDENCE_BYTES)
        return cls(
            averages,
            tensor_from(average),
            [(hashes, commitment, tensor_from(part) if part else None) for hashes, commitment, part in inputs],
        )


def tensor_from(data: bytes) -> runtime_pb2.Tensor:
    """Read an encoded part.

    Raises:
        ValueError: it cannot be read
    """
    try:
        return runtime_pb2.Tensor.FromString(data)
    except Exception as error:  # another peer's bytes can be anything
        raise ValueError("a part that cannot be read") from error


@dataclass(frozen=True)
class StripeParts:
    """What a reducer averages in one stripe.

    Args:
        stripe: its number
        offset: where in the vector it begins
        parts: the parts of the reducer's share, in their order
    """

    stripe: int
    offset: int
    parts: list[Part]


@dataclass(frozen=True)
class Judge:
    """What a peer has to know to make an average again; equal on all members of a run.

    Args:
        size_at: how many numbers are averaged, by step
        codec: how they travel
        rule: how they are combined
        target_at: the target, which bounds what a member counts for, by step
        orders_at: name of the organiser's orders that count, by step
        auto: whether codec and local steps are those of a round's group; then `target_at` is that of one local step
        num_buffers: numbers at the end of what is averaged that are buffers of the model
        run: namespace of the run, which is part of its groups' names: nothing of another run is judged
    """

    size_at: Callable[[int], int]
    codec: CompressionBase
    rule: Combination
    target_at: Callable[[int], BatchTarget]
    orders_at: Callable[[int], bytes] = lambda step: b""
    auto: bool = False
    num_buffers: int = 0
    run: str = ""

    def of(self, group: Group) -> Judge:
        """The judge of the averages of this group."""
        if not self.auto:
            return self
        mode, target_at = group.mode, self.target_at
        return replace(
            self,
            codec=Codec(mode.codec).make(),
            rule=replace(self.rule, local_steps=mode.local_steps),
            target_at=lambda step: target_at(step).in_mode(mode.local_steps),
            auto=False,
        )

    def bytes_given(self, group: Group) -> float:
        """Bytes that a reducer of this group gets from all members together, if shares are equal.

        With the largest share it is less than twice that. Equal shares are assumed, so that no member's claim about its
        line decides whether there are audits.
        """
        size = self.size_at(group.step)
        info = CompressionInfo(None, TensorDescriptor((size,), torch.float32))
        num_bytes = size * torch.float32.itemsize * self.codec.estimate_compression_ratio(info)
        num_reducers = sum(not ticket.client_mode for ticket in group.tickets)
        return sum(ticket.samples > 0 for ticket in group.tickets) * num_bytes / max(1, num_reducers)

    def evidence_bytes(self, group: Group, reducer: PeerID, stripe: int) -> float:
        """Most bytes of the evidence of one part of a reducer's share; all members of the group find the same.

        Evidence of more than `MAX_EVIDENCE_BYTES` is not asked for, since no member takes it: its reducer is honest.
        Only groups of more than a hundred members with samples and few reducers have such parts.

        Args:
            group: as it was closed
            stripe: number of the stripe
        """
        judge = self.of(group)
        parts = judge._parts_of(group, reducer, stripe)
        if not parts:
            return 0.0
        raw_bytes = torch.float32.itemsize * max(len(part.numbers) for part in parts)
        encoded_bytes = raw_bytes * judge.codec.estimate_compression_ratio(parts[0].info)
        # A hash takes two more bytes on the wire. The room for a commitment is four times what an honest one takes.
        with_hashes = encoded_bytes + len(parts) * (HASH_BYTES + 2) + MAX_COMMITMENT_BYTES
        num_encoded = 1 + sum(ticket.samples > 0 for ticket in group.tickets)  # the average, too
        return num_encoded * with_hashes + raw_bytes  # the reducer has not encoded its own part

    def is_false(self, group: Group, stripe: int, part_index: int, receipt: Receipt, evidence: Evidence) -> bool:
        """Whether no honest reducer makes this average of what the evidence shows that it was given.

        Args:
            group: as it was closed
            stripe: number of the stripe that the receipt is about

        Raises:
            OtherOrders: an order has come too late for this round, and what members counted for in it is not known here
            ValueError: the evidence is not what the receipt is about
        """
        if not group.tickets or stripe_of(group, 0, stripe).group_id != receipt.stripe:
            raise ValueError("a receipt of another round")
        if self.auto:
            return self.of(group).is_false(group, stripe, part_index, receipt, evidence)
        if group.tickets[0].orders != self.orders_at(group.step):
            raise OtherOrders("a round that followed other orders")
        group = group.bounded(self.target_at(group.step))
        parts, num_members = self._parts_of(group, receipt.reducer, stripe), len(group.peer_ids)
        if (
            not 0 <= part_index < len(parts)
            or num_members != len(receipt.counted)
            or num_members != len(evidence.inputs)
        ):
            raise ValueError("evidence of another share")
        if len(evidence.averages) != len(parts) or root_of(evidence.averages) != receipt.averages:
            raise ValueError("other averages than those that were signed")
        if hash_of(evidence.average) != evidence.averages[part_index]:
            raise ValueError("another average than the one that was signed")
        part = parts[part_index]
        given, weights, samples = self._inputs(group, part_index, part, receipt, evidence)
        average = decode(evidence.average, self.codec, len(part.numbers))
        if average is None or average.shape != part.numbers.shape:
            raise ValueError("an average that no member takes")  # members that got it have refused it
        return not given or self._is_far_from(average, part, given, weights, samples)

    def check_commitments(self, group: Group, receipt: Receipt, evidence: Evidence) -> None:
        """Check the commitments that the receipt says members have sent.

        Raises:
            ValueError: the reducer does not show one of them
        """
        for peer, counted, (_, commitment, _) in zip(group.peer_ids, receipt.counted, evidence.inputs, strict=True):
            if counted.is_signed and peer != receipt.reducer:
                check_commitment(commitment, peer, receipt.stripe, receipt.reducer, counted.root)

    def stripes_of(self, group: Group, reducer: PeerID) -> list[StripeParts]:
        """The share of a reducer, stripe by stripe."""
        size = self.size_at(group.step)
        vector = torch.empty(size)  # never written, and so it takes no memory
        stripes = count_stripes(group, vector, self.codec)
        found = []
        for stripe, stretch in enumerate(stripes_of(size, self.num_buffers, stripes)):
            numbers = vector[stretch.begin : stretch.end]
            parts = partition(numbers, group, stripes, self.codec, num_buffers=stretch.num_buffers)
            found.append(StripeParts(stripe, stretch.begin, parts.get(reducer, [])))
        return found

    def _parts_of(self, group: Group, reducer: PeerID, stripe: int) -> list[Part]:
        stripes = self.stripes_of(group, reducer)
        return stripes[stripe].parts if stripe < len(stripes) else []

    def _inputs(
        self, group: Group, part_index: int, part: Part, receipt: Receipt, evidence: Evidence
    ) -> tuple[list[torch.Tensor], list[float], list[float]]:
        """The numbers, weights and samples of all members that have given this part."""
        claimed = [float(ticket.samples) for ticket in group.tickets]
        weights = self.rule.weights(claimed)
        given = []
        members = zip(group.peer_ids, weights, claimed, receipt.counted, evidence.inputs, strict=True)
        for peer, weight, samples, counted, (hashes, _, tensor) in members:
            if not weight or counted.num_parts <= part_index:
                continue
            if len(hashes) != counted.num_parts or root_of(hashes) != counted.root:
                raise ValueError("other parts than those that were signed")
            if tensor is None or hash_of(tensor) != hashes[part_index]:
                raise ValueError("another part than the one that was signed")
            numbers = decode(tensor, RAW if peer == receipt.reducer else self.codec, len(part.numbers))
            if numbers is None or numbers.shape != part.numbers.shape:
                raise ValueError("a part that no reducer takes")
            given.append((numbers, weight, samples))
        return tuple(map(list, zip(*given, strict=True))) if given else ([], [], [])

    def _is_far_from(
        self,
        average: torch.Tensor,
        part: Part,
        given: Sequence[torch.Tensor],
        weights: Sequence[float],
        samples: Sequence[float],
    ) -> bool:
        rule = self.rule.for_buffers if part.is_of_buffers else self.rule
        reaches = [rule.reach * (1 + change) for change in (-NEAR_REACH, 0.0, NEAR_REACH)]
        means = [replace(rule, reach=reach).combine(given, weights, samples).mean for reach in reaches]
        rounding = ROUNDING * statistics.median(map(norm, given))
        nearest = [_nearest_between(one, other, average) for one, other in combinations(means, 2)]
        return min(_excess(average, mean, self.codec, part.info) for mean in nearest) > rounding


def _nearest_between(one: torch.Tensor, other: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
    """The point nearest to an average, on the straight line from one mean to another."""
    way = other - one
    length = norm(way)
    if not length:
        return one
    along = torch.dot((average - one).double(), way.double()) / length**2
    return one + way * along.clamp(0, 1).float()
