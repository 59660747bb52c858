"""Whether a peer's own training loss has risen for good, so that it wants to go back.

Only its own loss: nobody else has to be believed. What a peer says in its tickets is that it wants to go back, and the
group does so if more than half of it do (`Group.back_to`). Liars who are fewer cannot bring honest peers back, since
their loss is as it was, nor keep them from it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

WINDOW = 16
"""Updates whose median loss is looked at. Two windows in a row have to be bad: a peak that passes is no reason."""
GAINED_SHARE = 0.5
"""Of the first window's loss, that training has to have gained. Where less was gained, noise could look like a loss."""
LOST_SHARE = 0.5
"""Of that gain, that has to be lost again."""
UNUSABLE = 2
"""Gradients in a row that are not finite, without an update in between."""


class Breaker:
    """Of one peer."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=2 * WINDOW)
        self._first = self._best = math.nan
        """Median losses of the first window and of the best one so far."""
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
        if math.isnan(self._first):
            self._first = self._best = median
        self._best = min(self._best, median)

    def note_unusable(self) -> None:
        """This peer's gradients are not finite."""
        self._unusable += 1

    def note_update(self) -> None:
        """Something finite has come out of these weights, if only of what others gave."""
        self._unusable = 0

    @property
    def has_risen(self) -> bool:
        """For good; or nothing finite comes out of these weights any more."""
        if self._unusable >= UNUSABLE:
            return True
        gained = self._first - self._best
        if len(self._losses) < 2 * WINDOW or not gained > GAINED_SHARE * abs(self._first):
            return False
        losses = [*self._losses]
        lowest = min(statistics.median(losses[:WINDOW]), statistics.median(losses[WINDOW:]))
        return lowest > self._best + LOST_SHARE * gained

    def went_back(self) -> None:
        """The weights are those of an earlier step: what comes now is compared with the same best window."""
        self._losses.clear()
        self._unusable = 0

    def begin(self) -> None:
        """The weights are those of another peer: there is nothing to compare with yet."""
        self.went_back()
        self._first = self._best = math.nan
