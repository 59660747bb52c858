"""Measures the use of processor, memory and GPU by every process, at every update."""

import math
import warnings

import psutil
import torch

GIB = 2**30


class ResourceMeter:
    """A gauge of `resources/rank0/cpu_percent` and so on: one value for each process and update.

    `cpu_percent` is this process's use of processor time since the last update, in percent of one core. `memory_gib` is
    its resident memory (psutil). `gpu_percent` and `gpu_memory_gib` are of the whole GPU, by all programs (NVML); they
    are left out if there is no GPU, or if NVML does not tell them, as of a slice of a GPU (MIG).

    Args:
        device: the device of this process.
    """

    per_process = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call has nothing to compare with

    def start(self) -> None:
        """Does nothing: psutil counts the processor's use between two calls of `take`."""

    def take(self, seconds: float) -> dict[str, float]:
        """The values of this process; NaN for a GPU that it does not have."""
        gpu_percent, gpu_memory = _gpu(self._device) if self._device.type == "cuda" else (math.nan, math.nan)
        return {
            "resources/cpu_percent": self._process.cpu_percent(),
            "resources/memory_gib": self._process.memory_info().rss / GIB,
            "resources/gpu_percent": gpu_percent,
            "resources/gpu_memory_gib": gpu_memory,
        }


def _gpu(device: torch.device) -> tuple[float, float]:
    try:
        return float(torch.cuda.utilization(device)), torch.cuda.device_memory_used(device) / GIB
    except Exception as error:  # NVML has its own errors: of a slice of a GPU (MIG) it tells no utilisation
        advice = "install nvidia-ml-py" if isinstance(error, ModuleNotFoundError) else "training goes on without it"
        warnings.warn(f"NVML does not tell the GPU's utilisation ({error}): {advice}.", stacklevel=2)
        return math.nan, math.nan
