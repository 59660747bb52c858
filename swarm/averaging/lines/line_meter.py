"""What this peer's line carries, as the rounds show it: measured while others wait for it, and for nobody else.

All members of a round send side by side, and each part of an average waits for the last member that gives it. So in
the same seconds a fast line carries little more than the slowest one, and is idle for the rest. Only of the line for
which the others wait do the bytes of an exchange over its seconds tell what it can carry: in both directions, and with
all else that uses it. Reducers say with each average whether it is that one, since they see whose part comes last.

A line that nobody waits for can carry more than it did. It counts for a little more than that, gets a larger share the
next time, and so shows more: until others wait for it, or have nothing more to give it.

In a short exchange members wait for processors and round trips, not for lines. So it shows no bounds. And a line that
carries an equal share in so short a time is fast enough: faster ones say the same, so that shares stay equal among
them, whatever a busy processor has made of the first exchanges.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from statistics import median_low

from hivemind.p2p import PeerID

from swarm.protocol.messages import MAX_LINE_KBPS

MEASURED = 3
"""Latest rounds, of which the middle one counts."""
SHORT_SECONDS = 2.0
"""An exchange that takes no longer is a matter of round trips and processors as well: five peers on two cores, with
equal lines and exchanges of one to two seconds, measured lines that differed threefold. A line that sends an equal
share in this time is fast enough."""
LEAST_BYTES = 2**18
FIRST_GROWTH = 2.0
"""Times what it did that an idle line is taken to carry, as long as its bounds were never seen."""
GROWTH = 1.25
"""Times what it did that an idle line is taken to carry, afterwards."""
CHANGED = 1 / 8
"""By which a line has to differ from what this peer says of it, before it says so. Shares that moved at each little
change would carry what codecs have left out from one member to the next."""
USUAL_LATENESS = 0.5
"""From this share of the usual lateness on, a member counts as one for which others wait. It is usual to be the last
one as often as each of the others."""
MOST_LATE = 2 / 3
"""Share of any other member's lateness that this peer's has to reach. Else it is that other one for which all wait."""


class Waits:
    """Counts in one exchange how often reducers waited for this peer's parts, as they say, and it for the others'."""

    def __init__(self) -> None:
        self._answers: Counter[PeerID] = Counter()
        self._waited_for_me: Counter[PeerID] = Counter()
        self._parts_given: Counter[PeerID] = Counter()
        self._waited_for: Counter[PeerID] = Counter()

    def told(self, reducer: PeerID, waited: bool) -> None:
        """A reducer's average has come: it has waited for this peer's part in it, or not."""
        self._answers[reducer] += 1
        self._waited_for_me[reducer] += waited

    def saw(self, sender: PeerID, waited: bool) -> None:
        """A part of another member was combined here."""
        self._parts_given[sender] += 1
        self._waited_for[sender] += waited

    def were_for_me(self, num_members: int) -> bool:
        """Whether it was this peer's line that made the exchange as long as it was.

        The reducer in the middle counts: one that lies, or has a bad line itself, is not believed.
        """
        told = [self._waited_for_me[reducer] / answers for reducer, answers in self._answers.items()]
        if not told:
            return False
        seen = max((self._waited_for[peer] / parts for peer, parts in self._parts_given.items()), default=0.0)
        return median_low(told) >= max(USUAL_LATENESS / max(1, num_members - 1), MOST_LATE * seen)


class LineMeter:
    """Measures what one peer's line carries, from round to round.

    Args:
        most_kbps: that its owner lets it send
    """

    def __init__(self, most_kbps: float = math.inf) -> None:
        self._most = min(most_kbps, MAX_LINE_KBPS)
        self._found: deque[float] = deque(maxlen=MEASURED)
        self._has_shown_its_bounds = False
        self.kbps = 0
        """What this peer says of its line, in kbit/s, or what would be enough; 0 as long as it is not known."""
        self.waits = Waits()
        """Of the present exchange."""

    def begin(self) -> None:
        """An exchange begins."""
        self.waits = Waits()

    def end(self, num_bytes: int, seconds: float, num_members: int, equal_bytes: float, is_whole: bool = True) -> None:
        """It is over.

        Args:
            num_bytes: that this peer has sent
            seconds: that it took
            equal_bytes: that it would have sent if all shares were equal
            is_whole: nobody was lost; else it tells only of a line for which others waited
        """
        if num_bytes < LEAST_BYTES:
            return
        carried = 8 * num_bytes / 1000 / seconds
        if seconds >= SHORT_SECONDS and self.waits.were_for_me(num_members):
            self._has_shown_its_bounds = True
        elif not is_whole:
            return
        else:
            before = median_low(self._found) if self._found else 0.0
            carried = max(before, carried * (GROWTH if self._has_shown_its_bounds else FIRST_GROWTH))
        self._found.append(min(carried, self._most))
        enough = 8 * equal_bytes / 1000 / SHORT_SECONDS
        middle = min(median_low(self._found), enough)
        if abs(middle - self.kbps) > CHANGED * self.kbps:
            self.kbps = max(1, round(middle))
