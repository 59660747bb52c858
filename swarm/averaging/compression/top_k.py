"""Only the largest numbers of each chunk travel, in 16 bits each: where in the chunk, and how large.

After SparseLoCo (arXiv 2508.15706), whose peers send the largest pseudo-gradients of each chunk in a few bits, and keep
the rest for the next time (`ErrorFeedback`). There each peer collects the messages of all. Here the reducer sends the
largest numbers of the mean, and keeps the rest of that for the next time as well: so all decode one message, and it is
as small as that of one peer.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from hivemind.compression import CompressionBase, CompressionInfo
from hivemind.proto import runtime_pb2
from torch.nn import functional as F

from swarm.averaging.compression.blockwise import SCALE_BYTES, SMALLEST_SCALE

CHUNK = 4096
"""Numbers of which the largest are sent: 12 bits say which one."""
KEPT = 128
"""Of each chunk."""
LARGEST_LEVEL = 7
"""The other 4 bits: a sign, and a level from 0 to 7."""
KEPT_BYTES = 2


class ChunkedTopK(CompressionBase):
    """A message has, for each chunk, a scale (float32) and its kept numbers (uint16 each), in the order of chunks."""

    compression_type = runtime_pb2.CompressionType.UNIFORM_8BIT  # on the wire; peers go by the codec of their recipe

    @torch.no_grad()
    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        """A message of `num_bytes(n)` bytes for a finite tensor of n numbers."""
        numbers = tensor.detach().float().reshape(-1)
        chunks = F.pad(numbers, (0, -len(numbers) % CHUNK)).view(-1, CHUNK)
        places = chunks.abs().topk(KEPT, dim=1, sorted=False).indices
        kept = chunks.gather(1, places)
        scales = (kept.abs().amax(dim=1) / LARGEST_LEVEL).clamp_min(SMALLEST_SCALE)
        levels = (kept / scales[:, None]).round_().to(torch.int32)
        codes = (levels + LARGEST_LEVEL) << 12 | places.to(torch.int32)
        buffer = scales.numpy().tobytes() + codes.numpy().astype(np.uint16).tobytes()
        return runtime_pb2.Tensor(
            compression=self.compression_type, buffer=buffer, size=tensor.shape, dtype="float32", requires_grad=False
        )

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """What a message says of a tensor, fp32: what was not kept is 0.

        Raises:
            ValueError: the message does not have the length that its shape asks for
        """
        size = math.prod(serialized_tensor.size)
        num_chunks = -(-size // CHUNK)
        if len(serialized_tensor.buffer) != self.num_bytes(size):
            raise ValueError("a message of the largest numbers has the wrong length")
        scales = torch.from_numpy(np.frombuffer(serialized_tensor.buffer, np.float32, num_chunks).copy())
        codes = np.frombuffer(serialized_tensor.buffer, np.uint16, offset=SCALE_BYTES * num_chunks)
        codes = torch.from_numpy(codes.astype(np.int64)).view(num_chunks, KEPT)
        values = ((codes >> 12) - LARGEST_LEVEL).float() * scales[:, None]
        chunks = torch.zeros(num_chunks, CHUNK).scatter_(1, codes & (CHUNK - 1), values)
        return chunks.view(-1)[:size].reshape(tuple(serialized_tensor.size))

    def num_bytes(self, size: int) -> int:
        """Of the message for so many numbers."""
        return -(-size // CHUNK) * (SCALE_BYTES + KEPT * KEPT_BYTES)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Bytes of a number against the 4 of float32."""
        return (SCALE_BYTES + KEPT * KEPT_BYTES) / CHUNK / 4
