"""The codecs, which encode numbers for the network, by the names that recipes give them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hivemind.compression import CompressionBase, CompressionInfo, NoCompression

from recipe.errors import InputError
from swarm.averaging.compression.blockwise import BlockwiseInt4, BlockwiseInt8
from swarm.averaging.compression.float16 import Float16
from swarm.averaging.compression.powersgd import LowRank
from swarm.averaging.compression.top_k import ChunkedTopK

MAX_VECTORS = 16.0
"""For time limits, a member is assumed to send at most so many vectors in an exchange. A reducer that sends more is
assumed to have a faster line."""

CODECS: dict[str, type[CompressionBase]] = {
    "none": NoCompression,
    "fp16": Float16,
    "int8": BlockwiseInt8,
    "int4": BlockwiseInt4,
    "topk": ChunkedTopK,
    "powersgd": NoCompression,
}
"""What encodes the numbers of a pass, by the name of the codec."""
TOO_COARSE_FOR_BUFFERS = ("int8", "int4", "topk")
"""Codecs that cannot carry running statistics. These are averaged as they are: a variance that is off by a level, or is
not sent, is useless."""
FOR_LOCAL_STEPS = ("topk",)
"""Codecs for local steps only: with them, a synchronous update would be made of old gradients for the most part."""
TOP_K_DECAY = 0.9
"""Share of what waits that is left after each round: what waits for long is out of date. SparseLoCo has 0.95
(section 3); which is better here was not shown."""


@dataclass(frozen=True)
class Codec:
    """How gradients are encoded for the network; equal on all peers.

    Args:
        name: none (float32), fp16, int8, int4, powersgd (matrices as products of two thin ones), or topk (the largest
            numbers only)
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

    @property
    def largest_number(self) -> float:
        """Magnitude beyond which numbers are cut off."""
        return largest_number(self.make())

    @property
    def decay(self) -> float:
        """Share of what a round has left out that still counts a round later."""
        return TOP_K_DECAY if self.name == "topk" else 1.0

    def make(self) -> CompressionBase:
        """What encodes the numbers of a pass."""
        return CODECS[self.name]()

    def low_rank(self, shapes: Sequence[Sequence[int]], size: int) -> LowRank | None:
        """PowerSGD's two passes over a vector of parameters of these shapes; None for a codec with one pass."""
        return LowRank(shapes, size, self.rank) if self.name == "powersgd" else None

    def payload_bytes(self, shapes: Sequence[Sequence[int]]) -> float:
        """Size of one encoded gradient, in bytes."""
        size = sum(map(math.prod, shapes))
        low_rank = self.low_rank(shapes, size)
        return _encoded_bytes(size if low_rank is None else low_rank.numbers, self.make())


def largest_number(codec: CompressionBase) -> float:
    """Magnitude beyond which a codec cuts numbers off; most take their scale from the numbers, and cut off none."""
    return torch.finfo(torch.float16).max if isinstance(codec, Float16) else math.inf


def bytes_of_member(numbers: int, codec: CompressionBase, num_members: int, share: float) -> float:
    """Bytes that one of N members sends in an exchange, and receives: 1 + x (N - 2) vectors, if it reduces a share x.

    Args:
        numbers: how many numbers travel for one vector; with PowerSGD, those of both passes
    """
    return (1 + (num_members - 2) * share) * _encoded_bytes(numbers, codec)


def bytes_to_allow_for(numbers: int, codec: CompressionBase, num_members: int, share: float) -> float:
    """The bytes of `bytes_of_member`, but at least 2 and at most `MAX_VECTORS` vectors."""
    one = _encoded_bytes(numbers, codec)
    return min(max(2 * one, bytes_of_member(numbers, codec, num_members, share)), MAX_VECTORS * one)


def _encoded_bytes(numbers: int, codec: CompressionBase) -> float:
    one_number = torch.zeros(1)
    return numbers * one_number.nbytes * codec.estimate_compression_ratio(CompressionInfo.from_tensor(one_number))
