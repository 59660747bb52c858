"""States and averages that are sent: what goes to which peer, how fast, and how much memory that may take."""

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
"""States that are sent at the same time. More are not needed: a peer that has the state soon donates it as well."""
MAX_SNAPSHOTS = 8
"""Copies of the state that are kept for downloads; two, if more would take too much memory."""
MAX_HELD_BYTES = 2**31
"""Bytes of copies at which no third copy of the state is made."""
MAX_COPIED_BYTES = 2**28
"""Bytes of averages that were copied, to be sent together, at which no more are copied."""
STATES_PER_HOUR, AVERAGES_PER_HOUR = 4, 60
"""States, and averages, that a peer id gets in an hour."""
COPY_SHARE = 0.1
"""Share of a state for which a copy counts, also if the peer takes none of it. It is small, as an honest joiner asks
several donors and takes nothing from the slower ones."""
FREE_BYTES_PER_HOUR = 2.0**28
"""Bytes that a peer id gets in an hour in any case: a small model costs little, and a peer may come back often."""
MIN_BUSY_SECONDS = 0.5


class Content(NamedTuple):
    """The content of a snapshot.

    Args:
        offer: its offer
        data: its bytes, shape [n], uint8
    """

    offer: Offer
    data: np.ndarray


@dataclass(eq=False)
class Snapshot:
    """A copy of the state, shared by all peers that ask before the state changes; or averages.

    Args:
        version: number of the state's version; None for averages
        ready: a future of its `Content`
        average_of: the step that the first average ended; None for the state
        average_bytes: bytes of the first average; 0 for the state
        copied_bytes: bytes of averages that were copied; 0 for the state, and for an average that needs no copy
    """

    version: int | None
    ready: asyncio.Future
    average_of: int | None = None
    average_bytes: int = 0
    copied_bytes: int = 0

    @property
    def content(self) -> Content | None:
        """The content; None while it is being made, or if that has failed."""
        if not self.ready.done() or self.ready.cancelled() or self.ready.exception() is not None:
            return None
        return self.ready.result()

    @property
    def held_bytes(self) -> int | None:
        """Bytes of memory that it takes; None while it is being made."""
        if not self.ready.done():
            return None
        return 0 if self.content is None else self.content.data.nbytes


@dataclass(eq=False)
class Upload:
    """A state or an average on its way to one peer.

    Args:
        snapshot: what is sent
        sent: indices of the pieces that were sent
        sent_bytes: bytes of all pieces that were sent, repetitions included
        streams: tasks that send them
        began: monotonic seconds when the upload began
        moved_at: monotonic seconds when a piece was sent last, or the upload began
    """

    snapshot: Snapshot
    timeouts: Timeouts = DEFAULT_TIMEOUTS
    sent: set[int] = field(default_factory=set)
    sent_bytes: int = 0
    streams: set[asyncio.Task] = field(default_factory=set)
    began: float = field(default_factory=time.monotonic)
    moved_at: float = field(default_factory=time.monotonic)

    def send(self, index: int, num_bytes: int) -> None:
        """Note that a piece is sent."""
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
        """Whether the peer has asked for more pieces than broken lines can explain: about twice the content."""
        content = self.snapshot.content
        return content is not None and self.sent_bytes > 2 * content.data.nbytes + MAX_WINDOW_BYTES

    @property
    def is_in_the_way(self) -> bool:
        """Whether it takes one of the places for uploads: not if its reader has everything, stalls, or is very slow."""
        now = time.monotonic()
        is_slow = now - self.began > self.timeouts.judge_seconds and self.bytes_per_second < SLOWEST_BYTES_PER_SECOND
        return not self.is_complete and now - self.moved_at < self.timeouts.stalled_seconds and not is_slow

    @property
    def bytes_per_second(self) -> float:
        return self.sent_bytes / max(1e-3, time.monotonic() - self.began)

    @property
    def seconds_left(self) -> float:
        """Estimated seconds until it is complete; 1.0 before a piece was sent."""
        content = self.snapshot.content
        if content is None or not self.sent:
            return 1.0
        return (content.data.nbytes - len(self.sent) * PIECE_BYTES) / self.bytes_per_second

    def end(self) -> None:
        """Send nothing more."""
        for stream in self.streams:
            stream.cancel()


def content_of(description: bytes, data: np.ndarray) -> Content:
    """Make the content with its offer. The digests take about a second for each gigabyte."""
    digests = digests_of(data)
    return Content(Offer(0.0, name_of_snapshot(description, digests), len(data), digests, description), data)


def _bytes_per_hour(num_bytes: int, is_average: bool) -> float:
    """The quota of a peer id, from the bytes of one state or of one average."""
    most = AVERAGES_PER_HOUR if is_average else STATES_PER_HOUR * (1 + COPY_SHARE)
    return max(FREE_BYTES_PER_HOUR, num_bytes * most)


class Uploads:
    """All uploads of this peer, running or recent, and the quotas of the peers that get them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, timeouts: Timeouts = DEFAULT_TIMEOUTS):
        self._clock, self._timeouts = clock, timeouts
        self.of: dict[PeerID, Upload] = {}
        self._used: OrderedDict[tuple[PeerID, bool], tuple[float, float]] = OrderedDict()
        """For each peer id, and whether it is for averages: bytes used of the quota, and when. The quota refills."""

    # ---- which peer gets something ----------------------------------------------------------------------------------

    def busy_seconds(self, peer_id: PeerID, num_bytes: int) -> float:
        """Seconds that a peer has to wait for the state; 0.0 if it gets it now.

        It waits for other peers' uploads, or because it has had the state too often.

        Args:
            peer_id: the peer that asks
            num_bytes: bytes of the state
        """
        others = [upload for other, upload in self.of.items() if other != peer_id]
        before = [upload for upload in others if upload.snapshot.version is not None and upload.is_in_the_way]
        seconds = self._over_quota_seconds(peer_id, num_bytes, is_average=False)
        if len(before) >= MAX_STATE_UPLOADS:
            seconds = max(seconds, MIN_BUSY_SECONDS, min(upload.seconds_left for upload in before))
        return min(seconds, MAX_BUSY_SECONDS)

    def has_used_up(self, peer_id: PeerID, num_bytes: int) -> bool:
        """Whether a peer has used up its quota of averages, of `num_bytes` each."""
        return self._over_quota_seconds(peer_id, num_bytes, is_average=True) > 0

    def _over_quota_seconds(self, peer_id: PeerID, num_bytes: int, is_average: bool) -> float:
        used, since = self._used.get((peer_id, is_average), (0.0, 0.0))
        per_hour = _bytes_per_hour(num_bytes, is_average)
        used -= (self._clock() - since) * per_hour / 3600
        return max(0.0, used + num_bytes - per_hour) / per_hour * 3600

    def count_copy(self, peer_id: PeerID, snapshot: Snapshot) -> None:
        """Count a copy of the state against the quota of a peer that asked for it, whether or not the peer takes it."""
        if snapshot.content is not None:
            self._count(peer_id, snapshot, COPY_SHARE * snapshot.content.data.nbytes)

    def count_sent(self, peer_id: PeerID, upload: Upload, num_bytes: int) -> None:
        """Count bytes that are sent against the quota of their receiver."""
        self._count(peer_id, upload.snapshot, num_bytes)

    def _count(self, peer_id: PeerID, snapshot: Snapshot, num_bytes: float) -> None:
        is_average = snapshot.version is None
        one = snapshot.average_bytes if is_average else snapshot.content.data.nbytes
        per_hour = _bytes_per_hour(one, is_average)
        now, key = self._clock(), (peer_id, is_average)
        used, since = self._used.pop(key, (0.0, now))
        self._used[key] = max(0.0, used - (now - since) * per_hour / 3600) + num_bytes, now
        while len(self._used) > 4 * MAX_GROUP_SIZE:
            self._used.popitem(last=False)

    # ---- memory -----------------------------------------------------------------------------------------------------

    def snapshot_of(self, version: int) -> Snapshot | None:
        """The copy of this version of the state, if there is one."""
        return next((upload.snapshot for upload in self.of.values() if upload.snapshot.version == version), None)

    def forget(self, snapshot: Snapshot) -> None:
        """Drop the uploads of a snapshot that could not be made."""
        for peer_id in [peer_id for peer_id, upload in self.of.items() if upload.snapshot is snapshot]:
            del self.of[peer_id]

    def sweep(self) -> None:
        """Drop uploads whose peers have everything, or have not asked for a piece for `kept_seconds`."""
        now = self._clock()
        for peer_id, upload in [*self.of.items()]:
            if now - upload.moved_at > self._timeouts.kept_seconds or (upload.is_complete and not upload.streams):
                upload.end()
                del self.of[peer_id]

    def make_room(self) -> bool:
        """Whether another copy of the state may be made. Uploads that are not read any more make room for it."""
        self.sweep()
        states = {peer_id: upload for peer_id, upload in self.of.items() if upload.snapshot.version is not None}
        idle = [peer_id for peer_id, upload in states.items() if not upload.is_in_the_way]
        return self._drop_while_full(idle, self._has_room)

    def make_room_for_averages(self) -> bool:
        """Whether more averages may be copied. Uploads that stall, or that no stream takes, make room for them."""
        copies = {peer_id: upload for peer_id, upload in self.of.items() if upload.snapshot.copied_bytes}
        idle = [peer_id for peer_id, upload in copies.items() if not (upload.streams and upload.is_in_the_way)]
        return self._drop_while_full(idle, self._has_room_for_averages)

    def _drop_while_full(self, idle: list[PeerID], has_room: Callable[[], bool]) -> bool:
        """Drop these uploads, the oldest first, until there is room. Return whether there is."""
        idle.sort(key=lambda peer_id: self.of[peer_id].moved_at)
        while not has_room() and idle:
            self.of.pop(idle.pop(0)).end()
        return has_room()

    def _has_room(self) -> bool:
        snapshots = {upload.snapshot for upload in self.of.values() if upload.snapshot.version is not None}
        sizes = [snapshot.held_bytes for snapshot in snapshots]
        largest = max((size for size in sizes if size is not None), default=MAX_HELD_BYTES)
        held = sum(largest if size is None else size for size in sizes)
        return len(snapshots) < MAX_SNAPSHOTS and (len(snapshots) < 2 or held < MAX_HELD_BYTES)

    def _has_room_for_averages(self) -> bool:
        snapshots = {upload.snapshot for upload in self.of.values()}
        return sum(snapshot.copied_bytes for snapshot in snapshots) < MAX_COPIED_BYTES
