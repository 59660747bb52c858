"""Stochastic depth that leaves out the same samples on every device."""

import torch
from timm.layers import DropPath
from torch import nn


class PortableDropPath(DropPath):
    """timm's `DropPath`, but what it leaves out is drawn on the CPU, one number for each sample.

    A GPU draws other numbers from the same seed. With these, what one peer has computed can be computed again by
    another one, whatever device it has.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A residual branch, shape (batch, ...)."""
        if not self.training or not self.drop_prob:
            return x
        keeps = 1 - self.drop_prob
        factors = (torch.rand(len(x)) < keeps).to(x.dtype) / (keeps if self.scale_by_keep else 1)
        return x * factors.to(x.device).view(-1, *(1,) * (x.ndim - 1))


def make_portable(model: nn.Module) -> None:
    """Its stochastic depth is that of `PortableDropPath` from now on."""
    for module in [*model.modules()]:
        for name, child in module.named_children():
            if type(child) is DropPath:
                setattr(module, name, PortableDropPath(child.drop_prob, child.scale_by_keep))
