"""Divides a vector into shares of reducers, stripes and parts, and combines the parts that a reducer receives."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from hivemind.compression import CompressionBase, CompressionInfo
from hivemind.p2p import PeerID
from hivemind.proto import runtime_pb2
from hivemind.utils import TensorDescriptor

from swarm.averaging.lines.division import shares_of
from swarm.averaging.robust_mean import Combination, Combined
from swarm.protocol.messages import ExchangeBroken, Group
from swarm.protocol.wire import LINEAGE_BYTES

STRIPE_BYTES = 2**18
"""Bytes of a share for each stream that carries it."""
MAX_STRIPES = 8
"""Most streams of one member to all reducers together, unless there are more reducers."""
MIN_PART_BYTES = 2**14
"""Fewest bytes of one part, however many streams share the line."""
BURST_BYTES = 2**19
"""Bytes of one part of every stream together, if the slowest line carries `ASSUMED_KBPS`."""
ASSUMED_KBPS = 10_000
"""What a line that has not been measured, or is slower, is taken to carry."""
MAX_PART_BYTES = 3 * 2**16
"""Most bytes of one part over faster lines: a new stream lets them through at once."""
MAX_SHOWN_BYTES = 2**23
"""Most bytes of one part of all members over faster lines: what an average was made of is shown in one answer."""
LEAST_PARTS = 4
"""Fewest parts of a share, over all its stripes: averages come back while later parts are on their way."""
MAX_PART_NUMBERS = 2**20
"""Most numbers in one part of every stream together: a reducer holds some parts of each member, decoded."""
LARGEST_NUMBER = 1e24
"""Largest magnitude of a number; no gradient has a larger one. Times the samples of a whole group it still fits into
fp32, so no sum can overflow."""


def is_sound(part: torch.Tensor) -> bool:
    """Whether all numbers are finite and of a size that gradients and weights can have."""
    return bool((part.abs() <= LARGEST_NUMBER).all())  # also false for NaN


def decode(tensor: runtime_pb2.Tensor, codec: CompressionBase, most: int) -> torch.Tensor | None:
    """The numbers in a part that another peer has sent, shape [n], fp32; None if no honest peer sends them.

    A seal, and a part of a shape that no part has, give no numbers: shape [0].

    Args:
        most: numbers that a part can have; a larger part is not decoded
    """
    if tensor.dtype != "float32":  # Hivemind takes it for a numpy type, of which there are huge ones
        return None
    shape = tensor.size  # some codecs make many numbers of a few bytes
    if len(shape) != 1 or not 0 < shape[0] <= most:
        return torch.empty(0)
    try:
        numbers = codec.extract(tensor).detach()
    except Exception:  # another peer's bytes can be anything
        return None
    return numbers if is_sound(numbers) else None


def count_stripes(group: Group, vector: torch.Tensor, codec: CompressionBase) -> int:
    """How many streams carry a member's share of `vector`, shape [n]: one for each 256 KiB, at most 8 to all reducers.

    With more, the first parts of all members would reach a reducer at once and overflow the queue before its line.
    """
    reducers = sum(share > 0 for share in shares_of(group).values())
    ratio = codec.estimate_compression_ratio(CompressionInfo.from_tensor(vector))
    share_bytes = vector.numel() * vector.element_size() * ratio / max(1, reducers)
    return max(1, min(MAX_STRIPES // max(1, reducers - 1), int(share_bytes // STRIPE_BYTES)))


def stripe_of(group: Group, turn: int, stripe: int) -> Group:
    """The same group under the name by which this stripe's streams ask for it.

    Args:
        turn: number of the average in the round, of which PowerSGD makes two
        stripe: number of the stripe in that average
    """
    name = hashlib.sha256(group.group_id + bytes([turn, stripe])).digest()
    return replace(group, group_id=name[:LINEAGE_BYTES])


def part_size_bytes(stripe_bytes: int, num_reducers: int, stripes: int, num_members: int, line_kbps: int) -> int:
    """Size of a part, in bytes.

    The streams share a line, on which records and answers have to get through between their parts. So one part of every
    stream takes less than half a second together. Fast lines carry larger parts in this time: fewer messages, which is
    less work for processors. A member that claims a slow line cannot make parts smaller than they are for 10 Mbit/s.

    Args:
        line_kbps: what the slowest member's line carries; 0: not known
    """
    streams = _streams(num_reducers, stripes)
    over_assumed_line = BURST_BYTES // streams
    over_known_line = BURST_BYTES * line_kbps // ASSUMED_KBPS // streams
    most = max(over_assumed_line, min(over_known_line, MAX_PART_BYTES, MAX_SHOWN_BYTES // num_members))
    least_parts = max(2, LEAST_PARTS // stripes)
    return max(MIN_PART_BYTES, min(most, stripe_bytes // (least_parts * max(1, num_reducers))))


def _streams(num_reducers: int, stripes: int) -> int:
    """Number of streams on which a member sends its parts."""
    return stripes * max(1, num_reducers - 1)


@dataclass(frozen=True)
class Part:
    """Numbers that travel in one message.

    Args:
        numbers: shape [n], fp32, a view of the vector
        offset: place of the first of them in the vector
        info: what Hivemind's codecs want to know of the vector
        is_of_buffers: whether they are buffers of the model, and not what training adds up
    """

    numbers: torch.Tensor
    offset: int
    info: CompressionInfo
    is_of_buffers: bool = False

    @property
    def is_seal(self) -> bool:
        """Whether it carries a statement in the place of numbers (`swarm.averaging.audit.seals`)."""
        return not len(self.numbers)


@dataclass(frozen=True)
class Stripe:
    """A stretch of a vector that travels over streams of its own.

    Args:
        begin: place of its first number
        end: the place after its last number
        num_buffers: numbers at its end that are buffers of the model
    """

    begin: int
    end: int
    num_buffers: int


def stripes_of(size: int, num_buffers: int, stripes: int) -> list[Stripe]:
    """The stretches of a vector of `size` numbers that travel side by side; the buffers are at its end."""
    bounds = pairwise(size * stripe // stripes for stripe in range(stripes + 1))
    return [Stripe(begin, end, min(end - begin, max(0, end - (size - num_buffers)))) for begin, end in bounds]


def partition(
    vector: torch.Tensor,
    group: Group,
    stripes: int,
    codec: CompressionBase,
    is_sealed: bool = False,
    num_buffers: int = 0,
) -> dict[PeerID, list[Part]]:
    """Each reducer's parts of a vector, shape [n]; all members divide it alike, by what all of them know.

    Args:
        group: its tickets give each reducer its share, give or take one number; some reducers may have nothing
        stripes: how many such vectors travel side by side
        is_sealed: whether a seal follows the parts of each share
        num_buffers: numbers at the vector's end that are buffers of the model; they travel in parts of their own
    """
    shares = shares_of(group)
    # Not `CompressionInfo.from_tensor`, which asks the GPU's driver each time whether this memory is pinned.
    info = CompressionInfo(None, TensorDescriptor(tuple(vector.shape), vector.dtype))
    ratio = codec.estimate_compression_ratio(info)
    reducers, whole = sum(share > 0 for share in shares.values()), max(1, sum(shares.values()))
    line_kbps = min(ticket.line_kbps for ticket in group.tickets)
    part_bytes = part_size_bytes(int(vector.nbytes * ratio), reducers, stripes, len(group.peer_ids), line_kbps)
    part_numbers = max(1, int(part_bytes / (vector.element_size() * ratio)))
    part_numbers = min(part_numbers, MAX_PART_NUMBERS // _streams(reducers, stripes))
    found: dict[PeerID, list[Part]] = {}
    bounds = pairwise(len(vector) * before // whole for before in accumulate(shares.values(), initial=0))
    buffers_begin = len(vector) - num_buffers
    for reducer, (begin, end) in zip(shares, bounds, strict=True):
        middle = min(max(begin, buffers_begin), end)
        found[reducer] = []
        for first, last, is_of_buffers in ((begin, middle, False), (middle, end, True)):
            for offset in range(first, last, part_numbers):
                numbers = vector.detach()[offset : min(offset + part_numbers, last)]
                found[reducer].append(Part(numbers, offset, info, is_of_buffers))
        if is_sealed and found[reducer]:
            found[reducer].append(Part(vector.detach()[end:end], end, info))
    return found


class PartReducer:
    """Combines one part of all members into their mean, part after part of one share.

    A member's parts are given in their order, the next one when the mean of the last is there. So one part of each
    member is kept at a time. They are combined when all are there, in the order of the members: the result depends on
    nothing but what was given.

    Args:
        rules: how each part is combined
        senders: members that have to give their parts, in the order of the group
        samples: samples that each sender has computed, if they differ from its weight
    """

    def __init__(
        self,
        rules: Sequence[Combination],
        senders: Sequence[PeerID],
        samples: Mapping[PeerID, float] | None = None,
    ):
        self._rules, self._samples = rules, samples or {}
        self._order, self._senders = tuple(senders), set(senders)
        self._given: dict[PeerID, tuple[torch.Tensor, float]] = {}
        """What each member has given of the present part, and its weight."""
        self._index, self._is_combining = -1, False
        self._mean: asyncio.Future[torch.Tensor] = asyncio.get_running_loop().create_future()
        self.last_to_give: list[PeerID | None] = []
        """For each part, the member that gave it last; None if the wait ended with the loss of a member."""
        self.parts_combined = 0
        self.counted: Counter[PeerID] = Counter()
        """How many parts each sender has given."""
        self.outside: Counter[PeerID] = Counter()
        """In how many combined parts each member was far from the others."""
        self._begin_next()

    @property
    def is_finished(self) -> bool:
        """Whether all means are there, or are not needed any more."""
        return self._index >= len(self._rules)

    async def mean_with(self, sender: PeerID, part: torch.Tensor, weight: float) -> torch.Tensor:
        """Give one member's part, of those that are awaited now; returns the mean once all members have given theirs.

        Args:
            part: shape [size of this part], fp32

        Raises:
            ExchangeBroken: this member was given up, or has given this part already, or all means are there
        """
        if self.is_finished or sender not in self._senders or sender in self._given or self._is_combining:
            raise ExchangeBroken("this part is not awaited")
        self._given[sender] = part, weight
        self.counted[sender] += 1
        mean = self._mean
        self._combine_if_complete(sender)
        return await asyncio.shield(mean)  # many wait for it: a cancelled waiter must not cancel it

    def awaited_from(self, sender: PeerID) -> int | None:
        """Number of the part that is awaited now, if it is missing from this member: all later parts wait for it."""
        is_missing = not self.is_finished and not self._is_combining and sender in self._senders - self._given.keys()
        return self._index if is_missing else None

    def lose(self, sender: PeerID) -> None:
        """Stop waiting for what this member has not given yet."""
        self._senders.discard(sender)
        self._combine_if_complete()

    def close(self) -> None:
        """End it: the remaining means are not needed."""
        self._index, self._given = len(self._rules), {}
        self._mean.cancel()

    def _combine_if_complete(self, last: PeerID | None = None) -> None:
        if self.is_finished or self._is_combining or not self._given or not self._senders <= self._given.keys():
            return
        counting = [peer for peer in self._order if peer in self._given and self._given[peer][1]]
        if not counting:  # no member that is left has computed anything: there is no mean
            return self.close()
        parts, weights = zip(*(self._given[peer] for peer in counting), strict=True)
        samples = [self._samples.get(peer, weight) for peer, weight in zip(counting, weights, strict=True)]
        self._is_combining = True
        self.last_to_give.append(last)
        combine = self._rules[self._index].combine
        combining = asyncio.get_running_loop().run_in_executor(None, combine, parts, weights, samples)
        combining.add_done_callback(lambda done: self._take(done, counting))

    def _take(self, done: asyncio.Future[Combined], counting: Sequence[PeerID]) -> None:
        """Give out the mean of a part that was combined, and go on to the next part."""
        self._is_combining = False
        if self.is_finished or done.cancelled():
            return
        if error := done.exception():
            self._mean.set_exception(error)
            return self.close()
        combined = done.result()
        self.parts_combined += bool(len(combined.mean))  # a seal is no part
        self.outside.update(counting[position] for position in combined.outside)
        self._mean.set_result(combined.mean)
        self._begin_next()

    def _begin_next(self) -> None:
        self._index, self._given = self._index + 1, {}
        if not self.is_finished:
            self._mean = asyncio.get_running_loop().create_future()
