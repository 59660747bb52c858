"""Parts of a model that are averaged in turn, one with each update: so an update carries a part of the numbers only.

After Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512, section 2.1): its *fragments* take layers from all
depths. Here a fragment takes whole tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recipe.errors import InputError


@dataclass(frozen=True)
class Fragments:
    """How a model is divided into fragments; the same on all peers with the same model. One fragment is the whole.

    Args:
        tensors: for each fragment, the places of its tensors among the model's
        sizes: for each fragment, how many numbers travel with it
        rest: how many numbers at its end travel with every fragment
    """

    tensors: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    rest: int = 0

    @classmethod
    def of(cls, sizes: Sequence[int], number: int = 1, rest: int = 0) -> Fragments:
        """Assign tensors to fragments, the largest first, each to the fragment that is smallest so far.

        Tensors of the same size are assigned in their order, in turn: so each fragment has some of every depth.

        Args:
            sizes: numbers in each tensor
            number: number of fragments
            rest: numbers that travel with every fragment

        Raises:
            InputError: there are fewer tensors than fragments
        """
        if not 1 <= number <= max(1, len(sizes)):
            raise InputError(
                f"A model of {len(sizes)} tensors cannot be averaged in {number} fragments: set --fragments lower."
            )
        dealt, filled = [[] for _ in range(number)], [0] * number
        for tensor in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
            smallest = filled.index(min(filled))
            dealt[smallest].append(tensor)
            filled[smallest] += sizes[tensor]
        travelling = tuple(numbers + rest for numbers in filled)
        return cls(tuple(tuple(sorted(tensors)) for tensors in dealt), travelling, rest)

    @property
    def number(self) -> int:
        """Number of fragments."""
        return len(self.tensors)

    def tensors_at(self, step: int) -> tuple[int, ...]:
        """Places of the tensors that the update after this step averages."""
        return self.tensors[step % self.number]

    def size_at(self, step: int) -> int:
        """How many numbers the update after this step averages."""
        return self.sizes[step % self.number]

    def turn_at(self, step: int) -> int:
        """How often the fragment of this step has been averaged before."""
        return step // self.number
