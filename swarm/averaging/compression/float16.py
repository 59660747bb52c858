"""The codec `fp16`: sixteen bits for a number."""

from __future__ import annotations

import torch
from hivemind.compression import Float16Compression
from hivemind.proto import runtime_pb2


class Float16(Float16Compression):
    """Encodes as Hivemind's codec does, and decodes with torch: it takes less time than NumPy, with the same bits."""

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """The tensor in a message, fp32.

        Raises:
            ValueError: the message holds no numbers, or a part of one
        """
        numbers = torch.frombuffer(bytearray(serialized_tensor.buffer), dtype=torch.float16)
        return numbers.float().reshape(tuple(serialized_tensor.size))


@torch.no_grad()
def compact(vector: torch.Tensor) -> torch.Tensor:
    """The same numbers, shape [n], in fp16 if nothing is lost by that, as after decoding with the codec fp16."""
    half = vector.half()
    return half if torch.equal(half.float(), vector) else vector
