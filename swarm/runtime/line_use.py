"""What a peer takes of its owner's line: how fast it may send, and how much it has sent and received."""

from __future__ import annotations

import asyncio
import math
import multiprocessing as mp

BYTES_PER_SECOND_OF_MBPS = 1e6 / 8


class LineUse:
    """Of rounds and states, which are nearly all that a peer sends; calls and records are not counted.

    Made in the trainer before the averaging process, which sends and receives; the trainer reads the sum.

    Args:
        max_upload_mbps: Mbit/s that may go out on the average
    """

    def __init__(self, max_upload_mbps: float = math.inf):
        self._bytes_per_second = max_upload_mbps * BYTES_PER_SECOND_OF_MBPS
        self._free_at = 0.0
        """On the clock of the event loop, when all that was let go before has gone out."""
        self._sent, self._received = mp.Value("q", 0), mp.Value("q", 0)

    @property
    def num_bytes(self) -> int:
        """Sent and received so far."""
        return self._sent.value + self._received.value

    async def send(self, num_bytes: int) -> None:
        """Wait until so many bytes may go out, behind all those that wait already."""
        self._sent.value += num_bytes
        now = asyncio.get_running_loop().time()
        turn = max(now, self._free_at)
        self._free_at = turn + num_bytes / self._bytes_per_second
        if turn > now:
            await asyncio.sleep(turn - now)

    def receive(self, num_bytes: int) -> None:
        """So many bytes have come in."""
        self._received.value += num_bytes
