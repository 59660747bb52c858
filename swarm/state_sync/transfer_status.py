"""How far the transfers of a state are: written by the averaging process, read by the trainer."""

from __future__ import annotations

import math
import multiprocessing as mp
import time

from swarm.state_sync.download import Download, DownloadProgress


class TransferStatus:
    """Numbers in shared memory; made before the averaging process is started."""

    def __init__(self) -> None:
        # Each has one writer: a lock would stay taken for good if the averaging process were killed within it.
        self._followed_until = mp.Value("d", 0.0, lock=False)
        self._looks = mp.Value("q", 0, lock=False)
        self._arrived = mp.Array("d", [0.0] * len(DownloadProgress._fields), lock=False)

    @property
    def is_followed(self) -> bool:
        """Whether somebody takes over our state, and has to be told of the updates that are made meanwhile."""
        return time.monotonic() < self._followed_until.value

    @property
    def looks(self) -> int:
        """Grows while a download is under way; if it does not, the averaging process stands still."""
        return self._looks.value

    @property
    def arrived(self) -> DownloadProgress:
        """How far the download is that is under way; its numbers may be of two moments."""
        donor, num_bytes, total_bytes, seconds_left = self._arrived[:]
        return DownloadProgress(int(donor), int(num_bytes), int(total_bytes), seconds_left)

    def follow_until(self, monotonic_seconds: float) -> None:
        """Somebody takes over our state, and needs averages until then."""
        self._followed_until.value = monotonic_seconds

    def begin_download(self) -> None:
        """Nothing has arrived."""
        self._arrived[:] = [0.0, 0.0, 0.0, math.inf]

    def look_at(self, place: int, download: Download) -> None:
        """A download is under way.

        Args:
            place: of its donor among those that were asked
        """
        self._looks.value += 1
        if download.offer is not None:
            self._arrived[:] = [place, download.num_bytes, download.offer.num_bytes, download.seconds_left]
