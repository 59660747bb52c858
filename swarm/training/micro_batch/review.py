"""Measures the micro-batch again during training: the machine may have been busy when the peer started."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import lightning as L
import psutil
import torch

from recipe.data.peer_data import PeerData
from recipe.model import fewest_samples
from recipe.training.main_memory import main_memory
from swarm.training.micro_batch.finder import MAX_SECONDS, MEMORY_FRACTION, MIN_FREE_BYTES, MicroBatch

MICRO_BATCHES = 8
"""Number of micro-batches of one size that are timed before the size is judged."""
UPDATES = 3
"""Global updates before the first judgement, and between two."""
SLOW_TIMES = 2.0
"""Micro-batches are halved only when they take more than this many times `MAX_SECONDS`."""


class MicroBatchRule:
    """Doubles the micro-batch while that keeps it below 1.4 s, halves it above 2.8 s.

    Each change of direction doubles the number of updates between judgements. So a machine that is busy now and then
    changes the size less and less often.

    Args:
        samples: size at the start, a power of two
        fewest: smallest size with which the model can be trained
        most: largest size that the recipe allows
    """

    def __init__(self, samples: int, fewest: int, most: int):
        self.samples, self._fewest, self._most = samples, fewest, max(most, fewest)
        self.seconds: list[float] = []
        self._updates, self._wait, self._last = 0, UPDATES, 0

    @property
    def wants_more(self) -> bool:
        """Whether further micro-batches should be timed, which costs a little time on a GPU."""
        return len(self.seconds) < MICRO_BATCHES

    def note(self, samples: int, seconds: float) -> None:
        """Note the time of a micro-batch. One of an earlier size, which a loader has drawn ahead, does not count."""
        if samples == self.samples and self.wants_more:
            self.seconds.append(seconds)

    def judge(self, has_room: bool) -> int | None:
        """Judge the size after a global update; return the new size if it changes, else None.

        Args:
            has_room: whether the memory holds twice as much as now
        """
        self._updates += 1
        if self._updates < self._wait or self.wants_more:
            return None
        typical = statistics.median(self.seconds)
        self._updates = 0
        self.seconds.clear()
        if 2 * typical <= MAX_SECONDS and 2 * self.samples <= self._most and has_room:
            change = 1
        elif typical > SLOW_TIMES * MAX_SECONDS and self.samples // 2 >= self._fewest:
            change = -1
        else:
            return None
        if change == -self._last:
            self._wait *= 2
        self._last = change
        self.samples = 2 * self.samples if change > 0 else self.samples // 2
        return self.samples


class MicroBatchReview(L.Callback):
    """Applies `MicroBatchRule` to a peer's training, at global updates, unless a person gave the size.

    Args:
        found: the measurement at the start
        most: largest size that the recipe allows
        data: the peer's data; its next micro-batches get the new size, and its order of samples stays
        say: prints one line
    """

    def __init__(self, found: MicroBatch, most: int, data: PeerData, say: Callable[[str], None]):
        self.samples = found.samples
        self._is_given, self._most, self._data, self._say = found.limit == "given", most, data, say
        self._rule: MicroBatchRule | None = None
        self._began: float | None = None
        self._seconds: float | None = None
        self._step = 0

    def on_train_start(self, trainer, pl_module) -> None:
        self._step = trainer.global_step
        if not self._is_given:
            self._rule = MicroBatchRule(self.samples, fewest_samples(pl_module), self._most)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if self._rule is not None and self._rule.wants_more:
            self._began = _now(pl_module.device)

    def on_after_backward(self, trainer, pl_module) -> None:
        """Stop the clock here: the averaging, which comes next, does not count."""
        if self._began is not None:
            self._seconds, self._began = _now(pl_module.device) - self._began, None
        else:
            self._seconds = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if self._rule is None:
            return
        if self._seconds is not None:
            self._rule.note(len(batch[1]), self._seconds)
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        before = self.samples
        if (samples := self._rule.judge(_has_room(pl_module.device))) is not None:
            self.samples = samples
            self._data.resize_micro_batch(samples)
            self._say(
                f"Micro-batch: {samples} samples from now on instead of {before}, by measuring again while training."
            )


def _now(device: torch.device) -> float:
    """Seconds on a clock, read when the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _has_room(device: torch.device) -> bool:
    """Whether there is memory for twice what this process has taken: activations grow no faster than samples."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return 2 * torch.cuda.max_memory_reserved(device) <= MEMORY_FRACTION * total
    taken = psutil.Process().memory_info().rss
    return main_memory().available - taken >= MIN_FREE_BYTES
