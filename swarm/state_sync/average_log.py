"""Keeps the average of the last update for peers that missed it, and earlier ones while a peer downloads the state.

Over a slow line a state takes longer than an update, so the swarm is further when the state has arrived. The joiner
then gets the averages of the updates made meanwhile, each with a third of the bytes or less, and makes these updates,
too. If an average is zero nearly everywhere, as with the codec topk, only the other numbers are kept and sent.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

KEEP_SECONDS = 30.0
"""Seconds after the last request for which more than the last average is kept: a peer may have to catch up with one
more update."""
MAX_AVERAGES, MAX_HELD_BYTES = 64, 2**29
"""Most averages that are kept, and the most memory that they take."""
MIN_AVERAGES = 6
"""Averages that are kept however large they are. A peer with a link faster than the updates has no more to make up."""
PLACE_AND_NUMBER_BYTES = 8
FIRST_NUMBERS = 1024
"""Numbers at the beginning of a vector that are tried before the whole vector is."""
MAX_BATCH_BYTES = 2**24
"""Averages that follow each other are sent together up to this size: for a small model, one by one takes too long."""


@dataclass(frozen=True)
class Average:
    """The average of one update.

    Args:
        step: the step that it ended
        before: lineage of the weights that it belongs to
        after: lineage of the weights that come out of it
        tensors: its vector, as `shrunk` has made it
    """

    step: int
    before: bytes
    after: bytes
    tensors: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in memory and on the wire."""
        return sum(tensor.nbytes for tensor in self.tensors)


def shrunk(vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Encode a vector in fewer bytes if possible, without changing a bit of any number.

    Args:
        vector: shape [n], fp32; is copied

    Returns:
        the vector, shape [n], fp32, or fp16 if that is exact; or, where nearly all numbers are zero, the places of the
        others, shape [k], int32, and the others, shape [k], fp32
    """
    bits = vector.view(torch.int32)  # compare bits, so that minus zero counts as not zero
    num_others = int(torch.count_nonzero(bits))
    kept, first = vector, vector[:FIRST_NUMBERS]
    if torch.equal(first.half().float(), first):  # a cheap test: averages that do not fit mostly fail it at once
        half = vector.half()  # exact for numbers that the codec fp16 has decoded
        kept = half if torch.equal(half.float(), vector) else vector
    if num_others * PLACE_AND_NUMBER_BYTES < kept.nbytes / 2:
        places = bits.nonzero().view(-1)
        return places.to(torch.int32), vector[places]
    return (vector.clone() if kept is vector else kept,)


def averages_in(tensors: Sequence[torch.Tensor], sizes: Iterable[int]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Divide the tensors of several averages; the sender is not trusted.

    Args:
        tensors: one or two for each average, as `shrunk` returns them
        sizes: how many numbers the first average has, the second one, and so on without an end

    Raises:
        ValueError: they are no averages of these sizes
    """
    rest = iter(tensors)
    for tensor, size in zip(rest, sizes):  # noqa: B905 (the sizes have no end)
        average = (tensor, next(rest, torch.empty(0))) if tensor.dtype == torch.int32 else (tensor,)
        numbers = average[-1]
        if numbers.dtype not in (torch.float32, torch.float16) or not torch.isfinite(numbers).all():
            raise ValueError("numbers of another kind")
        if len(average) == 1 and numbers.shape != (size,):
            raise ValueError("a vector of another shape")
        if len(average) == 2 and not _are_places(tensor, numbers, size):
            raise ValueError("places that are none")
        yield average


def _are_places(places: torch.Tensor, numbers: torch.Tensor, size: int) -> bool:
    """Whether each number has a place of its own, in ascending order."""
    if places.dim() != 1 or places.shape != numbers.shape:
        return False
    return not len(places) or bool(places[0] >= 0 and places[-1] < size and (places[1:] > places[:-1]).all())


def whole(average: tuple[torch.Tensor, ...], size: int) -> torch.Tensor:
    """Undo `shrunk`: the vector, shape [size]. It can take far more memory than the encoded average."""
    if len(average) == 1:
        return average[0]
    places, numbers = average
    return torch.zeros(size).index_copy_(0, places.long(), numbers.float())


class AverageLog:
    """The kept averages by step, the oldest first."""

    def __init__(self) -> None:
        self._averages: OrderedDict[int, Average] = OrderedDict()
        self.until = 0.0
        """Monotonic seconds until which more than the last average is kept."""

    def keep(self) -> None:
        """Keep more than the last average for a while: a peer has asked for the state or for an average."""
        self.until = time.monotonic() + KEEP_SECONDS

    def add(self, step: int, before: bytes, after: bytes, vector: torch.Tensor) -> None:
        """Add the average of an update, and drop the oldest ones that are too many.

        Args:
            step: the step that it ended
            before: lineage of the weights that it belongs to
            after: lineage of the weights that come out of it
            vector: shape [n], fp32; is copied
        """
        average = Average(step, before, after, shrunk(vector))
        self._averages.pop(step, None)
        self._averages[step] = average
        most = max(MIN_AVERAGES, min(MAX_AVERAGES, MAX_HELD_BYTES // max(1, average.num_bytes)))
        most = 1 if time.monotonic() > self.until else most
        while len(self._averages) > most:
            self._averages.popitem(last=False)

    def of(self, step: int) -> Average | None:
        """The average of this update; None if the update was not made here, or too long ago."""
        return self._averages.get(step)

    def batch(self, step: int) -> list[Average]:
        """The averages of this update and of the following ones: up to `MAX_BATCH_BYTES`, but the first in any case."""
        batch, num_bytes = [], 0
        while (average := self.of(step)) is not None:
            is_next = not batch or average.before == batch[-1].after
            if not is_next or (batch and num_bytes + average.num_bytes > MAX_BATCH_BYTES):
                break
            batch.append(average)
            num_bytes += average.num_bytes
            step += 1
        return batch
