"""What a peer tells of its rounds and tests in its progress record, for people to read: no peer acts on it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from swarm.protocol.wire import MAX_STEP, Step

MAX_WHY_LETTERS, MAX_WHY_BYTES = 200, 320
MAX_TIMES = 10**6

_Why = Annotated[str, Meta(min_length=1, max_length=MAX_WHY_LETTERS)]
Failed = tuple[Step, Annotated[int, Meta(ge=1, le=MAX_TIMES)], _Why] | None
"""A round that failed, as it travels; None as long as none has."""
Scored = tuple[Step, Annotated[float, Meta(ge=0, le=1)], Annotated[float, Meta(ge=0)]] | None
"""What a test has found, as it travels; None as long as there was none."""


@dataclass(frozen=True)
class FailedRound:
    """The last round that gave a peer no average.

    Args:
        step: the update that it was to make
        times: rounds of that step that have failed so far, for this peer
        why: the end of a sentence, with the names of those who were lost or blamed
    """

    step: int
    times: int
    why: str

    def to_wire(self) -> Failed:
        """As a field of a message."""
        return self.step, self.times, self.why

    @classmethod
    def after(cls, before: FailedRound | None, step: int, why: str) -> FailedRound:
        """One more; why is cut where it is too long."""
        times = before.times + 1 if before is not None and before.step == step else 1
        printable = "".join(letter for letter in why[:MAX_WHY_LETTERS] if letter.isprintable())
        short = printable.encode()[:MAX_WHY_BYTES].decode(errors="ignore")
        return cls(min(step, MAX_STEP), min(times, MAX_TIMES), short or "it is not known why")

    @classmethod
    def from_wire(cls, failed: Failed) -> FailedRound | None:
        """Of a field that was read with the bounds of `Failed`.

        Raises:
            ValueError: it is not printable, or has too many bytes
        """
        if failed is None:
            return None
        step, times, why = failed
        if not why.isprintable() or len(why.encode()) > MAX_WHY_BYTES:
            raise ValueError("a reason that is not printable, or too long")
        return cls(step, times, why)


@dataclass(frozen=True)
class Score:
    """What a peer has found on the test samples.

    Args:
        step: global updates that the weights have seen
        accuracy: 0 to 1
        loss: mean over the samples
    """

    step: int
    accuracy: float
    loss: float

    def to_wire(self) -> Scored:
        """As a field of a message."""
        return self.step, float(self.accuracy), float(self.loss)

    @classmethod
    def from_wire(cls, tested: Scored) -> Score | None:
        """Of a field that was read with the bounds of `Scored`.

        Raises:
            ValueError: a number that is none
        """
        if tested is None:
            return None
        if not all(map(math.isfinite, tested)):
            raise ValueError("a test result that is not finite")
        return cls(*tested)
