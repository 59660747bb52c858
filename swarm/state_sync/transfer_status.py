"""The progress of state transfers: written by the averaging process, read by the trainer."""

from __future__ import annotations

import math
import multiprocessing as mp
import time

from swarm.state_sync.download import Download, DownloadProgress


class TransferStatus:
    """Progress numbers in shared memory. It has to be made before the averaging process is started."""

    def __init__(self) -> None:
        # Each has one writer. A lock would stay taken for good if the averaging process were killed while holding it.
        self._followed_until = mp.Value("d", 0.0, lock=False)
        self._looks = mp.Value("q", 0, lock=False)
        self._arrived = mp.Array("d", [0.0] * len(DownloadProgress._fields), lock=False)

    @property
    def is_followed(self) -> bool:
        """Whether a peer takes over our state, and needs the averages of the updates that are made meanwhile."""
        return time.monotonic() < self._followed_until.value

    @property
    def looks(self) -> int:
        """A counter that grows while a download is under way; if it stops, the averaging process stands still."""
        return self._looks.value

    @property
    def arrived(self) -> DownloadProgress:
        """The progress of the running download; its numbers may come from two moments."""
        donor, num_bytes, total_bytes, seconds_left = self._arrived[:]
        return DownloadProgress(int(donor), int(num_bytes), int(total_bytes), seconds_left)

    def follow_until(self, monotonic_seconds: float) -> None:
        """Note that a peer takes over our state and needs averages until this time."""
        self._followed_until.value = monotonic_seconds

    def begin_download(self) -> None:
        """Reset the progress: nothing has arrived yet."""
        self._arrived[:] = [0.0, 0.0, 0.0, math.inf]

    def look_at(self, place: int, download: Download) -> None:
        """Note how far the running download is.

        Args:
            place: place of its donor among the donors that were asked
            download: the download
        """
        self._looks.value += 1
        if download.offer is not None:
            self._arrived[:] = [place, download.num_bytes, download.offer.num_bytes, download.seconds_left]
