"""Codecs with few bits for each number, and a scale for each block of numbers.

After Dettmers, Lewis, Shleifer, Zettlemoyer: 8-bit Optimizers via Block-wise Quantization (ICLR 2022), with evenly
spaced levels.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from hivemind.compression import CompressionBase, CompressionInfo
from hivemind.proto import runtime_pb2
from torch.nn import functional as F

SMALLEST_SCALE = 1e-38
"""Scale of a block of zeros, by which numbers can still be divided."""
SCALE_BYTES = 4


class ScaledBlocks(CompressionBase):
    """The base of codecs that send a scale for each block of numbers, as float32, and then the numbers."""

    compression_type = runtime_pb2.CompressionType.UNIFORM_8BIT  # on the wire; peers go by the codec of their recipe
    block: int
    """Numbers that share a scale."""

    def num_bytes(self, size: int) -> int:
        """Size of the message for `size` numbers."""
        raise NotImplementedError

    def blocks_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Shape [number of blocks, block], fp32; the last one is filled up with zeros."""
        numbers = tensor.detach().float().reshape(-1)
        return F.pad(numbers, (0, -len(numbers) % self.block)).view(-1, self.block)

    def message(self, tensor: torch.Tensor, scales: torch.Tensor, rest: np.ndarray) -> runtime_pb2.Tensor:
        """The message for a tensor: the scales of its blocks, and the rest."""
        buffer = scales.numpy().tobytes() + rest.tobytes()
        return runtime_pb2.Tensor(
            compression=self.compression_type, buffer=buffer, size=tensor.shape, dtype="float32", requires_grad=False
        )

    def read(self, message: runtime_pb2.Tensor) -> tuple[int, torch.Tensor, np.ndarray]:
        """How many numbers the tensor has, the scales of its blocks, and the bytes of the rest.

        Raises:
            ValueError: the message does not have the length that its shape asks for
        """
        size = math.prod(message.size)
        if len(message.buffer) != self.num_bytes(size):
            raise ValueError(f"{len(message.buffer)} bytes for {size} numbers")
        num_blocks = -(-size // self.block)
        scales = torch.from_numpy(np.frombuffer(message.buffer, np.float32, num_blocks).copy())
        return size, scales, np.frombuffer(message.buffer, np.uint8, offset=SCALE_BYTES * num_blocks)


class Blockwise(ScaledBlocks):
    """Rounds numbers to levels: the largest magnitude of each block becomes the largest level."""

    bits: int
    """Bits of a level: a whole number between plus and minus 2 ** (bits - 1) - 1."""

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        """A message of `num_bytes(n)` bytes for a finite tensor of n numbers."""
        blocks = self.blocks_of(tensor)
        largest_level = 2 ** (self.bits - 1) - 1
        scales = (blocks.abs().amax(dim=1) / largest_level).clamp_min(SMALLEST_SCALE)
        levels = (blocks / scales[:, None]).round_().to(torch.int8).view(-1)[: tensor.numel()]
        return self.message(tensor, scales, self._pack(levels.numpy()))

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """The tensor in a message, fp32.

        Raises:
            ValueError: the message does not have the length that its shape asks for
        """
        size, scales, packed = self.read(serialized_tensor)
        blocks = self.blocks_of(torch.from_numpy(self._unpack(packed, size))) * scales[:, None]
        return blocks.view(-1)[:size].reshape(tuple(serialized_tensor.size))

    def num_bytes(self, size: int) -> int:
        """Size of the message for `size` numbers."""
        return SCALE_BYTES * -(-size // self.block) + -(-size * self.bits // 8)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Bytes of a number, relative to the 4 of float32."""
        return (self.bits / 8 + SCALE_BYTES / self.block) / 4

    def _pack(self, levels: np.ndarray) -> np.ndarray:
        """Levels, shape [n], int8, as bytes."""
        return levels.view(np.uint8)

    def _unpack(self, packed: np.ndarray, size: int) -> np.ndarray:
        """Bytes as levels, shape [size], int8."""
        return packed.view(np.int8).copy()


class BlockwiseInt8(Blockwise):
    """8 bits for a number, and a scale for each 1,024 numbers."""

    block, bits = 1024, 8


class BlockwiseInt4(Blockwise):
    """4 bits for a number, and a scale for each 256 numbers: with only 15 levels, blocks have to be smaller."""

    block, bits = 256, 4

    def _pack(self, levels: np.ndarray) -> np.ndarray:
        nibbles = np.pad(levels, (0, len(levels) % 2)).view(np.uint8) & 0xF
        return nibbles[0::2] | nibbles[1::2] << 4

    def _unpack(self, packed: np.ndarray, size: int) -> np.ndarray:
        nibbles = np.stack([packed & 0xF, packed >> 4], axis=1).reshape(-1)[:size]
        return (nibbles ^ 8).astype(np.int8) - 8  # the fourth bit is the sign: 0..15 become -8..7
