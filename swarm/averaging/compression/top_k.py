"""Only the largest numbers of each chunk travel, in 16 bits each: where in the chunk, and how large.

After SparseLoCo (arXiv 2508.15706), whose peers send the largest pseudo-gradients of each chunk in a few bits, and keep
the rest for the next time (`ErrorFeedback`). There each peer collects the messages of all. Here the reducer sends the
largest numbers of the mean, and keeps the rest of that for the next time as well: so all decode one message, and it is
as small as that of one peer.
"""

from __future__ import annotations

import numpy as np
import torch
from hivemind.compression import CompressionInfo
from hivemind.proto import runtime_pb2

from swarm.averaging.compression.blockwise import SCALE_BYTES, SMALLEST_SCALE, ScaledBlocks

CHUNK = 4096
"""Numbers of which the largest are sent: 12 bits say which one."""
KEPT = 128
"""Of each chunk."""
LARGEST_LEVEL = 7
"""The other 4 bits: a sign, and a level from 0 to 7."""
KEPT_BYTES = 2


class ChunkedTopK(ScaledBlocks):
    """After the scales, a message has the kept numbers, as uint16, in the order of chunks."""

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
        """What a message says of a tensor, fp32: what was not kept is 0.

        Raises:
            ValueError: the message does not have the length that its shape asks for
        """
        size, scales, rest = self.read(serialized_tensor)
        codes = torch.from_numpy(rest.view(np.uint16).astype(np.int64)).view(-1, KEPT)
        values = ((codes >> 12) - LARGEST_LEVEL).float() * scales[:, None]
        chunks = torch.zeros(len(scales), CHUNK).scatter_(1, codes & (CHUNK - 1), values)
        return chunks.view(-1)[:size].reshape(tuple(serialized_tensor.size))

    def num_bytes(self, size: int) -> int:
        """Of the message for so many numbers."""
        return -(-size // CHUNK) * (SCALE_BYTES + KEPT * KEPT_BYTES)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Bytes of a number against the 4 of float32."""
        return (SCALE_BYTES + KEPT * KEPT_BYTES) / CHUNK / 4
