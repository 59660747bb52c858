"""When a step has enough samples: the one rule by which all peers of a run end a step."""

from __future__ import annotations

from dataclasses import dataclass

MAX_UPDATES_OF_SAMPLES = 2
"""That a member counts for at most: an honest one may have gone on computing while a round failed."""


@dataclass(frozen=True)
class BatchTarget:
    """The target batch size; equal on all peers.

    Args:
        samples: of all peers together that make a global update; 0: any number will do
    """

    samples: int

    def is_reached_by(self, samples: float) -> bool:
        """Whether so many samples are enough for an update."""
        return samples >= self.samples

    def missing(self, samples: float) -> float:
        """Samples that are still needed; at least 0."""
        return max(0.0, self.samples - samples)

    def in_mode(self, local_steps: int, known: int = 1) -> BatchTarget:
        """Of an update of so many local steps, where this is the target of an update of so many that are known."""
        return BatchTarget(self.samples // known * local_steps)

    def most_of(self, most: int) -> int:
        """Samples that one member can count for, whatever it says.

        Args:
            most: where any number will do
        """
        return MAX_UPDATES_OF_SAMPLES * self.samples or most
