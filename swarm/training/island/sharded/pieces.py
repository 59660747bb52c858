"""What a process of a divided island holds: pieces of the weights, of the gradients' sums and of the statistics.

The first process writes into the pieces of the others and reads them, one tensor after the other, so that no process
ever holds more than one tensor twice.
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
"""What elementwise optimizers keep for each weight. In a word, they are numbered from 1."""
COUNT = 1 + STATISTICS.index("step")
"""A number of which each process has its own."""


def is_divided(tensor: torch.Tensor) -> bool:
    """Whether each process holds a piece of it: torch's DTensor, which takes long to import."""
    return hasattr(tensor, "to_local")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor: its piece, or all of it if it is not divided."""
    return tensor.detach().to_local() if is_divided(tensor) else tensor.detach()


def piece_of(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """A view: what of this tensor is a process's; empty where there are more processes than rows."""
    rows = -(-len(whole) // size)
    return whole[min(rank * rows, len(whole)) : min((rank + 1) * rows, len(whole))]


class Pieces:
    """What one process holds of the weights, of their gradients and of the optimizer's statistics.

    Args:
        channel: to the others
        model: divided; its parameters are numbered in their order
        optimizer: over some of them, which are numbered in the order of its groups
    """

    def __init__(self, channel: Channel, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.channel, self.optimizer = channel, optimizer
        self.weights = list(model.parameters())
        self.optimized = [param for group in optimizer.param_groups for param in group["params"]]
        self.params, _ = averaged_tensors(model, optimizer)
        """Those whose gradients are averaged."""
        self.sums: list[torch.Tensor | None] = [None] * len(self.params)
        """Sums of their gradients over samples; None where nothing has come yet."""
        self.own = OwnGradients(model, self.params)

    # ---- gradients --------------------------------------------------------------------------------------------------

    def receive(self) -> None:
        """The backward pass that comes next adds its gradients to the sums."""
        for param, own in zip(self.params, self.sums, strict=True):
            param.grad = own

    def collect(self) -> None:
        """The backward pass is over."""
        self.sums = [param.grad for param in self.params]
        self.release()

    def release(self) -> None:
        """The optimizer has made its step."""
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def put(self, number: int, came: torch.Tensor, adds: bool) -> None:
        """Into this process's piece of a sum, or on top of it."""
        held = self.sum_of(number)
        if adds:
            held.add_(came.to(held.device))
        else:
            held.copy_(came)

    @torch.no_grad()
    def forget(self) -> None:
        """The sums begin anew."""
        for own in self.sums:
            if own is not None:
                own.zero_()

    def sum_of(self, number: int) -> torch.Tensor:
        """This process's piece of the sum, which is 0 where nothing has come yet."""
        if self.sums[number] is None:
            self.sums[number] = torch.zeros_like(self.params[number]).detach()
        return local_of(self.sums[number])

    @property
    def is_finite(self) -> bool:
        """Whether the sums on this process are."""
        return all(bool(torch.isfinite(local_of(own)).all()) for own in self.sums if own is not None)

    def show_average(self) -> None:
        """What has come in place of the sums is what the optimizer finds."""
        self.receive()

    # ---- weights and statistics -------------------------------------------------------------------------------------

    def tensor(self, kind: int, number: int) -> torch.Tensor:
        """A weight (kind 0), or a statistic."""
        if kind == WEIGHT:
            return self.weights[number]
        return self.optimizer.state[self.optimized[number]][STATISTICS[kind - 1]]

    def renew(self) -> None:
        """All statistics are forgotten; `tensor_for` makes them anew."""
        for param in self.optimized:
            self.optimizer.state[param] = {}

    @torch.no_grad()
    def tensor_for(self, kind: int, number: int) -> torch.Tensor:
        """Where a weight or a statistic is to be written."""
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
        """What the optimizer's step depends on beside gradients and statistics, group by group; JSON can say it."""
        return [{name: value for name, value in group.items() if name != "params"} for group in self.groups]

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @torch.no_grad()
    def step(self, settings: list[dict[str, Any]]) -> None:
        """Make the optimizer step that the first process has made on its own pieces."""
        for group, given in zip(self.groups, settings, strict=True):
            group.update({name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
        self.optimizer.step()
        self.release()
        self.forget()
