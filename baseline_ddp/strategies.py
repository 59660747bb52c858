"""Builds the Lightning strategy for one process, DDP or FSDP: all that differs between them."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import FSDPModule, fully_shard

from baseline_ddp.measuring.timing import Stopwatch, TimedCollective, timed_hook
from baseline_ddp.options import ComputeOptions
from baseline_ddp.processes import Processes
from recipe.config import Recipe
from recipe.errors import InputError
from recipe.registry import build_task
from recipe.training.task import ClassificationTask

POWERSGD_RANK = 2
"""Rank of the matrices that approximate the gradients; Vogels et al. 2019, table 3, use 1, 2 and 4."""
POWERSGD_BUCKET_MIB = 2**20
"""Size of DDP's buckets with powersgd: larger than any model, so that there is one bucket.

torch's hook starts an all-reduce when another one has ended, and waits for it in one of gloo's two threads. With two
buckets on slow lines, both threads wait and none is left, or two processes start them in another order: all hang.
"""


def choose_strategy(options: ComputeOptions, processes: Processes, device: torch.device) -> str:
    """The strategy's name: the one that was asked for, or else one that fits the number of processes.

    Raises:
        InputError: the options contradict each other, the number of processes, or the device.
    """
    name = options.strategy or ("ddp" if processes.size > 1 else "single")
    if name == "single" and processes.size > 1:
        raise InputError(f"{processes.size} processes cannot be --strategy single: give --strategy ddp or fsdp.")
    if options.comm_hook != "none" and name != "ddp":
        raise InputError(f"--comm-hook {options.comm_hook} works with DDP only: give --strategy ddp, or leave it out.")
    if device.type == "cpu" and options.precision == "16-mixed":
        raise InputError("CPUs do not train in 16-mixed: give --precision bf16-mixed or 32.")
    if device.type == "cpu" and options.sync_batchnorm:
        raise InputError("torch's synchronised BatchNorm runs on GPUs only: leave out --sync-batchnorm.")
    if name == "fsdp" and options.channels_last:
        raise InputError("torch shards contiguous weights only: leave out --channels-last, or give --strategy ddp.")
    if name == "fsdp" and options.precision == "16-mixed":
        raise InputError("FSDP shards gradients, which loss scaling cannot see whole: give --precision bf16-mixed.")
    return name


def build_strategy(
    name: str, options: ComputeOptions, processes: Processes, communication: Stopwatch
) -> str | Strategy:
    """Lightning's strategy of that name; `communication` measures the time that gradients and weights cost."""
    if name == "single":
        return "auto"
    timeout = timedelta(seconds=options.collective_timeout)
    if name == "fsdp":
        return ShardedStrategy(processes.size, timeout)
    return ReplicatedStrategy(options.comm_hook, options.powersgd_warmup_steps, communication, timeout)


def cluster_environment(name: str) -> ClusterEnvironment:
    """The environment that gives rank and size: torchrun's variables, except for a single process.

    A single process must not take the variables of a surrounding cluster for its own.
    """
    return LightningEnvironment() if name == "single" else TorchElasticEnvironment()


def prepare_task(
    name: str, recipe: Recipe, options: ComputeOptions, communication: Stopwatch, device: torch.device
) -> ClassificationTask:
    """The recipe's task, prepared for the strategy on this device."""
    task = build_task(recipe, options.channels_last)
    if name == "fsdp":
        task.divide = Sharding(communication)
        if options.sync_batchnorm:
            task.model = nn.SyncBatchNorm.convert_sync_batchnorm(task.model)
    if options.compile:
        task.compile_model(device)
    return task


class ReplicatedStrategy(DDPStrategy):
    """DDP with torch's communication hooks on every device; Lightning itself registers them on GPUs only.

    Args:
        hook: none, fp16 or powersgd.
        powersgd_warmup_steps: updates with plain averaging before powersgd starts.
        communication: stopwatch that adds up the time that processes wait for communication.
        timeout: longest wait of a process for the others.
    """

    def __init__(self, hook: str, powersgd_warmup_steps: int, communication: Stopwatch, timeout: timedelta) -> None:
        bucket_mib = POWERSGD_BUCKET_MIB if hook == "powersgd" else None
        super().__init__(timeout=timeout, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mib)
        self._hook_name, self._powersgd_warmup_steps = hook, powersgd_warmup_steps
        self._communication = communication

    def _register_ddp_hooks(self) -> None:
        state, hook = _communication_hook(self._hook_name, self._powersgd_warmup_steps)
        self.model.register_comm_hook(state, timed_hook(hook, self._communication))


def _communication_hook(name: str, powersgd_warmup_steps: int):
    if name == "fp16":
        return dist.group.WORLD, default_hooks.fp16_compress_hook
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            dist.group.WORLD,
            matrix_approximation_rank=POWERSGD_RANK,
            start_powerSGD_iter=powersgd_warmup_steps,
        )
        return state, powerSGD_hook.powerSGD_hook
    return dist.group.WORLD, default_hooks.allreduce_hook


class ShardedStrategy(ModelParallelStrategy):
    """FSDP2: Lightning's strategy around torch's `fully_shard`, on GPUs (NCCL) and CPUs (gloo).

    Checkpoints are whole, in one file. While micro-batches accumulate, gradients stay unsharded and are not exchanged.
    """

    def __init__(self, num_processes: int, timeout: timedelta) -> None:
        super().__init__(num_processes, 1, save_distributed_checkpoint=False, timeout=timeout)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keeps gradients local; Lightning enters this block for all micro-batches of an update but the last."""
        sharded = [module for module in self.lightning_module.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for module in sharded:
                module.set_requires_gradient_sync(True, recurse=False)


class Sharding:
    """Shards a task's parameters over the processes, block by block.

    Args:
        communication: stopwatch that adds up the time of all-gathers and reduce-scatters.
    """

    def __init__(self, communication: Stopwatch) -> None:
        self._communication = communication

    def __call__(self, task: ClassificationTask) -> None:
        """Shards the task, unless it is sharded already."""
        if isinstance(task.model, FSDPModule):
            return
        mesh = task.device_mesh["data_parallel"]
        for child in task.model.children():
            if isinstance(child, nn.Sequential | nn.ModuleList):
                for block in child:
                    fully_shard(block, mesh=mesh)
        fully_shard(task.model, mesh=mesh)
        for module in task.modules():
            if isinstance(module, FSDPModule) and hasattr(module, "set_custom_all_gather"):  # torch 2.8 and newer
                module.set_custom_all_gather(TimedCollective(dist.all_gather_into_tensor, self._communication))
                module.set_custom_reduce_scatter(TimedCollective(dist.reduce_scatter_tensor, self._communication))
