"""What the training takes of the machine: processor, memory and GPU of every process, logged at every update."""

import math
import warnings
from typing import Any

import lightning as L
import psutil
import torch
import torch.distributed as dist

GIB = 2**30
NAMES = ("cpu_percent", "memory_gib", "gpu_percent", "gpu_memory_gib")


class ResourceMeter(L.Callback):
    """Logs `resources/rank0/cpu_percent` and so on: one value per process and update.

    `cpu_percent` is of one core, by this process since the last update, and `memory_gib` its resident memory (psutil).
    `gpu_percent` and `gpu_memory_gib` are of the whole GPU, whoever uses it (NVML); left out where there is none.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._step = 0
        self._sums: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._updates = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins to measure."""
        self._step = trainer.global_step
        self._process.cpu_percent()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs if this micro-batch completed an update."""
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        values = self._of_all_processes(trainer)
        self._updates += 1
        for tag, value in values.items():
            self._sums[tag] = self._sums.get(tag, 0.0) + value
            self._peaks[tag] = max(self._peaks.get(tag, 0.0), value)
        for logger in trainer.loggers:
            logger.log_metrics({f"resources/{tag}": value for tag, value in values.items()}, trainer.global_step)

    def summary(self) -> dict[str, dict[str, float]]:
        """Mean and highest value of each process's resources, as {"rank0/cpu_percent": {"mean": ..., "peak": ...}}."""
        return {tag: {"mean": self._sums[tag] / self._updates, "peak": self._peaks[tag]} for tag in self._sums}

    def _of_all_processes(self, trainer: L.Trainer) -> dict[str, float]:
        device = trainer.strategy.root_device
        own = torch.tensor(self._measure(device), device=device)
        everyone = [torch.empty_like(own) for _ in range(trainer.world_size)]
        if trainer.world_size > 1:
            dist.all_gather(everyone, own)
        else:
            everyone = [own]
        rows = (zip(NAMES, values.tolist(), strict=True) for values in everyone)
        return {
            f"rank{rank}/{name}": value for rank, row in enumerate(rows) for name, value in row if math.isfinite(value)
        }

    def _measure(self, device: torch.device) -> list[float]:
        own = [self._process.cpu_percent(), self._process.memory_info().rss / GIB]
        return own + (_gpu(device) if device.type == "cuda" else [math.nan, math.nan])


def _gpu(device: torch.device) -> list[float]:
    try:
        return [float(torch.cuda.utilization(device)), torch.cuda.device_memory_used(device) / GIB]
    except (ModuleNotFoundError, RuntimeError) as error:
        warnings.warn(f"NVML does not tell the GPU's utilisation ({error}): install nvidia-ml-py.", stacklevel=2)
        return [math.nan, math.nan]
