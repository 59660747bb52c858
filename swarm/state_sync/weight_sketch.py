"""Sketches: a few numbers that tell how far two peers' weights are apart, without sending the weights.

Random projections keep distances (Johnson and Lindenstrauss 1984), and random signs suffice for them (Achlioptas 2003,
"Database-friendly random projections").
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn import functional as F

SIZE = 8
SKETCH_TOLERANCE = 1e-3
"""Relative distance that different hardware may cause; an optimizer step moves weights by far more."""
_BLOCK = 4096


class Sketch:
    """Projections of weights on vectors of signs, which are the same on all peers with weights of one lineage.

    The lineage is not known before the weights are. So a liar cannot choose weights in advance that have the sketch of
    other weights.

    Args:
        weights: tensors, n numbers in all; the signs take n / 512 numbers
        read: returns the whole of such a tensor
    """

    def __init__(self, weights: Sequence[torch.Tensor], read: Callable[[torch.Tensor], torch.Tensor] = torch.detach):
        self._weights, self._read = list(weights), read

    @torch.no_grad()
    def take(self, lineage: bytes) -> tuple[float, ...]:
        """Take the sketch of the present weights: `SIZE` numbers, or none if they are not finite.

        Args:
            lineage: the seed of the signs
        """
        seed = int.from_bytes(hashlib.sha256(lineage).digest()[:7], "big")
        generator = torch.Generator().manual_seed(seed)
        device = self._weights[0].device
        # The sign of a number is the product of the signs of its row and its column, so that few signs are drawn.
        columns = _signs(_BLOCK, generator).to(device)
        total = torch.zeros(SIZE, dtype=torch.float64)
        for tensor in self._weights:
            rows = _signs(-(-tensor.numel() // _BLOCK), generator).to(device)
            flat = self._read(tensor).to(device).reshape(-1).float()
            blocks = F.pad(flat, (0, -flat.numel() % _BLOCK)).view(-1, _BLOCK)
            total += ((blocks @ columns) * rows).sum(0).double().cpu()
        return tuple(total.tolist()) if torch.isfinite(total).all() else ()


def relative_distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Estimate of ‖a - b‖ / ‖b‖ from sketches of a and b, right within a factor of about two; 0 without sketches."""
    if len(one) != SIZE or len(other) != SIZE:
        return 0.0
    norm = math.hypot(*other)
    return math.dist(one, other) / norm if norm else 0.0


def nearest_to_most(sketches: Sequence[Sequence[float]], candidates: Sequence[int]) -> list[int]:
    """The candidate with the smallest median distance to all, and the candidates with the same weights as it.

    Args:
        sketches: one for each member of a group; some may be empty
        candidates: indices into them, at least one

    Returns:
        indices, the nearest first; every peer of a group finds the same ones
    """
    known = np.array([sketch for sketch in sketches if len(sketch) == SIZE])

    def median_distance(index: int) -> float:
        if len(sketches[index]) != SIZE:
            return math.inf
        return float(np.median(np.linalg.norm(known - np.array(sketches[index]), axis=1)))

    order = sorted(candidates, key=median_distance)
    first = sketches[order[0]]
    return [
        index
        for index in order
        if index == order[0]
        or (len(sketches[index]) == SIZE and relative_distance(sketches[index], first) <= SKETCH_TOLERANCE)
    ]


def _signs(rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, (rows, SIZE), generator=generator).float() * 2 - 1
