"""Keeps the global batch equal: target batch size = micro-batch x accumulation x processes, for every strategy."""

import math
from dataclasses import dataclass
from typing import Literal

from recipe.errors import InputError

DEFAULT_MICRO_BATCH = 32


@dataclass(frozen=True)
class BatchPlan:
    """How the samples of one update are divided."""

    micro_batch: int
    """Samples that one process computes at once."""
    accumulation: int
    """Micro-batches of one process per update."""
    processes: int
    """Training processes."""

    @property
    def global_batch(self) -> int:
        """Samples per update: the recipe's target batch size."""
        return self.micro_batch * self.accumulation * self.processes

    def __str__(self) -> str:
        return (
            f"{self.global_batch} = {self.micro_batch} (micro-batch) x {self.accumulation} (accumulation) x "
            f"{self.processes} (processes)"
        )


def plan_batches(target_batch_size: int, micro_batch: int | None, processes: int) -> BatchPlan:
    """Divides the target batch size without a remainder.

    Args:
        target_batch_size: samples per update.
        micro_batch: samples per process at once; None for the largest that divides and is at most 32.
        processes: training processes.

    Raises:
        InputError: the division leaves a remainder; the message names the nearest values without one.
    """
    share, remainder = divmod(target_batch_size, processes)
    if remainder:
        raise InputError(
            f"The target batch size of {target_batch_size} does not divide among {processes} processes: give "
            f"--target-batch-size {_either(_nearest_multiples(target_batch_size, processes))}."
        )
    if micro_batch is None:
        micro_batch = largest_divisor(share, DEFAULT_MICRO_BATCH)
    if share % micro_batch:
        sizes = _nearest_divisors(share, micro_batch)
        targets = _nearest_multiples(target_batch_size, micro_batch * processes)
        raise InputError(
            f"The target batch size of {target_batch_size} does not divide into micro-batches of {micro_batch} on "
            f"{processes} process(es): give --batch-size {_either(sizes)}, or --target-batch-size {_either(targets)}."
        )
    return BatchPlan(micro_batch, share // micro_batch, processes)


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of `number` that is at most `at_most`, which is 1 or more."""
    return next(size for size in range(min(number, at_most), 0, -1) if number % size == 0)


def scaled_learning_rate(
    learning_rate: float, rule: Literal["none", "sqrt", "linear"], batch_size: int, base_batch_size: int
) -> float:
    """The learning rate for a global batch other than the one that it was chosen for.

    Args:
        learning_rate: the learning rate that suits `base_batch_size`.
        rule: linear (Goyal et al. 2017, section 2.1), sqrt (Krizhevsky 2014, section 5) or none.
        batch_size: samples per update.
        base_batch_size: samples per update for which `learning_rate` was chosen.
    """
    ratio = batch_size / base_batch_size
    return learning_rate * {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[rule]


def _nearest_multiples(number: int, of: int) -> list[int]:
    below = number // of * of
    return [value for value in (below, below + of) if value > 0]


def _nearest_divisors(number: int, size: int) -> list[int]:
    below = largest_divisor(number, size)
    above = next((value for value in range(size, number + 1) if number % value == 0), None)
    return [below] if above is None else [below, above]


def _either(values: list[int]) -> str:
    return " or ".join(map(str, values))
