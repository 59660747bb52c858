"""How a model is divided among the processes of an island: with torch's `fully_shard`, block by block.

Each weight is cut along its first dimension, as `torch.chunk` cuts, and each process holds one piece. Its gradient and
the optimizer's statistics are cut in the same way. A block is whole only while it is computed.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torchmetrics import Metric

from recipe.errors import InputError, first_line

ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW),
    *(torch.optim.RMSprop, torch.optim.Adagrad),
)
"""Optimizers that change each number by its own gradient and statistics only. So a step can be made on pieces."""


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError if the optimizer's step on pieces of the weights may differ from its step on the whole."""
    if type(optimizer) not in ELEMENTWISE:
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise InputError(
            f"The optimizer {type(optimizer).__name__} cannot be divided among processes: take one of {names}, or "
            "inside='ddp'."
        )


def divide(module: nn.Module, device: torch.device, size: int) -> list[FSDPModule]:
    """Cut the parameters; each process keeps its pieces of them, on its device.

    Args:
        module: its children are models, or lists of them; the blocks of a model are in its Sequential and ModuleList
        device: the device of this process
        size: number of processes

    Returns:
        the models, each of which is called as a whole

    Raises:
        InputError: there are parameters that cannot be cut
    """
    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise InputError(f"inside='fsdp' needs torch 2.8 or newer, and this is {torch.__version__}: install that.")
    if any(True for _ in module.parameters(recurse=False)):
        raise InputError("Weights of the LightningModule itself cannot be divided: put them into a module of its own.")
    mesh = init_device_mesh(device.type, (size,))
    roots = []
    for child in module.children():
        models = list(child) if isinstance(child, nn.ModuleList) else [child]
        roots += [model for model in models if any(True for _ in model.parameters())]
    try:
        for root in roots:
            for block in _blocks_of(root):
                fully_shard(block, mesh=mesh, reshard_after_forward=True)
            fully_shard(root, mesh=mesh, reshard_after_forward=True)
    except (NotImplementedError, ValueError) as error:
        raise InputError(f"This model cannot be divided ({first_line(error)}): take inside='ddp'.") from error
    for part in module.modules():
        if isinstance(part, FSDPModule):  # gradients are sums over samples, not means over processes
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        elif isinstance(part, Metric):  # torch has a default group now, but each process computes its own metrics
            part.distributed_available_fn = _is_alone
    return roots


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    lists = [model] if isinstance(model, nn.Sequential) else model.children()
    blocks = [block for found in lists if isinstance(found, nn.Sequential | nn.ModuleList) for block in found]
    return [block for block in blocks if any(True for _ in block.parameters())]


def _is_alone() -> bool:
    return False
