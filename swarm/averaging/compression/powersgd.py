"""PowerSGD: matrices of a gradient travel as products of two thin ones (Vogels, Karimireddy, Jaggi, NeurIPS 2019).

A round makes two passes over the same group. With M ≈ P Qᵀ, M of shape [n, m], the first pass averages P = M Q. Every
peer then makes its columns orthonormal, and the second pass averages Q = Mᵀ P. Vectors, and matrices that would not get
smaller, travel as they are in the first pass. What the product leaves out of a peer's gradient goes with its next one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from swarm.protocol.messages import Group


@dataclass(frozen=True)
class Passes:
    """What one round keeps between its passes.

    Args:
        given: this peer's contribution, shape [size], with what was left out before
        samples: its weight
        columns: for each matrix, the averaged and orthonormal P
        own: for each matrix, this peer's Q
        exact: the average of the numbers that are in no matrix
    """

    given: torch.Tensor
    samples: int
    columns: Sequence[torch.Tensor] = ()
    own: Sequence[torch.Tensor] = ()
    exact: torch.Tensor | None = None


@dataclass(frozen=True)
class Matrix:
    """One of the matrices in the vector.

    Args:
        part: its place in the vector
        rows: how many the matrix has
        columns: how many numbers are in each
    """

    part: slice
    rows: int
    columns: int


class LowRank:
    """Makes both passes for one peer, round after round.

    Args:
        shapes: shapes of the parameters, in the order of the vector
        size: numbers in the averaged vector; those after the parameters are in no matrix
        rank: columns of the thin matrices
    """

    def __init__(self, shapes: Sequence[Sequence[int]], size: int, rank: int):
        self.rank = rank
        self._matrices: list[Matrix] = []
        self._rest: list[slice] = []
        end = 0
        for shape in shapes:
            begin, end = end, end + math.prod(shape)
            rows = shape[0] if len(shape) > 1 else 1
            columns = (end - begin) // max(1, rows)
            if rank < min(rows, columns) and rank * (rows + columns) < end - begin:
                self._matrices.append(Matrix(slice(begin, end), rows, columns))
            else:
                self._rest.append(slice(begin, end))
        self._rest.append(slice(end, size))
        self.left_out = torch.zeros(size)
        """What rounds have left out, shape [size], fp32, sums over samples."""
        self._basis: list[torch.Tensor] = []
        self._basis_of = b""
        self._passes: Passes | None = None

    @property
    def numbers(self) -> int:
        """How many numbers travel in both passes together."""
        thin = sum(self.rank * (matrix.rows + matrix.columns) for matrix in self._matrices)
        return thin + sum(part.stop - part.start for part in self._rest)

    def is_warm(self, lineage: bytes) -> bool:
        """Whether this peer has the Q of the round that made the present weights: the best start for the next."""
        return self._basis_of == lineage

    def reset(self) -> None:
        """Forget what was left out: this peer has taken over other weights, and it belongs to the old ones."""
        self.left_out.zero_()

    def begin(self, vector: torch.Tensor, samples: int, group: Group) -> torch.Tensor:
        """What this peer gives in the first pass: all P of `vector`, a mean over `samples`, and all other numbers."""
        lineage = group.tickets[0].lineage
        start = self._basis if all(ticket.warm for ticket in group.tickets) else self._draw(lineage)
        given = vector.clone()
        if samples and torch.isfinite(vector).all():
            given.add_(self.left_out, alpha=1 / samples)
        self._passes = Passes(given, samples)
        thin = [self._matrix(given, index) @ basis for index, basis in enumerate(start)]
        return torch.cat([*(p.reshape(-1) for p in thin), *(given[part] for part in self._rest)])

    def go_on(self, first: torch.Tensor) -> torch.Tensor:
        """What this peer gives in the second pass, after the average of the first: all Q, shape [numbers of all Q]."""
        sizes = [matrix.rows * self.rank for matrix in self._matrices]
        *thin, exact = first.split([*sizes, len(first) - sum(sizes)])
        # In float64, so that differences by another order of summation are rounded away.
        columns = [torch.linalg.qr(p.view(-1, self.rank).double()).Q.float() for p in thin]
        own = [self._matrix(self._passes.given, index).T @ p for index, p in enumerate(columns)]
        self._passes = replace(self._passes, columns=columns, own=own, exact=exact)
        return torch.cat([q.reshape(-1) for q in own]) if own else torch.zeros(1)

    def keep_left_out(self) -> None:
        """Keep what has not arrived of this peer's gradient for its next one; called when the round is over.

        It may be over for other members only. If this peer took no part in the second pass, nothing has arrived, and
        the memory stays as it is.
        """
        passes, self._passes = self._passes, None
        if passes is not None and passes.own and passes.samples:
            for matrix, columns, own in zip(self._matrices, passes.columns, passes.own, strict=True):
                arrived = (columns @ own.T).reshape(-1)
                self.left_out[matrix.part] = (passes.given[matrix.part] - arrived) * passes.samples

    def finish(self, second: torch.Tensor, group: Group) -> torch.Tensor:
        """The average, shape [size], from the averages of both passes; the same on all peers."""
        passes = self._passes
        average = torch.empty_like(passes.given)
        bounds = accumulate((matrix.columns * self.rank for matrix in self._matrices), initial=0)
        basis = [second[begin:end].reshape(-1, self.rank).clone() for begin, end in pairwise(bounds)]
        for index, matrix in enumerate(self._matrices):
            product = passes.columns[index].double() @ basis[index].double().T
            average[matrix.part] = product.float().reshape(-1)
        offset = 0
        for part in self._rest:
            length = part.stop - part.start
            average[part] = passes.exact[offset : offset + length]
            offset += length
        self.keep_left_out()
        self._basis, self._basis_of = basis, group.group_id
        return average

    def _matrix(self, vector: torch.Tensor, index: int) -> torch.Tensor:
        matrix = self._matrices[index]
        return vector[matrix.part].view(matrix.rows, matrix.columns)

    def _draw(self, lineage: bytes) -> list[torch.Tensor]:
        """Random first Q of all matrices, the same on all peers of a group."""
        generator = torch.Generator().manual_seed(int.from_bytes(lineage[:7], "big"))
        return [torch.randn(matrix.columns, self.rank, generator=generator) for matrix in self._matrices]
