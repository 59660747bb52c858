"""Stochastic depth that drops the same samples on every device."""

import torch
from timm.layers import DropPath
from torch import nn


class PortableDropPath(DropPath):
    """timm's `DropPath`, except that the dropped samples are drawn on the CPU, one number for each sample.

    A GPU draws other numbers from the same seed. With numbers from the CPU, any peer can recompute what another one
    computed, whatever device it has, also a slice of a micro-batch at a time.
    """

    slice_of: tuple[int, int] | None = None
    """(first, samples) if the input is a slice: it begins at sample `first` of a micro-batch of `samples`. None: it is
    a whole micro-batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop the residual branch x, shape (batch, ...), for some samples."""
        if not self.training or not self.drop_prob:
            return x
        keeps = 1 - self.drop_prob
        first, samples = self.slice_of or (0, len(x))
        drawn = torch.rand(samples)[first : first + len(x)]
        factors = (drawn < keeps).to(x.dtype) / (keeps if self.scale_by_keep else 1)
        return x * factors.to(x.device).view(-1, *(1,) * (x.ndim - 1))


def make_portable(model: nn.Module) -> None:
    """Replace the model's `DropPath` modules by `PortableDropPath`."""
    for module in [*model.modules()]:
        for name, child in module.named_children():
            if type(child) is DropPath:
                setattr(module, name, PortableDropPath(child.drop_prob, child.scale_by_keep))
