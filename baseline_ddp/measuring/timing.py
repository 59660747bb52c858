"""Where the time of a step goes: waiting for data, computing, communicating."""

import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.profilers import Profiler


class Stopwatch:
    """Adds up the time between `begin` and `end`: of the process on CPUs, of the current stream on GPUs.

    A second `begin` replaces the first; an `end` without one does nothing.
    """

    def __init__(self) -> None:
        self._began: float | torch.cuda.Event | None = None
        self._seconds = 0.0
        self._on_gpu: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self, on_gpu: bool = False) -> None:
        """Starts."""
        self._began = _recorded_event() if on_gpu else time.perf_counter()

    def end(self) -> None:
        """Stops, and adds."""
        if isinstance(self._began, float):
            self._seconds += time.perf_counter() - self._began
        elif self._began is not None:
            self._on_gpu.append((self._began, _recorded_event()))
        self._began = None

    def take(self) -> float:
        """Seconds since the last call; waits for the GPU if it was used."""
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
    """A DDP communication hook that starts the stopwatch: the last bucket's call says that the gradients are complete.

    What then remains of the backward pass is the communication that it could not hide.
    """

    def begin(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        stopwatch.begin(bucket.buffer().is_cuda)
        return hook(state, bucket)

    return begin


class TimedCollective:
    """FSDP's all-gather or reduce-scatter under a stopwatch.

    On CPUs it is the time that the process is kept; on GPUs that of the communication's own stream, hidden or not.

    Args:
        collective: `dist.all_gather_into_tensor` or `dist.reduce_scatter_tensor`.
        stopwatch: what adds up.
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
    """Lightning's own mark around fetching a batch, added up."""

    def __init__(self) -> None:
        super().__init__()
        self._began = self._seconds = 0.0

    def start(self, action_name: str) -> None:
        """Called by Lightning before everything that it does."""
        if action_name.endswith("train_dataloader_next"):
            self._began = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """Called by Lightning after it."""
        if action_name.endswith("train_dataloader_next"):
            self._seconds += time.perf_counter() - self._began

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class StepSplit(L.Callback):
    """Divides the training time of each update; every part is a mean over all processes, in seconds.

    A gauge of `perf/data_seconds` (waiting for batches), `perf/communication_seconds` (of gradients and shards, as
    `timed_hook` and `TimedCollective` measure it) and `perf/compute_seconds` (the rest, Lightning's and the logs' own
    overhead included).
    """

    per_process = False

    def __init__(self, data: DataClock, communication: Stopwatch) -> None:
        self.data, self.communication = data, communication

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """DDP's gradients are averaged now."""
        self.communication.end()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What FSDP communicates while validating does not count."""
        self.communication.take()

    def start(self) -> None:
        """Begins to measure an update."""
        self.data.take()
        self.communication.take()

    def take(self, seconds: float) -> dict[str, float]:
        """The parts of `seconds`."""
        data, communication = self.data.take(), self.communication.take()
        return {
            "perf/data_seconds": data,
            "perf/compute_seconds": max(0.0, seconds - data - communication),
            "perf/communication_seconds": communication,
        }
