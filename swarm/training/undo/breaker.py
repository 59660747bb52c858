"""Whether a peer's own training loss has risen for good, so that it wants to go back.

Only its own loss: nobody else has to be believed. What a peer says in its tickets is that it wants to go back, and the
group does so if more than half of it do (`Group.back_to`). Liars who are fewer cannot bring honest peers back, since
their loss is as it was, nor keep them from it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, replace

WINDOW = 16
"""Updates whose median loss is looked at. Two windows in a row have to be bad: a peak that passes is no reason."""
GAINED_SHARE = 0.5
"""Share of the first window's loss that training has to have gained. Where less was gained, noise could look like a
loss."""
LOST_SHARE = 0.5
"""Share of that gain that has to be lost again."""
UNUSABLE = 2
"""Gradients in a row that are not finite, without an update in between."""


@dataclass(frozen=True)
class Gained:
    """What training has gained up to a step: median losses of windows, nan where there is none yet.

    Args:
        first: of the first window
        best: of the best one so far
    """

    first: float = math.nan
    best: float = math.nan


class Breaker:
    """Compares the latest losses of one peer with what training has gained."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=2 * WINDOW)
        self.gained = Gained()
        self._unusable = 0

    def note(self, loss: float) -> None:
        """An update has been made.

        Args:
            loss: mean over the samples that this peer gave to it
        """
        self._losses.append(loss if math.isfinite(loss) else math.inf)
        if len(self._losses) < WINDOW:
            return
        median = statistics.median([*self._losses][-WINDOW:])
        if math.isnan(self.gained.first):
            self.gained = Gained(first=median, best=median)
        self.gained = replace(self.gained, best=min(self.gained.best, median))

    def note_unusable(self) -> None:
        """This peer's gradients are not finite."""
        self._unusable += 1

    def note_update(self) -> None:
        """Something finite has come out of these weights, if only of what others gave."""
        self._unusable = 0

    @property
    def has_risen(self) -> bool:
        """Whether the loss has risen for good, or nothing finite comes out of these weights any more."""
        if self._unusable >= UNUSABLE:
            return True
        if len(self._losses) < 2 * WINDOW:
            return False
        losses = [*self._losses]
        return self._has_lost(losses[:WINDOW], LOST_SHARE) and self._has_lost(losses[WINDOW:], LOST_SHARE)

    @property
    def may_have_risen(self) -> bool:
        """Whether this peer believes it of others: half as much is lost, or it cannot tell, having given too little."""
        if self.has_risen or math.isnan(self.gained.best):
            return True
        return len(self._losses) >= WINDOW and self._has_lost([*self._losses][-WINDOW:], LOST_SHARE / 2)

    def _has_lost(self, losses: list[float], share: float) -> bool:
        """Whether these losses have lost this share of what training has gained."""
        first, best = self.gained.first, self.gained.best
        gained = first - best
        return gained > GAINED_SHARE * abs(first) and statistics.median(losses) > best + share * gained

    def went_back(self, gained: Gained | None = None) -> None:
        """The weights are those of an earlier step.

        Args:
            gained: when that step was made, with which is compared what comes now: what was gained only later has to
                be gained again, which is no reason to go back once more. None: the same as before
        """
        self._losses.clear()
        self._unusable = 0
        if gained is not None:
            self.gained = gained

    def begin(self) -> None:
        """The weights are those of another peer: there is nothing to compare with yet."""
        self.went_back()
        self.gained = Gained()
