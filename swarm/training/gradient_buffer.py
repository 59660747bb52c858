"""The vector that a round averages: a model's gradients, summed over micro-batches, and its float buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import nn

from swarm.averaging.compression.fragments import Fragments

Place = tuple[int, int]
"""The place of a number in a gradient: (index of the parameter, index in the flattened parameter)."""


def averaged_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
    """The parameters that the optimizer changes, and the model's float buffers."""
    return trained_parameters(optimizer), [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that the optimizer changes now."""
    return [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]


def has_float_buffers(model: nn.Module) -> bool:
    """Whether the model has running statistics, which are averaged as well."""
    return any(buffer.is_floating_point() for buffer in model.buffers())


def in_a_row(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors one after the other: shape [m], fp32, a copy on the CPU."""
    flat = [buffer.detach().reshape(-1).float().cpu() for buffer in buffers]
    return torch.cat(flat) if flat else torch.zeros(0)


def numbers_at(
    places: Sequence[Place], gradients: Mapping[int, torch.Tensor | None], device: torch.device
) -> torch.Tensor:
    """The numbers at these places of the gradients, fp32, on this device; 0 where there is no gradient."""
    zero = torch.zeros((), device=device)
    found = [zero if gradients.get(tensor) is None else gradients[tensor].flatten()[place] for tensor, place in places]
    return torch.stack([number.float() for number in found])


class GradientVector:
    """Adds up gradients on the model's device, and carries their mean to and from shared memory.

    The backward pass itself adds to the sum, as it would to `param.grad`. So nothing is copied or allocated each time.

    Args:
        params: parameters whose gradients are averaged, n numbers in all
        buffers: float buffers (BatchNorm's running statistics), m numbers in all; averaged with the same weights, so
            that all peers evaluate the same model
        overlap: gradients are added up while a round runs, which takes n numbers more
        fragments: parts of the parameters, of which one travels with each update; the buffers travel with each

    Raises:
        InputError: there are fewer parameters than fragments
    """

    def __init__(
        self, params: list[nn.Parameter], buffers: list[torch.Tensor], overlap: bool = False, fragments: int = 1
    ):
        self.params, self._buffers = params, buffers
        sizes = [param.numel() for param in params]
        num_params, num_buffers = sum(sizes), sum(buffer.numel() for buffer in buffers)
        self.fragments = Fragments.of(sizes, fragments, num_buffers)
        self._sum = torch.zeros(num_params, dtype=torch.float32, device=params[0].device)
        self._unit = 1
        self.average = torch.zeros_like(self._sum) if overlap else self._sum
        self.views = self.views_of(self._sum)
        self.wire = torch.zeros(max(self.fragments.sizes), dtype=torch.float32).share_memory_()
        """The numbers that travel: fp32, in shared memory; shape [n + m] if there is one fragment."""
        self._places: Sequence[Place] = ()
        self._index = torch.empty(0, dtype=torch.long)
        """The indices of `_places` in the sum."""
        self._before = torch.empty(0)
        self._buffers_before: list[torch.Tensor] = []
        self.clears = 0
        """How often the sum has been set to zero."""
        self.reset()

    @property
    def weights(self) -> list[torch.Tensor]:
        """The weights that all peers have in common."""
        return self.params

    @property
    def sizes(self) -> list[int]:
        """The number of elements of each parameter."""
        return [param.numel() for param in self.params]

    @property
    def own_tensors(self) -> list[torch.Tensor]:
        """The tensors that only the trainer uses: all but the wire."""
        return [self._sum, self.average]

    def views_of(self, vector: torch.Tensor, params: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Views of the first numbers of a vector, in the shapes of these parameters; by default of all parameters."""
        params = self.params if params is None else params
        sizes = [param.numel() for param in params]
        parts = vector[: sum(sizes)].split(sizes)
        return [part.view(param.shape) for param, part in zip(params, parts, strict=True)]

    @torch.no_grad()
    def receive(self, samples: int) -> None:
        """Let the backward pass that comes next add its gradients, means over `samples`, to the sum."""
        self.sum_in_units_of(samples)
        for param, view in zip(self.params, self.views, strict=True):
            param.grad = view if param.dtype == view.dtype else None

    @torch.no_grad()
    def sum_in_units_of(self, samples: int) -> torch.Tensor:
        """Rescale the sum so that it is stored divided by `samples`; return it: shape [n], on the model's device."""
        if samples != self._unit:
            self._sum.mul_(self._unit / samples)
            self._unit = samples
        return self._sum

    def watch(self, places: Sequence[Place]) -> None:
        """Prepare, before a backward pass, for `watched`: note the numbers at these places."""
        if places is not self._places:
            offsets = [0, *accumulate(self.sizes)]
            index = [offsets[number] + place for number, place in places]
            self._places, self._index = places, torch.tensor(index, device=self._sum.device)
        self._before = self._sum[self._index] * self._unit

    def watched(self) -> torch.Tensor:
        """What the backward pass has added at these places: sums over samples, fp32, on the model's device."""
        return self._sum[self._index] * self._unit - self._before

    def gradient_of(self, loss: Callable[[], torch.Tensor], places: Sequence[Place]) -> torch.Tensor:
        """The gradient, at these places, of a loss that is computed in here: fp32, on the CPU. The sum stays as is."""
        tensors = sorted({tensor for tensor, _ in places})
        # Not through `param.grad`, which holds this peer's sum or the average.
        loss = loss()
        gradients = torch.autograd.grad(loss, [self.params[tensor] for tensor in tensors], allow_unused=True)
        by_tensor = dict(zip(tensors, gradients, strict=True))
        return numbers_at(places, by_tensor, loss.device).cpu()

    @property
    def unit(self) -> int:
        """The number by which the stored sum is divided: sum over samples = `_sum` × `unit`."""
        return self._unit

    @property
    def buffers(self) -> torch.Tensor:
        """The float buffers, one after the other: shape [m], fp32, a copy on the CPU."""
        return in_a_row(self._buffers)

    @torch.no_grad()
    def take_buffers(self, flat: torch.Tensor) -> None:
        """Take over the float buffers from a vector of shape [m]."""
        offset = 0
        for buffer in self._buffers:
            buffer.copy_(flat[offset : offset + buffer.numel()].view(buffer.shape))
            offset += buffer.numel()

    def _clear(self) -> None:
        self._sum.zero_()
        self.clears += 1

    @torch.no_grad()
    def collect(self) -> None:
        """End a backward pass: add the gradients that it has not added to the sum by itself."""
        for param, view in zip(self.params, self.views, strict=True):
            if param.grad is None or param.grad is view:
                continue
            if param.dtype == view.dtype:
                view.copy_(param.grad)  # with create_graph=True autograd makes a new tensor of the sum
            else:
                view.add_(param.grad)
        self.release()

    def reset(self) -> None:
        """Begin a step: set the sum to zero, and note the buffers."""
        self._clear()
        self._buffers_before = [buffer.clone() for buffer in self._buffers]

    def adopt(self) -> None:
        """Take the model's weights, which have become the swarm's, as common weights, and begin a step."""
        self.reset()

    @torch.no_grad()
    def drop(self) -> None:
        """Forget the samples of this step, and undo their effect on the buffers."""
        self._clear()
        for buffer, before in zip(self._buffers, self._buffers_before, strict=True):
            buffer.copy_(before)

    @property
    def is_finite(self) -> bool:
        return self._has_finite_sum and all(torch.isfinite(buffer).all() for buffer in self._buffers)

    @property
    def _has_finite_sum(self) -> bool:
        return bool(torch.isfinite(self._sum.sum()) or torch.isfinite(self._sum).all())

    @torch.no_grad()
    def to_wire(self, samples: int) -> None:
        """Write the mean over `samples` and the buffers onto the wire. The sum begins anew; `take_back` undoes that."""
        self._write(self._sum.mul_(self._unit / max(1, samples)))
        self.reset()

    def _write(self, vector: torch.Tensor) -> None:
        split = vector.numel()
        self.wire[:split].copy_(vector)
        self._write_buffers()

    def _write_buffers(self) -> None:
        if self._buffers:
            self.wire[self._sum.numel() :].copy_(self.buffers)

    @torch.no_grad()
    def take_back(self, samples: int) -> None:
        """Add what was written for a failed round to the sum again, so that it counts for the next round."""
        self._sum.add_(self.wire[: self._sum.numel()].to(self._sum.device), alpha=samples / self._unit)

    def depart(self) -> None:
        """Begin a step whose round already runs; this peer gives nothing to that round."""
        self.reset()

    def from_wire(self) -> None:
        """Take over the average that a round left on the wire."""
        self.take(self.wire)

    @torch.no_grad()
    def take(self, average: torch.Tensor) -> None:
        """Take over an average, shape [n + m]."""
        split = self._sum.numel()
        self._take_vector(average[:split])
        self.take_buffers(average[split:])
        self._buffers_before = [buffer.clone() for buffer in self._buffers]  # `drop` restores these

    def _take_vector(self, average: torch.Tensor) -> None:
        self.average.copy_(average)

    @torch.no_grad()
    def average_alone(self, samples: int) -> None:
        """Take the mean of this peer's own gradients as the average, for an update without other peers."""
        torch.mul(self._sum, self._unit / samples, out=self.average)

    @torch.no_grad()
    def show(self) -> None:
        """Write the average of this peer alone onto the wire, for peers that follow its updates."""
        self._write(self.average)

    @torch.no_grad()
    def follow(self, average: torch.Tensor) -> None:
        """Hand over the average of an update that other peers have made; drop what this peer has computed.

        Args:
            average: shape [n + m]
        """
        self.drop()
        self.take(average)
        self.hand_over()

    def hand_over(self) -> None:
        """Put the average into `param.grad`."""
        self._hand_over(self.params, self.average)

    def _hand_over(self, params: list[nn.Parameter], vector: torch.Tensor) -> None:
        for param, view in zip(params, self.views_of(vector, params), strict=True):
            param.grad = view.to(param.device, param.dtype)  # no copy if device and dtype are the parameter's

    def release(self) -> None:
        for param in self.params:
            param.grad = None
