"""One reducer's share of a round with checked averages, without a network: what members sign and the reducer keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPrivateKey

from swarm.averaging.audit.judge import Judge
from swarm.averaging.audit.seals import Seals
from swarm.averaging.audit.statements import Receipt, hash_of, owner_of
from swarm.averaging.compression.codec import CODECS
from swarm.averaging.robust_mean import Combination
from swarm.averaging.shares import partition, stripe_of
from swarm.network.signed_records import peer_of
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.messages import Group, Ticket
from swarm.protocol.wire import LINEAGE_BYTES

SIZE = 60_000
"""Numbers of the vector. In fp16, a third of it has several parts."""
TARGET = BatchTarget(512)


@cache
def key(number: int) -> RSAPrivateKey:
    """Return the key of a peer, made once: that takes a while."""
    return RSAPrivateKey()


@cache
def peer(number: int) -> PeerID:
    return peer_of(owner_of(key(number)))


def group_of(numbers: Sequence[int], samples: int = 100, name: bytes = bytes(LINEAGE_BYTES), **fields) -> Group:
    """Return a closed group of peers that can all be called."""
    ticket = Ticket(3, samples, False, 1.0, bytes(LINEAGE_BYTES), **fields)
    peers = sorted(map(peer, numbers), key=PeerID.to_bytes)
    return Group.close(name, tuple(peers), (ticket,) * len(peers))


@dataclass(frozen=True)
class Share:
    """What one reducer has averaged, signed and kept.

    Args:
        seals: by member
    """

    group: Group
    reducer: PeerID
    seals: dict[PeerID, Seals]

    @property
    def receipt(self) -> Receipt:
        return self.seals[self.reducer].receipts[self.reducer]


def judge_of(codec: str = "fp16", rule: Combination | None = None) -> Judge:
    return Judge(lambda step: SIZE, CODECS[codec](), rule or Combination(clips=True), lambda step: TARGET)


def sealed_share(
    numbers: Sequence[int],
    judge: Judge,
    group: Group | None = None,
    reducer: PeerID | None = None,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda mean: mean,
    gradients: Callable[[int, int], torch.Tensor] | None = None,
    lost: dict[PeerID, int] | None = None,
    make: Callable[[PeerID, Group], Seals] | None = None,
) -> Share:
    """Give the reducer the parts of all members, and let it sign the averages.

    Args:
        change: makes the average that the reducer sends from each mean
        gradients: returns the gradient of the member of that place, with so many numbers
        lost: members that are gone, with the number of parts that each has sent
        make: makes the seals of a member
    """
    group = group or group_of(numbers)
    reducer, lost = reducer or group.peer_ids[0], lost or {}
    stripe, codec = stripe_of(group, 0, 0), judge.codec
    keys = {peer(number): key(number) for number in numbers}
    make = make or (lambda member, stripe: Seals(member, stripe, keys[member]))
    seals = {member: make(member, stripe) for member in group.peer_ids}
    vectors = {member: (gradients or _gradient)(place, SIZE) for place, member in enumerate(group.peer_ids)}
    own, bounded = seals[reducer], group.bounded(judge.target_at(group.step))
    samples = [float(ticket.samples) for ticket in bounded.tickets]
    weights = judge.rule.weights(samples)
    shares = {
        member: partition(vector, group, 1, codec, num_buffers=judge.num_buffers)[reducer]
        for member, vector in vectors.items()
    }
    for index, part in enumerate(shares[reducer]):
        arrived = []
        for place, member in enumerate(group.peer_ids):
            if index >= lost.get(member, len(shares[reducer])):
                continue
            mine = shares[member][index]
            if member == reducer:
                own.given_by_me(mine.numbers)
                arrived.append((mine.numbers, weights[place], samples[place]))
                continue
            tensor = codec.compress(mine.numbers, mine.info)
            seals[member].sent(reducer, mine.offset, tensor)
            own.given(member, hash_of(tensor), tensor)
            arrived.append((codec.extract(tensor), weights[place], samples[place]))
        rule = judge.rule.for_buffers if part.is_of_buffers else judge.rule
        average = codec.compress(change(rule.combine(*zip(*arrived, strict=True)).mean), part.info)
        own.answered(index, average)
        for member in group.peer_ids:
            if member != reducer:
                seals[member].received(reducer, hash_of(average))
    staying = [member for member in group.peer_ids if member not in lost]
    for member in staying:
        if member != reducer:
            own.take_commitment(member, seals[member].commitment(reducer))
    counted = {member: lost.get(member, len(shares[reducer]) + 1) for member in group.peer_ids}
    receipt = own.receipt(counted)
    for member in staying:
        if member != reducer:
            seals[member].check_receipt(reducer, receipt)
    return Share(group, reducer, seals)


def _gradient(place: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    common = torch.randn(size, generator=generator)
    return common + torch.randn(size, generator=generator.manual_seed(100 + place))
