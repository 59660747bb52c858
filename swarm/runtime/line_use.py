"""What a peer takes of its owner's line: how fast it may send, and how much it has sent and received."""

from __future__ import annotations

import asyncio
import math
import multiprocessing as mp

from recipe.errors import InputError

BYTES_PER_SECOND_OF_MBPS = 1e6 / 8


class LineUse:
    """Of rounds and states, which are nearly all that a peer sends; calls and records are not counted.

    Made in the trainer before the averaging process, which sends and receives; the trainer reads the sum.

    Args:
        max_upload_mbps: Mbit/s that may go out on the average

    Raises:
        InputError: it is not more than 0
    """

    def __init__(self, max_upload_mbps: float = math.inf):
        if not max_upload_mbps > 0:
            raise InputError(f"An upload of {max_upload_mbps:g} Mbit/s cannot work: it has to be more than 0.")
        self._bytes_per_second = max_upload_mbps * BYTES_PER_SECOND_OF_MBPS
        self._free_at = 0.0
        """On the clock of the event loop, when all that was let go before has gone out."""
        self._turn = asyncio.Lock()
        # Each has one writer: a lock would stay taken for good if the averaging process were killed within it.
        self._sent, self._received = mp.Value("q", 0, lock=False), mp.Value("q", 0, lock=False)

    @property
    def sent(self) -> int:
        """Bytes so far."""
        return self._sent.value

    @property
    def received(self) -> int:
        """Bytes so far."""
        return self._received.value

    @property
    def most_kbps(self) -> float:
        """That may go out, in kbit/s."""
        return 8 * self._bytes_per_second / 1000

    @property
    def num_bytes(self) -> int:
        """Sent and received so far."""
        return self.sent + self.received

    async def send(self, num_bytes: int) -> None:
        """Wait until so many bytes may go out, in turn; who gives up meanwhile takes nobody's time."""
        if self._bytes_per_second < math.inf:
            async with self._turn:
                now = asyncio.get_running_loop().time()
                begin = max(self._free_at, now)
                if begin > now:
                    await asyncio.sleep(begin - now)
                # Not from the present time on: who is woken late would give less of its line each time.
                self._free_at = begin + num_bytes / self._bytes_per_second
        self._sent.value += num_bytes

    def receive(self, num_bytes: int) -> None:
        """So many bytes have come in."""
        self._received.value += num_bytes
