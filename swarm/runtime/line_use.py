"""How much of its owner's line a peer uses: how fast it may send, and how much it has sent and received."""

from __future__ import annotations

import asyncio
import math
import multiprocessing as mp

from recipe.errors import InputError

BYTES_PER_SECOND_OF_MBPS = 1e6 / 8


class LineUse:
    """Limits and counts the bytes of rounds and states, which are nearly all of a peer's traffic.

    Calls and records are not counted. It is made in the trainer before the averaging process is started. The averaging
    process sends and receives, and the trainer reads the sums.

    Args:
        max_upload_mbps: Mbit/s that may be sent on average

    Raises:
        InputError: it is not more than 0
    """

    def __init__(self, max_upload_mbps: float = math.inf):
        if not max_upload_mbps > 0:
            raise InputError(f"An upload of {max_upload_mbps:g} Mbit/s cannot work: it has to be more than 0.")
        self._bytes_per_second = max_upload_mbps * BYTES_PER_SECOND_OF_MBPS
        self._free_at = 0.0
        """Time on the clock of the event loop when all that was let through has gone out."""
        self._turn = asyncio.Lock()
        # Each has one writer. A lock would stay taken for good if the averaging process were killed while holding it.
        self._sent, self._received = mp.Value("q", 0, lock=False), mp.Value("q", 0, lock=False)

    @property
    def sent(self) -> int:
        """Bytes sent so far."""
        return self._sent.value

    @property
    def received(self) -> int:
        """Bytes received so far."""
        return self._received.value

    @property
    def most_kbps(self) -> float:
        """Upper limit of sending in kbit/s; infinite if there is none."""
        return 8 * self._bytes_per_second / 1000

    @property
    def num_bytes(self) -> int:
        """Bytes sent and received so far."""
        return self.sent + self.received

    async def send(self, num_bytes: int) -> None:
        """Wait in turn until so many bytes may go out. A caller that is cancelled meanwhile uses up no time."""
        if self._bytes_per_second < math.inf:
            async with self._turn:
                now = asyncio.get_running_loop().time()
                begin = max(self._free_at, now)
                if begin > now:
                    await asyncio.sleep(begin - now)
                # From `begin`, not from the present time: otherwise each late wake-up would waste some of the line.
                self._free_at = begin + num_bytes / self._bytes_per_second
        self._sent.value += num_bytes

    def receive(self, num_bytes: int) -> None:
        """Count bytes that have come in."""
        self._received.value += num_bytes
