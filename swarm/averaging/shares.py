"""Who averages which numbers of a vector, in which parts they travel, and the means of these parts."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from hivemind.compression import CompressionBase, CompressionInfo
from hivemind.p2p import PeerID
from hivemind.utils import TensorDescriptor

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
    """Averages the parts of one share.

    A member sends its parts in their order, and gives the next one when it has the mean of the last. So one part is
    summed up at a time, and no more memory than that is needed.

    Args:
        part_sizes: how many numbers each part has
        senders: whose parts are awaited
    """

    def __init__(self, part_sizes: Sequence[int], senders: Collection[PeerID]):
        self.part_sizes = part_sizes
        self._senders = set(senders)
        self._given: set[PeerID] = set()
        """Whose part is in the sum."""
        self._index = -1
        self._sum = torch.zeros(0)
        self._weight = 0.0
        self._mean: asyncio.Future[torch.Tensor] = asyncio.get_running_loop().create_future()
        self._begin_next()

    @property
    def is_finished(self) -> bool:
        """All means are there, or nobody needs them any more."""
        return self._index >= len(self.part_sizes)

    async def mean_with(self, sender: PeerID, part: torch.Tensor, weight: float) -> torch.Tensor:
        """Add a member's part of those that are summed up now; the mean, once everybody's is there.

        Args:
            part: shape [size of this part], fp32

        Raises:
            ExchangeBroken: this member has been given up, has given this part already, or all is over
        """
        if self.is_finished or sender not in self._senders or sender in self._given:
            raise ExchangeBroken("this part is not awaited")
        self._sum.add_(part, alpha=weight)
        self._weight += weight
        self._given.add(sender)
        mean = self._mean
        self._finish_if_complete()
        return await asyncio.shield(mean)  # many wait for it: who hangs up takes it from nobody

    def awaited_from(self, sender: PeerID) -> int | None:
        """Number of the part that is summed up now, if this member's is missing: what follows waits for it."""
        is_missing = not self.is_finished and sender in self._senders - self._given
        return self._index if is_missing else None

    def lose(self, sender: PeerID) -> None:
        """What this member has not given yet is not waited for."""
        self._senders.discard(sender)
        self._finish_if_complete()

    def close(self) -> None:
        """Nobody needs the rest."""
        self._index = len(self.part_sizes)
        self._sum = torch.zeros(0)
        self._mean.cancel()

    def _finish_if_complete(self) -> None:
        if self.is_finished or not self._given or not self._senders <= self._given:
            return
        if self._weight == 0:  # none of those who are left has computed anything: there is no mean
            return self.close()
        self._mean.set_result(self._sum.div_(self._weight))
        self._begin_next()

    def _begin_next(self) -> None:
        self._index += 1
        if self.is_finished:
            return
        self._given = set()
        self._sum, self._weight = torch.zeros(self.part_sizes[self._index]), 0.0
        self._mean = asyncio.get_running_loop().create_future()
