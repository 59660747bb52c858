"""Measures what this peer's line carries, in rounds in which other members wait for this line and for no other.

All members of a round send side by side, and each part of an average waits for the last member that gives it. So in
the same seconds a fast line carries little more than the slowest one, and is idle for the rest. The bytes of an
exchange over its seconds tell what a line can carry only if the other members wait for that line. The result covers
both directions, and all else that uses the line. Reducers see which member's part comes last. So they say with each
average whether they waited for the receiver's part.

A line that no member waits for can carry more than it did. It counts for a little more than that, so it gets a larger
share the next time and shows more. This goes on until members wait for it, or have nothing more to give it.

In a short exchange members wait for processors and round trips, not for lines. So it shows no bounds. A line that
carries an equal share in so short a time is fast enough. All faster lines name the same number. So their shares stay
equal, even if a busy processor has distorted the first exchanges.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from statistics import median_low

from hivemind.p2p import PeerID

from swarm.protocol.messages import MAX_LINE_KBPS

MEASURED = 3
"""Number of latest measurements, of which the median counts."""
SHORT_SECONDS = 2.0
"""Shorter exchanges are a matter of round trips and processors as well. Five peers on two cores, with equal lines and
exchanges of one to two seconds, measured lines that differed threefold. A line that sends an equal share in this time
is fast enough."""
LEAST_BYTES = 2**18
FIRST_GROWTH = 2.0
"""How many times what it did an idle line is taken to carry, as long as its bounds were never seen."""
GROWTH = 1.25
"""How many times what it did an idle line is taken to carry, once its bounds were seen."""
CHANGED = 1 / 8
"""Share by which a line has to differ from what this peer says of it, before the peer says something else. Shares that
moved at each little change would move what codecs have left out from one member to the next."""
USUAL_LATENESS = 0.5
"""Share of the usual lateness from which on a member counts as one that others wait for. It is usual to be the last one
as often as each other member."""
MOST_LATE = 2 / 3
"""Share of any other member's lateness that this peer's has to reach. Else all wait for that other member."""


class Waits:
    """Counts in one exchange how often reducers say they waited for this peer, and it for each other member."""

    def __init__(self) -> None:
        self._answers: Counter[PeerID] = Counter()
        self._waited_for_me: Counter[PeerID] = Counter()
        self._parts_given: Counter[PeerID] = Counter()
        self._waited_for: Counter[PeerID] = Counter()

    def told(self, reducer: PeerID, waited: bool) -> None:
        """Count an average that has come, and whether its reducer says that it waited for this peer's part."""
        self._answers[reducer] += 1
        self._waited_for_me[reducer] += waited

    def saw(self, sender: PeerID, waited: bool) -> None:
        """Count a part of another member that was combined here, and whether this peer waited for it."""
        self._parts_given[sender] += 1
        self._waited_for[sender] += waited

    def were_for_me(self, num_members: int) -> bool:
        """Whether this peer's line made the exchange as long as it was.

        The median of what reducers say counts, so one reducer that lies, or has a bad line itself, is not believed.
        """
        told = [self._waited_for_me[reducer] / answers for reducer, answers in self._answers.items()]
        if not told:
            return False
        seen = max((self._waited_for[peer] / parts for peer, parts in self._parts_given.items()), default=0.0)
        return median_low(told) >= max(USUAL_LATENESS / max(1, num_members - 1), MOST_LATE * seen)


class LineMeter:
    """Measures what one peer's line carries, from round to round.

    Args:
        most_kbps: kbit/s that the owner of this peer lets it send
    """

    def __init__(self, most_kbps: float = math.inf) -> None:
        self._most = min(most_kbps, MAX_LINE_KBPS)
        self._found: deque[float] = deque(maxlen=MEASURED)
        self._has_shown_its_bounds = False
        self.kbps = 0
        """What this peer says that its line carries, in kbit/s, at most what is enough; 0 while it is not known."""
        self.waits = Waits()
        """The counts of the present exchange."""

    def begin(self) -> None:
        """Begin to measure an exchange."""
        self.waits = Waits()

    def end(self, num_bytes: int, seconds: float, num_members: int, equal_bytes: float, is_whole: bool = True) -> None:
        """Take in what the exchange that has ended shows of this peer's line.

        Args:
            num_bytes: bytes that this peer has sent
            seconds: how long the exchange took
            num_members: members of the group
            equal_bytes: bytes that this peer would have sent if all shares were equal
            is_whole: whether no member was lost; else the exchange counts only if others waited for this line
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
