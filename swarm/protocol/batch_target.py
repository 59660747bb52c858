"""The rule by which all peers of a run end a step: when it has enough samples."""

from __future__ import annotations

from dataclasses import dataclass

MAX_UPDATES_OF_SAMPLES = 2
"""Updates' worth of samples that a member counts for at most. More than one, since an honest member may have gone on
computing while a round failed."""


@dataclass(frozen=True)
class BatchTarget:
    """The target batch size. It is equal on all peers.

    Args:
        samples: samples of all peers together that make a global update; 0 if any number will do
    """

    samples: int

    def is_reached_by(self, samples: float) -> bool:
        """Whether this many samples are enough for an update."""
        return samples >= self.samples

    def missing(self, samples: float) -> float:
        """Samples that are still needed; at least 0."""
        return max(0.0, self.samples - samples)

    def in_mode(self, local_steps: int, known: int = 1) -> BatchTarget:
        """The target of an update of `local_steps` local steps, if this one is for an update of `known` of them."""
        return BatchTarget(self.samples // known * local_steps)

    def most_of(self, most: int) -> int:
        """Samples that one member can count for, whatever it says.

        Args:
            most: the result if the target is 0, where any number of samples will do
        """
        return MAX_UPDATES_OF_SAMPLES * self.samples or most
