"""The average of the last update, for who has missed it; and those before it while somebody downloads the state.

Over a slow line a state takes longer than an update: when it has arrived, the swarm is further. Who then gets the
averages of the updates that have been made meanwhile, a sixth of the bytes each (or a third), makes these updates, too.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

import torch

KEEP_SECONDS = 30.0
"""After the last request: somebody may still have to catch up with one more update."""
MAX_AVERAGES, MAX_HELD_BYTES = 64, 2**29
"""Most averages that are kept, and the most memory that they take."""
MIN_AVERAGES = 6
"""Kept however large they are: a peer whose link is faster than the updates has at most so many to make up for."""
MAX_BATCH_BYTES = 2**24
"""Averages that follow each other travel together up to this size: for a small model one by one takes too long."""


@dataclass(frozen=True)
class Average:
    """Of an update.

    Args:
        step: that it ended
        before: lineage of the weights that it belongs to
        after: lineage of the weights that come out of it
        vector: shape [n], fp32, or fp16 if nothing is lost by that
    """

    step: int
    before: bytes
    after: bytes
    vector: torch.Tensor


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
        half = vector.half()  # what the codec fp16 has decoded, fits
        kept = half if torch.equal(half.float(), vector) else vector.clone()
        self._averages.pop(step, None)
        self._averages[step] = Average(step, before, after, kept)
        most = max(MIN_AVERAGES, min(MAX_AVERAGES, MAX_HELD_BYTES // max(1, kept.nbytes)))
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
            if not is_next or (batch and num_bytes + average.vector.nbytes > MAX_BATCH_BYTES):
                break
            batch.append(average)
            num_bytes += average.vector.nbytes
            step += 1
        return batch
