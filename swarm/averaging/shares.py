"""Who averages which numbers of a vector, in which parts they travel, and what becomes of these parts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from hivemind.compression import CompressionBase, CompressionInfo
from hivemind.p2p import PeerID
from hivemind.utils import TensorDescriptor

from swarm.averaging.robust_mean import Combination, Combined
from swarm.protocol.messages import ExchangeBroken

MIN_PART_BYTES, MAX_PART_BYTES = 2**14, 2**19
MAX_PART_NUMBERS = 2**20
"""Of one part of every stream together: a reducer holds some parts of each member, decoded."""


def part_size_bytes(total_bytes: int, num_reducers: int, stripes: int) -> int:
    """Size of a part, in bytes: small vectors are still spread over all reducers.

    One part of every stream is 512 KiB together. They share a line, on which a record or an answer has to get through
    between them: at 10 Mbit/s that is less than half a second.
    """
    most = MAX_PART_BYTES // _streams(num_reducers, stripes)
    return max(MIN_PART_BYTES, min(most, total_bytes // (4 * max(1, num_reducers))))


def _streams(num_reducers: int, stripes: int) -> int:
    """That a member sends its parts on."""
    return stripes * max(1, num_reducers - 1)


@dataclass(frozen=True)
class Part:
    """Numbers that travel in one message.

    Args:
        numbers: shape [n], fp32, a view of the vector
        offset: of the first of them in the vector
        info: what Hivemind's codecs want to know of the vector
    """

    numbers: torch.Tensor
    offset: int
    info: CompressionInfo


def partition(
    vector: torch.Tensor, reducers: Sequence[PeerID], stripes: int, codec: CompressionBase
) -> dict[PeerID, list[Part]]:
    """Each reducer's parts of a vector, shape [n]; all members divide alike, by what all know.

    Args:
        reducers: who averages a share, as many numbers each, give or take one
        stripes: how many such vectors travel side by side
    """
    # Not `CompressionInfo.from_tensor`, which asks the GPU's driver each time whether this memory is pinned.
    info = CompressionInfo(None, TensorDescriptor(tuple(vector.shape), vector.dtype))
    ratio = codec.estimate_compression_ratio(info)
    part_bytes = part_size_bytes(int(vector.nbytes * ratio), len(reducers), stripes)
    part_numbers = max(1, int(part_bytes / (vector.element_size() * ratio)))
    part_numbers = min(part_numbers, MAX_PART_NUMBERS // _streams(len(reducers), stripes))
    found: dict[PeerID, list[Part]] = {}
    for index, reducer in enumerate(reducers):
        begin = len(vector) * index // len(reducers)
        end = len(vector) * (index + 1) // len(reducers)
        found[reducer] = []
        for offset in range(begin, end, part_numbers):
            numbers = vector.detach()[offset : min(offset + part_numbers, end)]
            found[reducer].append(Part(numbers, offset, info))
    return found


class PartReducer:
    """Makes one part of those of all members, part after part of one share.

    A member sends its parts in their order, and gives the next one when it has the mean of the last. So one part of
    each member is kept at a time. They are combined when all are there, in the order of the members: what comes out
    depends on nothing but what went in.

    Args:
        part_sizes: how many numbers each part has
        senders: whose parts are awaited
        rule: how they are combined
        samples: that each sender has computed, if that is not its weight
    """

    def __init__(
        self,
        part_sizes: Sequence[int],
        senders: Sequence[PeerID],
        rule: Combination,
        samples: Mapping[PeerID, float] | None = None,
    ):
        self.part_sizes, self._rule, self._samples = part_sizes, rule, samples or {}
        self._order, self._senders = tuple(senders), set(senders)
        self._given: dict[PeerID, tuple[torch.Tensor, float]] = {}
        """Of the present part: what each has given, and its weight."""
        self._index, self._is_combining = -1, False
        self._mean: asyncio.Future[torch.Tensor] = asyncio.get_running_loop().create_future()
        self.parts_combined = 0
        self.outside: Counter[PeerID] = Counter()
        """In how many of these parts a member was far from the others."""
        self._begin_next()

    @property
    def is_finished(self) -> bool:
        """All means are there, or nobody needs them any more."""
        return self._index >= len(self.part_sizes)

    async def mean_with(self, sender: PeerID, part: torch.Tensor, weight: float) -> torch.Tensor:
        """Give a member's part of those that are awaited now; the mean, once everybody's is there.

        Args:
            part: shape [size of this part], fp32

        Raises:
            ExchangeBroken: this member has been given up, has given this part already, or all is over
        """
        if self.is_finished or sender not in self._senders or sender in self._given or self._is_combining:
            raise ExchangeBroken("this part is not awaited")
        self._given[sender] = part, weight
        mean = self._mean
        self._combine_if_complete()
        return await asyncio.shield(mean)  # many wait for it: who hangs up takes it from nobody

    def awaited_from(self, sender: PeerID) -> int | None:
        """Number of the part that is awaited now, if this member's is missing: what follows waits for it."""
        is_missing = not self.is_finished and not self._is_combining and sender in self._senders - self._given.keys()
        return self._index if is_missing else None

    def lose(self, sender: PeerID) -> None:
        """What this member has not given yet is not waited for."""
        self._senders.discard(sender)
        self._combine_if_complete()

    def close(self) -> None:
        """Nobody needs the rest."""
        self._index, self._given = len(self.part_sizes), {}
        self._mean.cancel()

    def _combine_if_complete(self) -> None:
        if self.is_finished or self._is_combining or not self._given or not self._senders <= self._given.keys():
            return
        counting = [peer for peer in self._order if peer in self._given and self._given[peer][1]]
        if not counting:  # none of those who are left has computed anything: there is no mean
            return self.close()
        parts, weights = zip(*(self._given[peer] for peer in counting), strict=True)
        samples = [self._samples.get(peer, weight) for peer, weight in zip(counting, weights, strict=True)]
        self._is_combining = True
        combining = asyncio.get_running_loop().run_in_executor(None, self._rule.combine, parts, weights, samples)
        combining.add_done_callback(lambda done: self._take(done, counting))

    def _take(self, done: asyncio.Future[Combined], counting: Sequence[PeerID]) -> None:
        """A part has been combined."""
        self._is_combining = False
        if self.is_finished or done.cancelled():
            return
        if error := done.exception():
            self._mean.set_exception(error)
            return self.close()
        combined = done.result()
        self.parts_combined += 1
        self.outside.update(counting[position] for position in combined.outside)
        self._mean.set_result(combined.mean)
        self._begin_next()

    def _begin_next(self) -> None:
        self._index, self._given = self._index + 1, {}
        if not self.is_finished:
            self._mean = asyncio.get_running_loop().create_future()
