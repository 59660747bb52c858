"""Error feedback: what a codec leaves out of a number in one round is added in a later one."""

from __future__ import annotations

import copy
import math

import torch
from hivemind.compression import CompressionBase, CompressionInfo, NoCompression

from swarm.averaging.compression.codec import largest_number


class ErrorFeedback:
    """Keeps what a peer's encodings have left out, and adds it to what the peer encodes in the next round.

    It is kept as a sum over samples, like gradients, so that it counts with the same weight whenever it arrives. A
    sender adds it to its contribution. A reducer adds it to the mean of its share. It was left out of what all members
    gave, so in the contribution of one member it would look like a lie. After Seide et al., 1-bit Stochastic
    Gradient Descent (Interspeech 2014), and Tang et al., DoubleSqueeze (ICML 2019), which does it on both sides.

    What the codec cuts off, because it is beyond its largest number, is not kept. Else a single spike would come back
    as that number in each of hundreds of rounds.

    Args:
        codec: how numbers travel
        size: numbers in the averaged vector
        decay: share of what a round has left out that still counts a round later; 1 for all of it
    """

    def __init__(self, codec: CompressionBase, size: int, decay: float = 1.0):
        self._codec, self._decay, self._step = codec, decay, 0
        self.left_out: torch.Tensor | None = None if isinstance(codec, NoCompression) else torch.zeros(size)
        """Shape [size], fp32, sums over samples; None if nothing is ever left out."""

    def use(self, codec: CompressionBase, decay: float) -> None:
        """Change the codec; what the old one has left out goes with what the new one sends."""
        self._codec, self._decay = codec, decay

    def part(self, part: slice) -> ErrorFeedback:
        """The same memory for a part of the vector; both share their numbers."""
        same = copy.copy(self)
        same.left_out = None if self.left_out is None else self.left_out[part]
        return same

    def reset(self) -> None:
        """Forget everything: this peer has taken over other weights, and what is left belongs to the old ones."""
        if self.left_out is not None:
            self.left_out.zero_()

    @torch.no_grad()
    def add_to(self, part: torch.Tensor, info: CompressionInfo, offset: int, samples: float) -> None:
        """Add what was left out to a part of this peer's contribution, round it as the codec will, and keep the rest.

        Args:
            part: shape [n], fp32, a mean over `samples`; becomes what will arrive of it, in place
            info: Hivemind's description of it
            offset: place of its first number in the vector
            samples: this peer's weight; a listener gives nothing and keeps everything
        """
        if self.left_out is None or samples == 0 or not torch.isfinite(part).all():
            return
        left_out = self.left_out[offset : offset + len(part)]
        part.add_(left_out, alpha=1 / samples)
        self._cut_off(part)
        arrives = self._codec.extract(self._codec.compress(part, info))
        torch.sub(part, arrives, out=left_out).mul_(samples)
        part.copy_(arrives)

    @torch.no_grad()
    def with_left_out(self, mean: torch.Tensor, offset: int, samples: float) -> torch.Tensor:
        """A mean of this peer's share over `samples`, plus what earlier rounds left out, which is kept until `keep`.

        Args:
            mean: shape [n], fp32
            offset: place of its first number in the vector
        """
        if self.left_out is None:
            return mean
        whole = mean.add(self.left_out[offset : offset + len(mean)], alpha=1 / samples)
        self._cut_off(whole)
        return whole

    def _cut_off(self, numbers: torch.Tensor) -> None:
        """Cut numbers off in place, at the codec's largest number, as the codec does."""
        most = largest_number(self._codec)
        if most < math.inf:
            numbers.clamp_(-most, most)

    def come_to(self, step: int) -> None:
        """Fade what waits, once for each update since the last round; called before the round of this step.

        A round that failed and is tried again is of the same step, so what it gives is not faded twice.
        """
        if self.left_out is not None and self._decay < 1:
            self.left_out.mul_(self._decay ** max(0, step - self._step))
        self._step = step

    @torch.no_grad()
    def keep(self, left_out: torch.Tensor, offset: int, samples: float) -> None:
        """Replace the memory of a part that this peer reduced by what the encoded mean over `samples` has left out.

        Args:
            left_out: shape [n], fp32
            offset: place of its first number in the vector
        """
        if self.left_out is not None:
            torch.mul(left_out, samples, out=self.left_out[offset : offset + len(left_out)])
