"""States and averages on their way out: what is sent, to whom, and how much memory that may take."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass, field

MAX_SNAPSHOTS = 8
"""Copies of the state that are kept for those who download it; two, if more would take too much memory."""
MAX_HELD_BYTES = 2**31
STALLED_SECONDS = 60.0
"""Without taking anything, after which a download makes room for another one; a slow line is far behind p2pd."""


@dataclass
class Snapshot:
    """The state as it was when somebody asked for it, which all who do so until it changes share; or an average.

    :param version: of the state; None for an average
    :param content: a future of (description, (bytes,), None)
    :param average_of: the step that the average ended; None for the state
    """

    version: int | None
    content: asyncio.Future
    average_of: int | None = None

    @property
    def held_bytes(self) -> int | None:
        """None while it is being made."""
        if not self.content.done():
            return None
        failed = self.content.cancelled() or self.content.exception() is not None
        return 0 if failed else sum(part.nbytes for part in self.content.result()[1])


@dataclass
class Upload:
    """A state on its way out.

    :param token: names the download
    :param snapshot: what is sent
    :param sent: slices that are there
    :param streams: tasks that send its slices
    :param moved_at: monotonic seconds when something was taken last
    """

    token: bytes
    snapshot: Snapshot
    sent: int = 0
    streams: set[asyncio.Task] = field(default_factory=set)
    moved_at: float = field(default_factory=time.monotonic)

    def moved(self) -> None:
        """Its reader has taken something."""
        self.moved_at = time.monotonic()

    def end(self) -> None:
        """Nothing more is sent."""
        for stream in self.streams:
            stream.cancel()


def make_room(uploads: Collection[Upload]) -> bool:
    """Whether another copy of the state may be made; who takes nothing any more makes room for it."""
    if _has_room(uploads):
        return True
    oldest = time.monotonic() - STALLED_SECONDS
    stalled = [upload for upload in uploads if upload.snapshot.version is not None and upload.moved_at < oldest]
    for upload in stalled:
        upload.end()
    return _has_room([upload for upload in uploads if upload not in stalled])


def _has_room(uploads: Collection[Upload]) -> bool:
    snapshots = {id(upload.snapshot): upload.snapshot for upload in uploads if upload.snapshot.version is not None}
    sizes = [snapshot.held_bytes for snapshot in snapshots.values()]
    largest = max((size for size in sizes if size is not None), default=MAX_HELD_BYTES)
    held = sum(largest if size is None else size for size in sizes)
    return len(snapshots) < MAX_SNAPSHOTS and (len(snapshots) < 2 or held < MAX_HELD_BYTES)
