"""What a process of an island holds of a divided model: pieces of weights, of sums of gradients and of statistics.

The first process reads and writes the pieces of the others one tensor after the other. So no process ever holds more
than one tensor twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from swarm.state_sync.training_state import counts_on_device
from swarm.training.gradient_buffer import averaged_tensors
from swarm.training.island.channel import Channel
from swarm.training.island.sharded.own_gradients import OwnGradients

WEIGHT = 0
STATISTICS = (
    *("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    *("momentum_buffer", "square_avg", "grad_avg", "sum"),
)
"""The statistics that elementwise optimizers keep for each weight. In the numbers of a word they count from 1."""
COUNT = 1 + STATISTICS.index("step")
"""The kind of an optimizer's step count: it is not divided, and each process has its own copy."""


def is_divided(tensor: torch.Tensor) -> bool:
    """Whether each process holds a piece of the tensor, that is, whether it is a DTensor of torch."""
    return hasattr(tensor, "to_local")  # the class itself takes long to import


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This process's piece of a tensor, or all of it if it is not divided."""
    return tensor.detach().to_local() if is_divided(tensor) else tensor.detach()


def piece_of(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """A view of a process's piece of this tensor; it may be empty if rows do not suffice for all processes."""
    rows = -(-len(whole) // size)
    return whole[min(rank * rows, len(whole)) : min((rank + 1) * rows, len(whole))]


class Pieces:
    """What one process holds of the weights, of their gradients and of the optimizer's statistics.

    Args:
        channel: the connection to the others
        model: the divided model, whose parameters are numbered in their order
        optimizer: the optimizer over some of them, which it numbers in the order of its groups
    """

    def __init__(self, channel: Channel, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.channel, self.optimizer = channel, optimizer
        self.weights = list(model.parameters())
        self.optimized = [param for group in optimizer.param_groups for param in group["params"]]
        self.params, _ = averaged_tensors(model, optimizer)
        """The parameters whose gradients are averaged."""
        self.sums: list[torch.Tensor | None] = [None] * len(self.params)
        """Sums over samples of their gradients; None where there is no gradient yet."""
        self.own = OwnGradients(model, self.params)

    # ---- gradients --------------------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Let the backward pass that comes next add its gradients to the sums."""
        for param, own in zip(self.params, self.sums, strict=True):
            param.grad = own

    def collect(self) -> None:
        """End a backward pass: take the sums out of `param.grad`."""
        self.sums = [param.grad for param in self.params]
        self.release()

    def release(self) -> None:
        """Clear `param.grad`."""
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def put(self, number: int, came: torch.Tensor, adds: bool) -> None:
        """Write numbers into this process's piece of a sum, or add them to it."""
        held = self.sum_of(number)
        if adds:
            held.add_(came.to(held.device))
        else:
            held.copy_(came)

    @torch.no_grad()
    def forget(self) -> None:
        """Set the sums to zero."""
        for own in self.sums:
            if own is not None:
                own.zero_()

    def sum_of(self, number: int) -> torch.Tensor:
        """This process's piece of a sum, which is 0 where there is no gradient yet."""
        if self.sums[number] is None:
            self.sums[number] = torch.zeros_like(self.params[number]).detach()
        return local_of(self.sums[number])

    @property
    def is_finite(self) -> bool:
        """Whether the sums on this process are finite."""
        return all(bool(torch.isfinite(local_of(own)).all()) for own in self.sums if own is not None)

    def show_average(self) -> None:
        """Put the average, which has replaced the sums, into `param.grad` for the optimizer."""
        self.receive()

    # ---- weights and statistics -------------------------------------------------------------------------------------

    def tensor(self, kind: int, number: int) -> torch.Tensor:
        """A weight (kind `WEIGHT`), or a statistic."""
        if kind == WEIGHT:
            return self.weights[number]
        return self.optimizer.state[self.optimized[number]][STATISTICS[kind - 1]]

    def renew(self) -> None:
        """Forget all statistics; `tensor_for` makes new ones."""
        for param in self.optimized:
            self.optimizer.state[param] = {}

    @torch.no_grad()
    def tensor_for(self, kind: int, number: int) -> torch.Tensor:
        """The tensor into which a weight or a statistic is to be written; a statistic is made anew."""
        if kind != WEIGHT:
            param = self.optimized[number]
            if kind == COUNT:
                made = torch.zeros((), device=param.device if counts_on_device(self.optimizer) else "cpu")
            else:
                made = torch.zeros_like(param).detach()
            self.optimizer.state[param][STATISTICS[kind - 1]] = made
        return self.tensor(kind, number)

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The optimizer's settings, such as learning rates, group by group; they can be encoded as JSON."""
        return [{name: value for name, value in group.items() if name != "params"} for group in self.groups]

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @torch.no_grad()
    def step(self, settings: list[dict[str, Any]]) -> None:
        """Make the optimizer step, with these settings, that the first process has made on its own pieces."""
        for group, given in zip(self.groups, settings, strict=True):
            group.update({name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
        self.optimizer.step()
        self.release()
        self.forget()
