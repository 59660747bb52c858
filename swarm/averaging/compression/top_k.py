"""A codec that sends only the largest numbers of each chunk, in 16 bits each: where in the chunk, and how large.

After SparseLoCo (arXiv 2508.15706): its peers send the largest pseudo-gradients of each chunk in a few bits, and keep
the rest for the next time (`ErrorFeedback`). There each peer collects the messages of all. Here the reducer sends the
largest numbers of the mean, and keeps the rest of that for the next time as well. So all members decode one message,
which is as small as that of one peer.
"""

from __future__ import annotations

import numpy as np
import torch
from hivemind.compression import CompressionInfo
from hivemind.proto import runtime_pb2

from swarm.averaging.compression.blockwise import SCALE_BYTES, SMALLEST_SCALE, ScaledBlocks

CHUNK = 4096
"""Numbers in a chunk: 12 bits say which of them is meant."""
KEPT = 128
"""Numbers of each chunk that are sent."""
LARGEST_LEVEL = 7
"""The other 4 bits hold a level from -7 to 7, with this added."""
KEPT_BYTES = 2


class ChunkedTopK(ScaledBlocks):
    """Sends the scales of all chunks, and then their largest numbers, as uint16, chunk by chunk."""

    block = CHUNK

    @torch.no_grad()
    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        """A message of `num_bytes(n)` bytes for a finite tensor of n numbers."""
        chunks = self.blocks_of(tensor)
        places = chunks.abs().topk(KEPT, dim=1, sorted=False).indices
        kept = chunks.gather(1, places)
        scales = (kept.abs().amax(dim=1) / LARGEST_LEVEL).clamp_min(SMALLEST_SCALE)
        levels = (kept / scales[:, None]).round_().to(torch.int32)
        codes = (levels + LARGEST_LEVEL) << 12 | places.to(torch.int32)
        return self.message(tensor, scales, codes.numpy().astype(np.uint16))

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """The tensor in a message, fp32; numbers that were not sent are 0.

        Raises:
            ValueError: the message does not have the length that its shape asks for
        """
        size, scales, rest = self.read(serialized_tensor)
        codes = torch.from_numpy(rest.view(np.uint16).astype(np.int64)).view(-1, KEPT)
        values = ((codes >> 12) - LARGEST_LEVEL).float() * scales[:, None]
        chunks = torch.zeros(len(scales), CHUNK).scatter_(1, codes & (CHUNK - 1), values)
        return chunks.view(-1)[:size].reshape(tuple(serialized_tensor.size))

    def num_bytes(self, size: int) -> int:
        """Size of the message for `size` numbers."""
        return -(-size // CHUNK) * (SCALE_BYTES + KEPT * KEPT_BYTES)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Bytes of a number, relative to the 4 of float32."""
        return (SCALE_BYTES + KEPT * KEPT_BYTES) / CHUNK / 4
