"""The average of the last update, for who has missed it; and those before it while somebody downloads the state.

Over a slow line a state takes longer than an update: when it has arrived, the swarm is further. Who then gets the
averages of the updates that have been made meanwhile, a third of the bytes each or less, makes these updates, too.
Of an average that is zero nearly everywhere, as with the codec topk, only the rest is kept and travels.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

KEEP_SECONDS = 30.0
"""Seconds after the last request for which more than the last average is kept: somebody may still have to catch up with
one more update."""
MAX_AVERAGES, MAX_HELD_BYTES = 64, 2**29
"""Most averages that are kept, and the most memory that they take."""
MIN_AVERAGES = 6
"""Kept however large they are: a peer whose link is faster than the updates has at most so many to make up for."""
PLACE_AND_NUMBER_BYTES = 8
FIRST_NUMBERS = 1024
MAX_BATCH_BYTES = 2**24
"""Averages that follow each other travel together up to this size: for a small model one by one takes too long."""


@dataclass(frozen=True)
class Average:
    """Of an update.

    Args:
        step: that it ended
        before: lineage of the weights that it belongs to
        after: lineage of the weights that come out of it
        tensors: of which `shrunk` has made its vector
    """

    step: int
    before: bytes
    after: bytes
    tensors: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """As it is kept, and travels."""
        return sum(tensor.nbytes for tensor in self.tensors)


def shrunk(vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same numbers in fewer bytes, if there is a way; none is changed by a bit.

    Args:
        vector: shape [n], fp32; is copied

    Returns:
        the vector, shape [n], fp32, or fp16 if that is enough; or, where nearly all are zero, the places of the others,
        shape [k], int32, and the others, shape [k], fp32
    """
    bits = vector.view(torch.int32)  # minus zero is not zero here
    num_others = int(torch.count_nonzero(bits))
    kept, first = vector, vector[:FIRST_NUMBERS]
    if torch.equal(first.half().float(), first):  # most averages that do not fit, do not fit from the beginning on
        half = vector.half()  # what the codec fp16 has decoded, fits
        kept = half if torch.equal(half.float(), vector) else vector
    if num_others * PLACE_AND_NUMBER_BYTES < kept.nbytes / 2:
        places = bits.nonzero().view(-1)
        return places.to(torch.int32), vector[places]
    return (vector.clone() if kept is vector else kept,)


def averages_in(tensors: Sequence[torch.Tensor], sizes: Iterable[int]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Divide the tensors of several averages; the sender is not trusted.

    Args:
        sizes: how many numbers the first one has, the second one, and so on without an end

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
    """The vector of which `shrunk` has made these, shape [size]; of some it takes far more memory than they do."""
    if len(average) == 1:
        return average[0]
    places, numbers = average
    return torch.zeros(size).index_copy_(0, places.long(), numbers.float())


class AverageLog:
    """What others need in order to follow."""

    def __init__(self) -> None:
        self._averages: OrderedDict[int, Average] = OrderedDict()
        self.until = 0.0
        """Monotonic seconds until which more than the last average is kept."""

    def keep(self) -> None:
        """Somebody is here for the state, or for an average."""
        self.until = time.monotonic() + KEEP_SECONDS

    def add(self, step: int, before: bytes, after: bytes, vector: torch.Tensor) -> None:
        """An update has been averaged.

        Args:
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
        """None if this update has not been made here, or long ago."""
        return self._averages.get(step)

    def batch(self, step: int) -> list[Average]:
        """The average of this update, and those that follow on it, as many as travel together."""
        batch, num_bytes = [], 0
        while (average := self.of(step)) is not None:
            is_next = not batch or average.before == batch[-1].after
            if not is_next or (batch and num_bytes + average.num_bytes > MAX_BATCH_BYTES):
                break
            batch.append(average)
            num_bytes += average.num_bytes
            step += 1
        return batch
