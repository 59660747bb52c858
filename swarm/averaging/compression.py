"""How numbers travel: codecs, and what becomes of the part of a number that a codec leaves out."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hivemind.compression import CompressionBase, CompressionInfo, Float16Compression, NoCompression
from hivemind.proto import runtime_pb2
from torch.nn import functional as F

from recipe.errors import InputError
from swarm.averaging.powersgd import LowRank

BLOCK = 1024
_SMALLEST_SCALE = 1e-38
MAX_VECTORS = 16.0
"""That a member is thought to send in an exchange; a hub of more has a faster line."""


class Float16(Float16Compression):
    """As Hivemind's, which lets NumPy decode; torch takes less time.

    The bits are the same.
    """

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """The inverse, fp32.

        Raises:
            ValueError: the message holds no numbers, or a part of one
        """
        numbers = torch.frombuffer(bytearray(serialized_tensor.buffer), dtype=torch.float16)
        return numbers.float().reshape(tuple(serialized_tensor.size))


class BlockwiseInt8(CompressionBase):
    """8 bits for a number and 32 for the scale of each 1,024 numbers, whose largest magnitude becomes 127.

    After Dettmers, Lewis, Shleifer, Zettlemoyer: 8-bit Optimizers via Block-wise Quantization (ICLR 2022), with evenly
    spaced steps.
    """

    compression_type = runtime_pb2.CompressionType.UNIFORM_8BIT  # on the wire; peers go by the codec of their recipe

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        """A message of n + 4 * ceil(n / 1,024) bytes for a finite tensor of n numbers."""
        numbers = tensor.detach().float().reshape(-1)
        blocks = F.pad(numbers, (0, -len(numbers) % BLOCK)).view(-1, BLOCK)
        scales = (blocks.abs().amax(dim=1) / 127).clamp_min(_SMALLEST_SCALE)
        levels = (blocks / scales[:, None]).round_().to(torch.int8).view(-1)[: len(numbers)]
        buffer = scales.numpy().tobytes() + levels.numpy().tobytes()
        return runtime_pb2.Tensor(
            compression=self.compression_type, buffer=buffer, size=tensor.shape, dtype="float32", requires_grad=False
        )

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """The inverse, fp32.

        Raises:
            ValueError: the message does not have the length that its shape asks for
        """
        size = math.prod(serialized_tensor.size)
        num_blocks = -(-size // BLOCK)
        if len(serialized_tensor.buffer) != size + 4 * num_blocks:
            raise ValueError("an 8-bit message of the wrong length")
        scales = torch.from_numpy(np.frombuffer(serialized_tensor.buffer, np.float32, num_blocks).copy())
        levels = torch.from_numpy(np.frombuffer(serialized_tensor.buffer, np.int8, offset=4 * num_blocks).copy())
        blocks = F.pad(levels.float(), (0, -size % BLOCK)).view(-1, BLOCK) * scales[:, None]
        return blocks.view(-1)[:size].reshape(tuple(serialized_tensor.size))

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Bytes of a number against 4."""
        return 0.25 + 1 / BLOCK


CODECS: dict[str, type[CompressionBase]] = {
    "none": NoCompression,
    "fp16": Float16,
    "int8": BlockwiseInt8,
    "powersgd": NoCompression,
}
"""How the numbers of a pass travel."""


@dataclass(frozen=True)
class Codec:
    """How gradients travel; has to agree between peers.

    Args:
        name: none (float32), fp16, int8, or powersgd: matrices as products of two thin ones
        rank: columns of these thin matrices

    Raises:
        InputError: there is no such codec
    """

    name: str = "none"
    rank: int = 8

    def __post_init__(self):
        if self.name not in CODECS or self.rank < 1:
            raise InputError(
                f"There is no codec {self.name!r} of rank {self.rank}: give one of {', '.join(CODECS)}, rank 1 or more."
            )

    def __str__(self) -> str:
        return f"{self.name}-{self.rank}" if self.name == "powersgd" else self.name

    def make(self) -> CompressionBase:
        """What encodes the numbers of a pass."""
        return CODECS[self.name]()

    def low_rank(self, shapes: Sequence[Sequence[int]], size: int) -> LowRank | None:
        """The two passes over a vector of parameters of these shapes; None where one pass is all."""
        return LowRank(shapes, size, self.rank) if self.name == "powersgd" else None

    def payload_bytes(self, shapes: Sequence[Sequence[int]]) -> float:
        """One gradient, in bytes on the wire."""
        size = sum(map(math.prod, shapes))
        low_rank = self.low_rank(shapes, size)
        ratio = self.make().estimate_compression_ratio(CompressionInfo.from_tensor(torch.zeros(1)))
        return 4 * ratio * (size if low_rank is None else low_rank.numbers)


@torch.no_grad()
def compact(vector: torch.Tensor) -> torch.Tensor:
    """The same numbers, shape [n], in fp16 if nothing is lost by that: if the codec fp16 has decoded them."""
    half = vector.half()
    return half if torch.equal(half.float(), vector) else vector


def bytes_of_member(vector: torch.Tensor, codec: CompressionBase, num_members: int, num_reducers: int) -> float:
    """What a member sends in an exchange, and receives: (N + F - 2) / F vectors, if F of N can be called.

    Args:
        vector: shape [n], fp32
    """
    ratio = codec.estimate_compression_ratio(CompressionInfo.from_tensor(vector))
    vectors = (num_members + max(1, num_reducers) - 2) / max(1, num_reducers)
    return min(max(2.0, vectors), MAX_VECTORS) * ratio * vector.nbytes


class ErrorFeedback:
    """What a peer's encodings have left out so far; it is added to what the peer gives to the next round.

    Kept as a sum over samples, like gradients, so that it counts with the same weight whenever it arrives, and so that
    a reducer can add what its encoded averages have left out of everybody's. After Seide et al., 1-bit Stochastic
    Gradient Descent (Interspeech 2014), and Tang et al., DoubleSqueeze (ICML 2019), which does it on both sides.

    Args:
        codec: how numbers travel
        size: numbers in the averaged vector
    """

    def __init__(self, codec: CompressionBase, size: int):
        self._codec = codec
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

    @torch.no_grad()
    def keep(self, left_out: torch.Tensor, offset: int, samples: float) -> None:
        """Add what encoding the average over `samples` has left out of a part that this peer reduced."""
        if self.left_out is not None:
            self.left_out[offset : offset + len(left_out)].add_(left_out, alpha=samples)
