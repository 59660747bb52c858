"""Bounds the parts that are on their way to a reducer at once: as many as its line carries in about half a second.

Everything that a peer sends to another one goes through one queue: parts of a round, progress records, and answers to
calls. If a peer handed all its parts to the network at once, everything else would wait behind them on a slow uplink,
for seconds. Other peers would take it for lost. A reducer answers a part with the average of it, so each average is
also an acknowledgement. The time between the two tells how long the queue is.

The rule is a simple one of its family (TCP Vegas, Brakmo and Peterson 1995; LEDBAT, RFC 6817): grow while answers come
quickly, shrink when they take long. It does not matter whether the queue or a third member makes them late. In both
cases more parts on the way would not end the round earlier.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

START_PARTS = 2.0
"""Parts of one stream that may be on their way at first. With the sizes of `shares.part_size_bytes` that is 1 MiB to
all reducers together, and more where all lines are known to be faster than 10 Mbit/s."""
MAX_PARTS = 64.0
"""Parts of one stream that may be on their way at most."""
QUICK_SECONDS = 0.5
"""If the average of a part comes in less than this, the window grows."""
LONG_SECONDS = 1.0
"""If the average of a part takes longer than this, the window shrinks."""
SHRINK = 0.9
"""Factor by which the window shrinks then."""


class SendWindow:
    """Bounds how many parts may be on their way to one reducer; all streams to it share it, from round to round."""

    def __init__(self) -> None:
        self.parts = START_PARTS
        """How many parts may be on their way in each stream."""

    def answered(self, seconds: float, streams: int, was_full: bool) -> None:
        """Adapt the window to an answer: the average of a part has come.

        Args:
            seconds: time since the part was sent
            streams: streams that share this window: all of them together let it grow by one for each part of a stream
            was_full: whether a further part waited for this answer
        """
        if seconds > LONG_SECONDS:
            self.parts = max(1.0, self.parts * SHRINK)
        elif seconds < QUICK_SECONDS and was_full:
            self.parts = min(MAX_PARTS, self.parts + 1 / streams)


class PartsOnTheWay:
    """Counts the parts of one stream that have been sent and not been answered with their averages yet."""

    def __init__(self, window: SendWindow, streams: int) -> None:
        self._window, self._streams = window, streams
        self._sent_at: deque[float] = deque()
        self._answered = asyncio.Event()
        self._waits = False
        """Whether a further part waits for room."""

    async def may_send(self) -> None:
        """Wait until the window has room, and count one more part."""
        while len(self._sent_at) >= max(1, int(self._window.parts)):
            self._waits = True
            self._answered.clear()
            await self._answered.wait()
        self._waits = False
        self._sent_at.append(time.monotonic())

    def answered(self) -> None:
        """Note that the average of the oldest part has come."""
        if self._sent_at:
            seconds = time.monotonic() - self._sent_at.popleft()
            self._window.answered(seconds, self._streams, was_full=self._waits)
        self._answered.set()
