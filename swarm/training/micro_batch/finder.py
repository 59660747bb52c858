"""How many samples this device should compute at once: measured on a copy of the model, in a few seconds."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from recipe.config import Recipe
from recipe.errors import InputError
from recipe.model import fewest_samples
from recipe.registry import kind_of
from recipe.training.main_memory import main_memory

AIM_SECONDS = 1.0
"""Time that a micro-batch is to take."""
MAX_SECONDS = 1.4
"""Longest time of a micro-batch. The largest power of two below it takes 0.7 s or more, if time is the limit."""
BUDGET_SECONDS = 6.0
"""Time for the whole measurement, after a first pass."""
REPETITIONS = 3
"""Times that a slow pass is measured, since other programs make a pass look slow now and then."""
SHARE_OF_TARGET = 16
"""A micro-batch is at most 1/16 of the target batch: the swarm's batch then overshoots by a few percent per peer."""
LOCAL_PEERS = 4
"""With this many peers or fewer, a local step consists of one micro-batch or more."""
MEMORY_FRACTION = 0.9
"""Share of a GPU's memory that training may take."""
MIN_FREE_BYTES = 2**28
"""Bytes of main memory that stay free."""
STATE_COPIES = 5
"""fp32 copies of the weights that training adds: gradient, sum of gradients, two statistics of AdamW, one to spare."""


@dataclass(frozen=True)
class MicroBatch:
    """The size of a micro-batch, and how it was found.

    Args:
        samples: size of the micro-batch, a power of two if it was measured
        seconds: time of a forward and backward pass over it; nan where a person gave the size
        limit: what kept the micro-batch from being larger
    """

    samples: int
    seconds: float
    limit: str

    def __str__(self) -> str:
        samples = "1 sample" if self.samples == 1 else f"{self.samples} samples"
        if self.limit == "given":
            return f"{samples} (as given)"
        limit = f"time (about {AIM_SECONDS:g} s each)" if self.limit == "time" else self.limit
        return f"{samples}, measured: {self.seconds:.2g} s each; the limit is {limit}; --batch-size sets another number"


def largest_sensible(recipe: Recipe, num_train_samples: int, num_processes: int = 1) -> int:
    """The largest power of two that is at most 1/16 of the target batch, small enough for local steps, and fits the
    data.

    Args:
        num_processes: processes of the peer, each of which computes as much
    """
    parts = max(SHARE_OF_TARGET, LOCAL_PEERS * recipe.local_steps if recipe.averaging == "local" else 0) * num_processes
    most = max(1, min(recipe.target_batch_size // parts, num_train_samples))
    return 1 << (most.bit_length() - 1)


def precision_on(device: str, precision: str) -> str:
    """The recipe's number format, or float32 on a GPU (before Ampere) that only emulates bfloat16, which is slower.

    Args:
        device: auto, cpu or cuda, as a person gave it
        precision: the recipe's
    """
    on_gpu = device != "cpu" and torch.cuda.is_available()
    imitates = on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False)
    return "32" if imitates and precision == "bf16-mixed" else precision


def measure_for_recipe(
    model: nn.Module, recipe: Recipe, device: str, num_train_samples: int = 2**31, num_processes: int = 1
) -> MicroBatch:
    """Call `measure_micro_batch` for a recipe's model.

    Args:
        device: auto, cpu or cuda, as a person gave it
        num_train_samples: number of training samples; a micro-batch is never larger
        num_processes: as in `largest_sensible`

    Raises:
        InputError: this device cannot train the model
    """
    uses_gpu = device != "cpu" and torch.cuda.is_available()
    kind = kind_of(recipe.dataset)
    try:
        return measure_micro_batch(
            model,
            partial(kind.random_inputs, recipe),
            recipe.num_classes,
            torch.device("cuda" if uses_gpu else "cpu"),
            precision_on(device, recipe.precision) == "bf16-mixed",
            largest_sensible(recipe, num_train_samples, num_processes),
        )
    except (ValueError, IndexError, AssertionError, RuntimeError) as error:  # a model that can be built, not trained
        if isinstance(error, InputError):
            raise
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(
            f"{recipe.model} cannot be trained here on {kind.inputs_in_words(recipe)} ({said[0][:200]}): set another "
            "size, choose another --model, or free memory."
        ) from error


def measure_micro_batch(
    module: nn.Module,
    random_inputs: Callable[[int], torch.Tensor],
    num_classes: int,
    device: torch.device,
    bf16: bool,
    most: int,
) -> MicroBatch:
    """Find the largest power of two that fits the device's memory and takes at most 1.4 s, better about 1 s.

    It is at least 2 for a model with BatchNorm, which cannot be trained with single samples. The module, its buffers
    and all random generators stay as they are. Decoding images is not measured.

    Args:
        module: maps inputs to logits (batch, num_classes); on the CPU
        random_inputs: makes random inputs of this many samples, on the CPU
        num_classes: number of logits
        device: the device on which training will compute
        bf16: whether training computes in bf16-mixed precision
        most: a power of two that is not exceeded, unless the model needs more

    Raises:
        InputError: not even the fewest samples fit
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        probe = Probe(module, random_inputs, num_classes, device, bf16)
        try:
            return _search(probe, fewest_samples(module), most)
        finally:
            probe.release()


def _search(probe: Probe, fewest: int, most: int) -> MicroBatch:
    probe.seconds(fewest)  # loads kernels, which on a GPU takes seconds
    deadline = time.perf_counter() + BUDGET_SECONDS
    best, samples = None, fewest
    while True:
        try:
            seconds = probe.best_seconds(samples)
        except (RuntimeError, MemoryError):  # on a CPU, torch has no error of its own for too little memory
            if best is None:
                raise
            seconds = None
        if seconds is None and best is None:
            raise InputError("This device has too little memory for this model: give --device cpu, or free memory.")
        if seconds is None:
            return MicroBatch(best.samples, best.seconds, "memory")
        if seconds > MAX_SECONDS and best is not None:
            return MicroBatch(best.samples, best.seconds, "time")
        best = MicroBatch(samples, seconds, "time")
        if samples >= most:
            return MicroBatch(samples, seconds, "the target batch (larger ones would overshoot it)")
        if 2 * seconds > MAX_SECONDS or time.perf_counter() + 2 * seconds > deadline:
            return best
        # From two to eight times as many: half of what the measured pace promises for `AIM_SECONDS`.
        promised = samples * max(2, min(8, AIM_SECONDS / seconds / 2))
        samples = min(most, 1 << (int(promised).bit_length() - 1))


class Probe:
    """Runs forward and backward passes over noise, while as much memory is taken as training will take."""

    def __init__(
        self,
        module: nn.Module,
        random_inputs: Callable[[int], torch.Tensor],
        num_classes: int,
        device: torch.device,
        bf16: bool,
    ):
        self._device, self._random_inputs, self._num_classes, self._bf16 = device, random_inputs, num_classes, bf16
        self._model = copy.deepcopy(module).to(device).train()
        if device.type == "cuda":
            num_parameters = sum(parameter.numel() for parameter in module.parameters())
            self._reserve = torch.empty((STATE_COPIES - 1) * num_parameters, device=device)

    def best_seconds(self, samples: int) -> float | None:
        """Seconds of a pass that nothing disturbed; None when the memory does not suffice.

        A pass so slow that it would end the search is measured twice more, and the fastest counts.
        """
        seconds = self.seconds(samples)
        for _ in range(REPETITIONS - 1):
            if seconds is None or 2 * seconds <= MAX_SECONDS:
                break
            again = self.seconds(samples)
            seconds = None if again is None else min(seconds, again)
        return seconds

    def seconds(self, samples: int) -> float | None:
        """Seconds of one pass; None when the memory does not suffice."""
        if self._device.type == "cpu" and samples > 1 and main_memory().available < MIN_FREE_BYTES:
            return None
        try:
            inputs = self._random_inputs(samples).to(self._device)
            labels = torch.randint(self._num_classes, (samples,), device=self._device)
            began = time.perf_counter()
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
                loss = F.cross_entropy(self._model(inputs).float(), labels)
            loss.backward()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
                if torch.cuda.max_memory_reserved(self._device) > MEMORY_FRACTION * _total_memory(self._device):
                    return None
            return time.perf_counter() - began
        except torch.cuda.OutOfMemoryError:
            return None
        finally:
            self._model.zero_grad(set_to_none=True)

    def release(self) -> None:
        del self._model
        if self._device.type == "cuda":
            del self._reserve
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)


def _total_memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory
