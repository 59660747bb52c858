"""Decides how many bytes of a download may be on their way: enough to fill the line, without building a queue.

Bytes that wait in a queue delay all that comes after them: progress records, calls, the parts of a round. So a download
watches how long its own pieces take, and asks for fewer when that grows. This is the idea of LEDBAT (RFC 6817), with
pieces that are asked for in place of packets.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

TARGET_SECONDS = 0.15
"""Most seconds that a piece should wait in queues on the way: LEDBAT's 0.1 s, and what a piece takes by itself on a
slow line."""
FIRST_PIECES = 3
MAX_WINDOW_BYTES = 2**23
HISTORY_SECONDS = 60.0
"""Seconds of a stretch of time. The least round trip of the last two stretches counts, since lines change."""
GROWTH = 0.05
"""Share by which the window may grow in a round trip after it has been full once. It may always grow by a piece."""


class Window:
    """The window of one download.

    Args:
        piece_bytes: bytes of a full piece; one may always be on its way
        clock: returns seconds
    """

    def __init__(self, piece_bytes: int, clock: Callable[[], float] = time.monotonic):
        self._piece_bytes, self._clock = piece_bytes, clock
        self.size_bytes = float(FIRST_PIECES * piece_bytes)
        self._least: deque[list[float]] = deque(maxlen=2)
        """(begin, least round trip) of the present stretch of time and the one before."""
        self._recent: deque[float] = deque(maxlen=3)
        self._is_new, self._cut_until = True, -math.inf

    def has_room(self, bytes_on_their_way: int) -> bool:
        """Whether another piece may be asked for."""
        return bytes_on_their_way == 0 or bytes_on_their_way + self._piece_bytes <= self.size_bytes

    @property
    def least_seconds(self) -> float:
        """The shortest round trip that a piece has had lately."""
        return min((least for _, least in self._least), default=0.0)

    def arrived(self, round_trip_seconds: float, num_bytes: int) -> None:
        """Adapt the window to a piece that has arrived.

        Args:
            round_trip_seconds: from the request to its arrival
            num_bytes: bytes of the piece
        """
        now = self._clock()
        if not self._least or now > self._least[-1][0] + HISTORY_SECONDS:
            self._least.append([now, round_trip_seconds])
        self._least[-1][1] = min(self._least[-1][1], round_trip_seconds)
        self._recent.append(round_trip_seconds)
        if self._is_new:  # twice as many with each round trip, until the line is full
            self._is_new = round_trip_seconds - self.least_seconds < TARGET_SECONDS / 2
            if self._is_new:
                self.size_bytes += num_bytes
            else:
                self._shrink(round_trip_seconds)
        elif (shortest := min(self._recent)) - self.least_seconds > 1.5 * TARGET_SECONDS:
            self._shrink(shortest)
        elif max(self._recent) - self.least_seconds < TARGET_SECONDS / 4:
            self.size_bytes += num_bytes  # the line is far from full: TCP was slow at first, or other traffic has ended
        else:
            off_target = 1.0 - (shortest - self.least_seconds) / TARGET_SECONDS
            self.size_bytes += off_target * num_bytes * max(GROWTH, self._piece_bytes / self.size_bytes)
        self.size_bytes = min(max(self.size_bytes, float(self._piece_bytes)), MAX_WINDOW_BYTES)

    def _shrink(self, round_trip_seconds: float) -> None:
        """Shrink the window to what the line carries in the shortest round trip plus `TARGET_SECONDS`."""
        now = self._clock()
        if now > self._cut_until:
            self._cut_until = now + round_trip_seconds  # pieces on their way still wait in the old queue: no second cut
            self.size_bytes *= min(1.0, (self.least_seconds + TARGET_SECONDS) / round_trip_seconds)
