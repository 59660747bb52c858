"""The gradient of this process's micro-batch alone, at a few places.

While a block is computed, whole weights take the place of this process's pieces. Their gradients are those of its own
micro-batch. Only when the block's backward pass is over does torch add them to those of the other processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from swarm.training.gradient_buffer import Place


class OwnGradients:
    """Reads what one process has computed of gradients that all processes add up.

    Args:
        model: the divided model
        params: the pieces of the parameters whose gradients are averaged
    """

    def __init__(self, model: nn.Module, params: Sequence[nn.Parameter]):
        self._device = params[0].device
        self._whole: dict[int, torch.Tensor] = {}
        """Whole weights of the latest computation, by number. torch keeps these tensors, and frees their memory between
        uses."""
        self._seen, self._handles = torch.empty(0), list[RemovableHandle]()
        for block, weights in _weights_by_block(model, params).items():
            block.register_forward_pre_hook(partial(self._find, weights))  # runs after torch's, which makes them whole

    def _find(self, weights: list[tuple[nn.Module, str, int]], block: nn.Module, inputs: tuple) -> None:
        for module, name, number in weights:
            self._whole[number] = getattr(module, name)

    def watch(self, places: Sequence[Place]) -> None:
        """Prepare for the backward pass of the latest computation: note its gradients at these places."""
        self._seen = torch.zeros(len(places), device=self._device)
        for number in {number for number, _ in places} & self._whole.keys():
            rows = [row for row, (tensor, _) in enumerate(places) if tensor == number]
            at = [places[row][1] for row in rows]
            self._handles.append(self._whole[number].register_hook(partial(self._see, rows, at)))

    def _see(self, rows: list[int], at: list[int], gradient: torch.Tensor) -> None:
        self._seen[rows] += gradient.detach().flatten()[at].float()

    def watched(self) -> torch.Tensor:
        """The gradients that the backward pass has given at these places, fp32, on the device."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return self._seen


def _weights_by_block(
    model: nn.Module, params: Sequence[nn.Parameter]
) -> dict[nn.Module, list[tuple[nn.Module, str, int]]]:
    """The parameters that are made whole together with each block, as (module, name in it, number)."""
    from torch.distributed.fsdp import FSDPModule  # here, because the import takes long

    numbers = {id(param): number for number, param in enumerate(params)}
    blocks = [module for module in model.modules() if isinstance(module, FSDPModule)]  # outer ones come first
    block_of = {module: block for block in blocks for module in block.modules()}
    found: dict[nn.Module, list[tuple[nn.Module, str, int]]] = {block: [] for block in blocks}
    for module, block in block_of.items():
        for name, param in module.named_parameters(recurse=False):
            if id(param) in numbers:
                found[block].append((module, name, numbers[id(param)]))
    return found
