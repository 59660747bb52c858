"""States and averages on their way out: what is sent, to whom, how fast, and how much memory that may take."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from hivemind.p2p import PeerID

from swarm.protocol.messages import MAX_GROUP_SIZE
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts
from swarm.state_sync.download import SLOWEST_BYTES_PER_SECOND
from swarm.state_sync.download_messages import MAX_BUSY_SECONDS, PIECE_BYTES, Offer, digests_of, name_of_snapshot
from swarm.state_sync.download_window import MAX_WINDOW_BYTES

MAX_STATE_UPLOADS = 2
"""At a time: whoever has the state soon hands it over as well."""
MAX_SNAPSHOTS = 8
"""Copies of the state that are kept for those who download it; two, if more would take too much memory."""
MAX_HELD_BYTES = 2**31
STATES_PER_HOUR, AVERAGES_PER_HOUR = 4, 60
"""States, and averages, that a peer id gets in an hour."""
FREE_BYTES_PER_HOUR = 2.0**28
"""Bytes that a peer id gets in an hour in any case: a small model costs little, and a peer may come back often."""
MIN_BUSY_SECONDS = 0.5


class Content(NamedTuple):
    """What is sent: the offer of it, and its bytes, shape [n], uint8."""

    offer: Offer
    data: np.ndarray


@dataclass(eq=False)
class Snapshot:
    """The state as it was when somebody asked for it, which all who do so until it changes share; or an average.

    Args:
        version: of the state; None for an average
        ready: a future of its `Content`
        average_of: the step that the average ended; None for the state
    """

    version: int | None
    ready: asyncio.Future
    average_of: int | None = None

    @property
    def content(self) -> Content | None:
        """None while it is being made, or if it could not be."""
        if not self.ready.done() or self.ready.cancelled() or self.ready.exception() is not None:
            return None
        return self.ready.result()

    @property
    def held_bytes(self) -> int | None:
        """None while it is being made."""
        if not self.ready.done():
            return None
        return 0 if self.content is None else self.content.data.nbytes


@dataclass(eq=False)
class Upload:
    """A state or an average on its way to one peer.

    Args:
        snapshot: what is sent
        sent: its pieces that were sent
        sent_bytes: of them
        streams: tasks that send them
        began: monotonic seconds
        moved_at: monotonic seconds when something was asked for last
    """

    snapshot: Snapshot
    timeouts: Timeouts = DEFAULT_TIMEOUTS
    sent: set[int] = field(default_factory=set)
    sent_bytes: int = 0
    streams: set[asyncio.Task] = field(default_factory=set)
    began: float = field(default_factory=time.monotonic)
    moved_at: float = field(default_factory=time.monotonic)

    def send(self, index: int, num_bytes: int) -> None:
        """A piece is sent."""
        self.sent.add(index)
        self.sent_bytes += num_bytes
        self.moved_at = time.monotonic()

    @property
    def is_complete(self) -> bool:
        """Whether all pieces have been sent."""
        content = self.snapshot.content
        return content is not None and len(self.sent) == content.offer.num_pieces

    @property
    def is_used_up(self) -> bool:
        """Whether pieces were asked for so often that no line can have lost them."""
        content = self.snapshot.content
        return content is not None and self.sent_bytes > 2 * content.data.nbytes + MAX_WINDOW_BYTES

    @property
    def is_in_the_way(self) -> bool:
        """Whether others wait for it: not if its reader has everything, takes nothing, or hardly anything."""
        now = time.monotonic()
        is_slow = now - self.began > self.timeouts.judge_seconds and self.bytes_per_second < SLOWEST_BYTES_PER_SECOND
        return not self.is_complete and now - self.moved_at < self.timeouts.stalled_seconds and not is_slow

    @property
    def bytes_per_second(self) -> float:
        return self.sent_bytes / max(1e-3, time.monotonic() - self.began)

    @property
    def seconds_left(self) -> float:
        """As far as can be told."""
        content = self.snapshot.content
        if content is None or not self.sent:
            return 1.0
        return (content.data.nbytes - len(self.sent) * PIECE_BYTES) / self.bytes_per_second

    def end(self) -> None:
        """Nothing more is sent."""
        for stream in self.streams:
            stream.cancel()


def content_of(description: bytes, data: np.ndarray) -> Content:
    """Computes digests, which takes a second for each gigabyte or so."""
    digests = digests_of(data)
    return Content(Offer(0.0, name_of_snapshot(description, digests), len(data), digests, description), data)


class Uploads:
    """All that this peer sends now, or has sent a moment ago."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, timeouts: Timeouts = DEFAULT_TIMEOUTS):
        self._clock, self._timeouts = clock, timeouts
        self.of: dict[PeerID, Upload] = {}
        self._used: OrderedDict[tuple[PeerID, bool], tuple[float, float]] = OrderedDict()
        """Bytes that a peer id has got (of averages, if so) less what it may have got since, and when that was."""

    # ---- who gets something -----------------------------------------------------------------------------------------

    def busy_seconds(self, peer_id: PeerID, num_bytes: int) -> float:
        """So long others get the state first, or this peer has had it too often; 0.0 if it gets it now.

        Args:
            num_bytes: of the state
        """
        others = [upload for other, upload in self.of.items() if other != peer_id]
        before = [upload for upload in others if upload.snapshot.version is not None and upload.is_in_the_way]
        seconds = self._over_quota_seconds(peer_id, num_bytes, is_average=False)
        if len(before) >= MAX_STATE_UPLOADS:
            seconds = max(seconds, MIN_BUSY_SECONDS, min(upload.seconds_left for upload in before))
        return min(seconds, MAX_BUSY_SECONDS)

    def has_used_up(self, peer_id: PeerID, num_bytes: int) -> bool:
        """Whether it has had enough averages, each of so many bytes."""
        return self._over_quota_seconds(peer_id, num_bytes, is_average=True) > 0

    def _over_quota_seconds(self, peer_id: PeerID, num_bytes: int, is_average: bool) -> float:
        used, since = self._used.get((peer_id, is_average), (0.0, 0.0))
        per_hour = max(FREE_BYTES_PER_HOUR, num_bytes * (AVERAGES_PER_HOUR if is_average else STATES_PER_HOUR))
        used -= (self._clock() - since) * per_hour / 3600
        return max(0.0, used + num_bytes - per_hour) / per_hour * 3600

    def count(self, peer_id: PeerID, upload: Upload, num_bytes: int) -> None:
        """It gets so many bytes."""
        is_average, content = upload.snapshot.version is None, upload.snapshot.content
        times = AVERAGES_PER_HOUR if is_average else STATES_PER_HOUR
        per_hour = max(FREE_BYTES_PER_HOUR, content.data.nbytes * times)
        now, key = self._clock(), (peer_id, is_average)
        used, since = self._used.pop(key, (0.0, now))
        self._used[key] = max(0.0, used - (now - since) * per_hour / 3600) + num_bytes, now
        while len(self._used) > 4 * MAX_GROUP_SIZE:
            self._used.popitem(last=False)

    # ---- memory -----------------------------------------------------------------------------------------------------

    def snapshot_of(self, version: int) -> Snapshot | None:
        """The copy of this state, if there is one."""
        return next((upload.snapshot for upload in self.of.values() if upload.snapshot.version == version), None)

    def forget(self, snapshot: Snapshot) -> None:
        """It could not be made: nobody gets it, and who has asked for it is in nobody's way."""
        for peer_id in [peer_id for peer_id, upload in self.of.items() if upload.snapshot is snapshot]:
            del self.of[peer_id]

    def sweep(self) -> None:
        """Forget those who have everything, or have not asked for anything for long."""
        now = self._clock()
        for peer_id, upload in [*self.of.items()]:
            if now - upload.moved_at > self._timeouts.kept_seconds or (upload.is_complete and not upload.streams):
                upload.end()
                del self.of[peer_id]

    def make_room(self) -> bool:
        """Whether another copy of the state may be made; who does not read any more makes room for it."""
        self.sweep()
        states = {peer_id: upload for peer_id, upload in self.of.items() if upload.snapshot.version is not None}
        idle = [peer_id for peer_id, upload in states.items() if not upload.is_in_the_way]
        idle.sort(key=lambda peer_id: states[peer_id].moved_at)
        while not self._has_room() and idle:
            self.of.pop(idle.pop(0)).end()
        return self._has_room()

    def _has_room(self) -> bool:
        snapshots = {upload.snapshot for upload in self.of.values() if upload.snapshot.version is not None}
        sizes = [snapshot.held_bytes for snapshot in snapshots]
        largest = max((size for size in sizes if size is not None), default=MAX_HELD_BYTES)
        held = sum(largest if size is None else size for size in sizes)
        return len(snapshots) < MAX_SNAPSHOTS and (len(snapshots) < 2 or held < MAX_HELD_BYTES)
