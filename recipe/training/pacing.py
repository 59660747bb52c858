"""Paced compute: a micro-batch takes as long as on a device of a given speed, so that networks can be studied without
it.

Forward and backward run on a few samples of each micro-batch, which gives true gradients of the true size. The process
sleeps for the rest of the time. Speed, traffic and waiting are those of the paced device. Accuracy is not, unless all
samples are computed, for which a slow pace and a small model leave time.
"""

import os
import time

from recipe.errors import InputError

VARIABLE = "PACED_SAMPLES_PER_SECOND"
"""Environment variable that paces a process, for experiments only; `environment.json` records it."""
ALL_SAMPLES = "PACED_ALL_SAMPLES"
"""Environment variable. With "1" the whole micro-batch is computed, so that accuracies mean something too."""
_FEW = 2
BACKWARD_OVER_FORWARD = 2.0
"""Floating-point operations of a backward pass over those of a forward pass: Kaplan et al. 2020, "Scaling Laws for
Neural Language Models", section 2.1."""


def paced_samples_per_second() -> float | None:
    """Speed of the pretended device, None where nothing is paced.

    Raises:
        InputError: the variable is not a positive number.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < 1e9:
        raise InputError(f"{VARIABLE} is {text[:40]!r}: set it to samples per second, or unset it.")
    return rate


def computed_samples() -> slice:
    """The samples of a paced micro-batch whose gradients are computed."""
    return slice(None) if os.environ.get(ALL_SAMPLES) == "1" else slice(_FEW)


def computes_all() -> bool:
    """Whether all samples of a micro-batch are computed."""
    return paced_samples_per_second() is None or computed_samples() == slice(None)


class Pace:
    """Keeps the pace of a pretended device over the micro-batches of a process.

    A micro-batch ends, with its backward pass, as long after its start as the device would need. The length of that
    pass is estimated. The next micro-batch is shorter or longer by the error of the estimate, but by no more than its
    own length. So a machine that stood still, or cannot keep the pace, does not make up for it.

    Args:
        samples_per_second: speed of the pretended device.
    """

    def __init__(self, samples_per_second: float) -> None:
        self.samples_per_second = samples_per_second
        self._ends = self.late_seconds = 0.0

    def sleep_before_backward(self, began: float, num_samples: int) -> None:
        """Sleep after a forward pass that began at `began` (perf_counter), for the time that the device would still
        need."""
        now, seconds = time.perf_counter(), num_samples / self.samples_per_second
        self._ends = began + seconds - min(self.late_seconds, seconds)
        time.sleep(max(0.0, self._ends - now - BACKWARD_OVER_FORWARD * (now - began)))

    def end_backward(self, averaged: bool) -> None:
        """Note how late the backward pass ended. One that averaged gradients meanwhile says nothing about the
        device."""
        self.late_seconds = 0.0 if averaged else time.perf_counter() - self._ends
