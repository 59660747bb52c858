"""Paced compute: a micro-batch takes as long as on a device of a given speed, to study networks without that device.

Forward and backward run on a few samples of each micro-batch, which gives true gradients of the true size; the rest of
the time passes asleep. Speed, traffic and waiting are then those of the paced device; accuracy is not, unless all
samples are asked for, which a slow pace and a small model leave time for.
"""

import os
import time

from recipe.errors import InputError

VARIABLE = "PACED_SAMPLES_PER_SECOND"
"""Environment variable that paces a process, for experiments only; `environment.json` keeps it."""
ALL_SAMPLES = "PACED_ALL_SAMPLES"
"""Environment variable; with "1" the whole micro-batch is computed, so that accuracies mean something too."""
_FEW = 2
BACKWARD_OVER_FORWARD = 2.0
"""Floating-point operations; Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1."""


def paced_samples_per_second() -> float | None:
    """The device's speed, None where nothing is paced.

    Raises:
        InputError: the variable holds no positive number.
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
    """Those of a paced micro-batch whose gradients are computed."""
    return slice(None) if os.environ.get(ALL_SAMPLES) == "1" else slice(_FEW)


def computes_all() -> bool:
    """Whether a micro-batch is computed as it is."""
    return paced_samples_per_second() is None or computed_samples() == slice(None)


class Pace:
    """The time of a device, over the micro-batches of a process.

    A micro-batch ends, with its backward pass, as long after its begin as the device would need. How long that pass
    will take is guessed; by what the guess was wrong, the next micro-batch is shorter or longer, but not by more than
    its length: a machine that stood still, or cannot keep the pace, does not make up for it.

    Args:
        samples_per_second: speed of the device.
    """

    def __init__(self, samples_per_second: float) -> None:
        self.samples_per_second = samples_per_second
        self._ends = self.late_seconds = 0.0

    def sleep_before_backward(self, began: float, num_samples: int) -> None:
        """After a forward pass that began at `began` (perf_counter), waits for what the device would still need."""
        now, seconds = time.perf_counter(), num_samples / self.samples_per_second
        self._ends = began + seconds - min(self.late_seconds, seconds)
        time.sleep(max(0.0, self._ends - now - BACKWARD_OVER_FORWARD * (now - began)))

    def end_backward(self, averaged: bool) -> None:
        """After the backward pass. One that has averaged gradients meanwhile tells nothing of the device."""
        self.late_seconds = 0.0 if averaged else time.perf_counter() - self._ends
