"""Converts tensors to one run of bytes and a layout, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from swarm.protocol.messages import RoundFailed

MAX_DIMENSIONS = 8
MAX_NUMBERS = 2**63 - 1
"""Largest product of a shape's sizes that torch can compute. It also multiplies those of a tensor without numbers."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}

Layout = Sequence[tuple[str, Sequence[int]]]


def pack(tensors: Sequence[torch.Tensor]) -> tuple[Layout, torch.Tensor]:
    """Return (dtype and shape of each tensor, the bytes of all, shape [n], uint8). A single tensor is not copied."""
    layout = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors]
    parts = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    return layout, parts[0] if len(parts) == 1 else torch.cat(parts)


def unpack(layout: Layout, content: torch.Tensor) -> list[torch.Tensor]:
    """Undo `pack`.

    Raises:
        RoundFailed: whatever is wrong with the layout; the sender is not trusted
    """
    try:
        dtypes, shapes = [DTYPES[name] for name, _ in layout], [list(shape) for _, shape in layout]
    except Exception as error:
        raise RoundFailed(f"the state's layout is malformed: {error!r}") from error
    if any(len(s) > MAX_DIMENSIONS or any(type(n) is not int or not 0 <= n <= len(content) for n in s) for s in shapes):
        raise RoundFailed("the state's layout is out of bounds")
    if any(math.prod(n or 1 for n in shape) > MAX_NUMBERS for shape in shapes):
        raise RoundFailed("the state's layout is out of bounds")
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in zip(dtypes, shapes, strict=True)]
    if sum(sizes) != len(content):
        raise RoundFailed("the state has another size than its layout")
    parts = zip(content.split(sizes), dtypes, shapes, strict=True)
    return [part.clone().view(dtype).reshape(shape) for part, dtype, shape in parts]  # the copy is aligned for its type
