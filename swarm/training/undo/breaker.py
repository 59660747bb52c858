"""Detects whether a peer's own training loss has risen for good, so that the peer wants to go back to earlier weights.

A peer judges by its own loss only, so it has to believe no other peer. It says in its tickets that it wants to go back,
and a group goes back if more than half of its members want to (`Group.back_to`). Liars in the minority can neither
bring honest peers back, since their loss has not risen, nor keep them from going back.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, replace

WINDOW = 16
"""Number of updates in a window, of which the median loss counts. A peak that passes is no reason to go back, so two
windows in a row have to be bad."""
GAINED_SHARE = 0.5
"""Share of the first window's loss that training must have gained. If less was gained, noise could look like a loss of
it."""
LOST_SHARE = 0.5
"""Share of that gain that has to be lost again before a peer wants to go back."""
UNUSABLE = 2
"""Number of gradients in a row that are not finite, without an update in between, at which a peer wants to go back."""


@dataclass(frozen=True)
class Gained:
    """What training has gained up to a step, as median losses of windows; nan where there is none yet.

    Args:
        first: median loss of the first window
        best: median loss of the best window so far
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
        """Note an update.

        Args:
            loss: mean loss over the samples that this peer gave to it
        """
        self._losses.append(loss if math.isfinite(loss) else math.inf)
        if len(self._losses) < WINDOW:
            return
        median = statistics.median([*self._losses][-WINDOW:])
        if math.isinf(median):  # no loss could be compared with it
            return
        if math.isnan(self.gained.first):
            self.gained = Gained(first=median, best=median)
        self.gained = replace(self.gained, best=min(self.gained.best, median))

    def note_unusable(self) -> None:
        """Note that this peer's gradients are not finite."""
        self._unusable += 1

    def note_update(self) -> None:
        """Note an update: something finite has come out of these weights, if only from other members' gradients."""
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
        """Whether this peer believes other members that it has risen.

        It does if half as much is lost, or if it has given too little to tell.
        """
        if self.has_risen or math.isnan(self.gained.best):
            return True
        return len(self._losses) >= WINDOW and self._has_lost([*self._losses][-WINDOW:], LOST_SHARE / 2)

    def _has_lost(self, losses: list[float], share: float) -> bool:
        """Whether these losses have lost this share of what training has gained."""
        first, best = self.gained.first, self.gained.best
        gained = first - best
        return gained > GAINED_SHARE * abs(first) and statistics.median(losses) > best + share * gained

    def went_back(self, gained: Gained | None = None) -> None:
        """Note that the weights are those of an earlier step.

        Args:
            gained: what training had gained at that step, with which later losses are compared from now on. Later
                gains are gone, which is no reason to go back once more. None: keep the present value
        """
        self._losses.clear()
        self._unusable = 0
        if gained is not None:
            self.gained = gained

    def begin(self) -> None:
        """Begin anew with the weights of another peer: there is nothing to compare with yet."""
        self.went_back()
        self.gained = Gained()
