"""Measures where the time of a step goes: waiting for data, computing, communicating."""

import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.profilers import Profiler


class Stopwatch:
    """Adds up the time between `begin` and `end`: wall time of the process, or time of the current stream on a GPU.

    A second `begin` replaces the first; an `end` without one does nothing.
    """

    def __init__(self) -> None:
        self._began: float | torch.cuda.Event | None = None
        self._seconds = 0.0
        self._on_gpu: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self, on_gpu: bool = False) -> None:
        """Starts an interval; `on_gpu` measures on the GPU's current stream."""
        self._began = _recorded_event() if on_gpu else time.perf_counter()

    def end(self) -> None:
        """Ends the interval and adds it to the sum."""
        if isinstance(self._began, float):
            self._seconds += time.perf_counter() - self._began
        elif self._began is not None:
            self._on_gpu.append((self._began, _recorded_event()))
        self._began = None

    def take(self) -> float:
        """The sum in seconds since the last call; waits for the GPU if it was used."""
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds = self._seconds + sum(first.elapsed_time(second) / 1000 for first, second in self._on_gpu)
        self._seconds, self._on_gpu = 0.0, []
        return seconds


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def timed_hook(hook: Callable[..., Any], stopwatch: Stopwatch) -> Callable[..., Any]:
    """Wraps a DDP communication hook, so that each call restarts the stopwatch.

    The last bucket's call says that the gradients are complete. What remains of the backward pass after it is the
    communication that could not be hidden.
    """

    def begin(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        stopwatch.begin(bucket.buffer().is_cuda)
        return hook(state, bucket)

    return begin


class TimedCollective:
    """FSDP's all-gather or reduce-scatter under a stopwatch.

    On CPUs this is the time that the process is blocked; on GPUs it is the time of the communication's own stream,
    hidden or not.

    Args:
        collective: `dist.all_gather_into_tensor` or `dist.reduce_scatter_tensor`.
        stopwatch: adds up the time.
    """

    def __init__(self, collective: Callable[..., dist.Work | None], stopwatch: Stopwatch) -> None:
        self.collective, self.stopwatch = collective, stopwatch

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The buffer that the collective writes to."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any) -> dist.Work | None:
        """Runs the collective."""
        self.stopwatch.begin(output_tensor.is_cuda)
        work = self.collective(output_tensor, input_tensor, **options)
        self.stopwatch.end()
        return work


class DataClock(Profiler):
    """Adds up the time of fetching batches, between Lightning's own marks."""

    def __init__(self) -> None:
        super().__init__()
        self._began = self._seconds = 0.0

    def start(self, action_name: str) -> None:
        """Called by Lightning before each action."""
        if action_name.endswith("train_dataloader_next"):
            self._began = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """Called by Lightning after each action."""
        if action_name.endswith("train_dataloader_next"):
            self._seconds += time.perf_counter() - self._began

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class StepSplit(L.Callback):
    """Divides the training time of each update into parts; each is a mean over all processes, in seconds.

    It is a gauge of `perf/data_seconds` (waiting for batches), `perf/communication_seconds` (of gradients and shards,
    as `timed_hook` and `TimedCollective` measure it) and `perf/compute_seconds` (the rest, which includes the overhead
    of Lightning and of logging).
    """

    per_process = False

    def __init__(self, data: DataClock, communication: Stopwatch) -> None:
        self.data, self.communication = data, communication

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Ends the interval of communication: DDP's gradients are averaged now."""
        self.communication.end()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Discards FSDP's communication during the validation, which does not count."""
        self.communication.take()

    def start(self) -> None:
        """Begins to measure an update."""
        self.data.take()
        self.communication.take()

    def take(self, seconds: float) -> dict[str, float]:
        """The parts of `seconds`, the training time of an update."""
        data, communication = self.data.take(), self.communication.take()
        return {
            "perf/data_seconds": data,
            "perf/compute_seconds": max(0.0, seconds - data - communication),
            "perf/communication_seconds": communication,
        }
