"""Stochastic depth that leaves out the same samples on every device."""

import torch
from timm.layers import DropPath
from torch import nn


class PortableDropPath(DropPath):
    """timm's `DropPath`, but what it leaves out is drawn on the CPU, one number for each sample.

    A GPU draws other numbers from the same seed. With these, what one peer has computed can be computed again by
    another one, whatever device it has; also a slice of a micro-batch at a time.
    """

    slice_of: tuple[int, int] | None = None
    """(first, samples): what is computed begins at that sample of a micro-batch of so many; None: it is a whole one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A residual branch, shape (batch, ...)."""
        if not self.training or not self.drop_prob:
            return x
        keeps = 1 - self.drop_prob
        first, samples = self.slice_of or (0, len(x))
        drawn = torch.rand(samples)[first : first + len(x)]
        factors = (drawn < keeps).to(x.dtype) / (keeps if self.scale_by_keep else 1)
        return x * factors.to(x.device).view(-1, *(1,) * (x.ndim - 1))


def make_portable(model: nn.Module) -> None:
    """Its stochastic depth is that of `PortableDropPath` from now on."""
    for module in [*model.modules()]:
        for name, child in module.named_children():
            if type(child) is DropPath:
                setattr(module, name, PortableDropPath(child.drop_prob, child.scale_by_keep))
