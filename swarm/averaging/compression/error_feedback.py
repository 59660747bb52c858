"""What becomes of the part of a number that a codec leaves out."""

from __future__ import annotations

import copy

import torch
from hivemind.compression import CompressionBase, CompressionInfo, NoCompression


class ErrorFeedback:
    """What a peer's encodings have left out so far; it is added to what the peer gives to the next round.

    Kept as a sum over samples, like gradients, so that it counts with the same weight whenever it arrives, and so that
    a reducer can add what its encoded averages have left out of everybody's. After Seide et al., 1-bit Stochastic
    Gradient Descent (Interspeech 2014), and Tang et al., DoubleSqueeze (ICML 2019), which does it on both sides.

    Args:
        codec: how numbers travel
        size: numbers in the averaged vector
        decay: what is left, a round later, of what a round has left out; 1 for all of it
    """

    def __init__(self, codec: CompressionBase, size: int, decay: float = 1.0):
        self._codec, self._decay, self._step = codec, decay, 0
        self.left_out: torch.Tensor | None = None if isinstance(codec, NoCompression) else torch.zeros(size)
        """Shape [size], fp32, sums over samples; None if nothing is ever left out."""

    def part(self, part: slice) -> ErrorFeedback:
        """The same memory, of a part of the vector."""
        same = copy.copy(self)
        same.left_out = None if self.left_out is None else self.left_out[part]
        return same

    def reset(self) -> None:
        """This peer has taken over other weights: what is left belongs to old ones."""
        if self.left_out is not None:
            self.left_out.zero_()

    @torch.no_grad()
    def add_to(self, part: torch.Tensor, info: CompressionInfo, offset: int, samples: float, travels: bool) -> None:
        """Make a part of this peer's contribution what will arrive of it, in place, and keep the rest.

        Args:
            part: shape [n], fp32, a mean over `samples`
            info: Hivemind's description of it
            offset: of its first number in the vector
            samples: this peer's weight; a listener gives nothing and keeps everything
            travels: False for parts that this peer reduces itself
        """
        if self.left_out is None or samples == 0 or not torch.isfinite(part).all():
            return
        left_out = self.left_out[offset : offset + len(part)]
        part.add_(left_out, alpha=1 / samples)
        if not travels:
            left_out.zero_()
            return
        arrives = self._codec.extract(self._codec.compress(part, info))
        torch.sub(part, arrives, out=left_out).mul_(samples)
        part.copy_(arrives)

    def come_to(self, step: int) -> None:
        """Before the round of this step: what waits has faded with each update since the last one.

        A round that failed and is tried again is of the same step, so what it gives is not faded twice.
        """
        if self.left_out is not None and self._decay < 1:
            self.left_out.mul_(self._decay ** max(0, step - self._step))
        self._step = step

    @torch.no_grad()
    def keep(self, left_out: torch.Tensor, offset: int, samples: float) -> None:
        """Add what encoding the average over `samples` has left out of a part that this peer reduced."""
        if self.left_out is not None:
            self.left_out[offset : offset + len(left_out)].add_(left_out, alpha=samples)
