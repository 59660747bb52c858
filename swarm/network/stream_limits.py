"""Limits of the streams, and of their buffered bytes, that each caller may have open with a process of this peer.

An open stream costs a file, and a message that is being read costs its size. A name costs a stranger nothing, so all
strangers together have limits as well. If they have all their streams open, the stranger that has most gives one up for
a stranger that has fewer. If they have used up their bytes, the stranger that has most gives up all its streams. A peer
that has been in a group with this process is no stranger.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from weakref import WeakKeyDictionary

from hivemind.p2p import P2P, PeerID
from hivemind.utils import get_logger

from swarm.network.acquaintances import Acquaintances

logger = get_logger(__name__)

STREAMS = 24
"""Streams that one peer may have open: 8 stripes of parts, 8 slices of a state, a join request, and as many as it may
be about to close."""
STRANGERS_STREAMS = 512
"""Streams that all strangers together may have open, or a quarter of the files that may be open if that is less. One
stranger may have as many as any other peer. A newcomer downloads the state in slices, and sends parts before this peer
knows of its group."""
BUFFERED_BYTES = 2**26
"""Bytes of one peer's messages that are being read, or that wait for their handler."""
STRANGERS_BYTES = 2**24
"""Bytes of all strangers' messages. Twice as much took 43 MB of the averaging process, and 19 MB of p2pd."""
SMALL_BYTES, SMALL_MESSAGES_BYTES = 2**10, 2**20
"""Size of a small message, and how much more there is for small ones of strangers: a newcomer asks for each piece of a
state with one, and must not wait each time because of strangers that announce large ones."""
ROOM_SECONDS = 2.0
"""Time for which a stranger's message waits for room before streams of another stranger end for it. A peer that sends
much before this peer knows of its group is no stranger any more by then."""
REQUEST_SECONDS = 10.0
"""Time in which a request has to be complete."""
MAX_REQUEST_BYTES = 2**16
"""Size of a request that is a single message."""
SLOWEST_BYTES_PER_SECOND = 50_000
"""Speed of the slowest line that is allowed for: the time for a message of a stream is longer than `REQUEST_SECONDS` by
its bytes over this speed."""
MAX_COMPLAINTS = 16
"""Warnings about callers with too many streams."""


class StreamLimits:
    """Counts what the callers of one process use at this moment. It belongs to one event loop."""

    def __init__(self) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.strangers_streams = min(STRANGERS_STREAMS, files // 4) if files > 0 else STRANGERS_STREAMS
        self._met = Acquaintances()
        self._streams: dict[PeerID, list[Callable[[], None]]] = {}
        """For each peer, what ends each of its open streams, the oldest first."""
        self._bytes: Counter[PeerID] = Counter()
        self._freed = asyncio.Event()
        self._complained: set[PeerID | None] = set()

    def met(self, peers: Iterable[PeerID]) -> None:
        """Note that these peers have been in a group with this process."""
        self._met.add(peers)
        self._wake()

    @property
    def known(self) -> tuple[PeerID, ...]:
        """The peers that are no strangers."""
        return self._met.peers

    def forget(self, peers: Iterable[PeerID]) -> None:
        """Treat these peers as strangers from now on. What they use now counts as strangers' use."""
        self._met.drop(peers)

    def knows(self, peer: PeerID) -> bool:
        """Whether this peer has been in a group with this process."""
        return peer in self._met

    def open_stream(self, peer: PeerID, end: Callable[[], None]) -> bool:
        """Whether one more stream of this peer may be served. If so, `close_stream` has to be called when it ends.

        Args:
            end: ends this stream; called if it has to make room for another stranger
        """
        if len(self._streams.get(peer, ())) >= STREAMS:
            self._complain_once(peer, f"{peer} has {STREAMS} streams open")
            return False
        if peer not in self._met and self._num_of_strangers() >= self.strangers_streams and not self._make_room(peer):
            self._complain_once(None, f"Strangers have {self.strangers_streams} streams open")
            return False
        self._streams.setdefault(peer, []).append(end)
        return True

    def _num_of_strangers(self) -> int:
        return sum(len(streams) for peer, streams in self._streams.items() if peer not in self._met)

    def _make_room(self, peer: PeerID) -> bool:
        """End the newest stream of the stranger that has most, if this stranger does not have more then.

        So a few names cannot keep other strangers out by holding all streams. A download goes on without a stream that
        it has opened later, and not without its first one: hence the newest.
        """
        of_strangers = [streams for other, streams in self._streams.items() if other not in self._met]
        most = max(of_strangers, key=len, default=[])
        if len(most) - 1 < len(self._streams.get(peer, ())) + 1:
            return False
        most.pop()()
        return True

    def _complain_once(self, about: PeerID | None, what: str) -> None:
        if about not in self._complained and len(self._complained) < MAX_COMPLAINTS:
            self._complained.add(about)
            logger.warning(f"{what}: further ones are refused")

    def close_stream(self, peer: PeerID, end: Callable[[], None]) -> None:
        """Note that a stream for which `open_stream` returned True has ended, also if it had to make room."""
        streams = self._streams.get(peer, [])
        if end in streams:
            streams.remove(end)
        if not streams:
            self._streams.pop(peer, None)

    async def take_bytes(self, peer: PeerID, num_bytes: int) -> None:
        """Wait until so many bytes of this peer may be buffered; `give_bytes` gives them back.

        A stranger that has waited for `ROOM_SECONDS` gets the room of a stranger that has more bytes.
        """
        clock = asyncio.get_running_loop().time
        patient_until = clock() + ROOM_SECONDS
        while not self._has_room(peer, num_bytes):
            is_patient = clock() < patient_until
            if not is_patient:
                self._make_room_for_bytes(peer, num_bytes)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(patient_until if is_patient else None):
                    await self._freed.wait()
        self._bytes[peer] += num_bytes

    def give_bytes(self, peer: PeerID, num_bytes: int) -> None:
        """Note that so many bytes of this peer are not buffered any more."""
        self._bytes[peer] -= num_bytes
        if self._bytes[peer] <= 0:
            del self._bytes[peer]
        self._wake()

    def _has_room(self, peer: PeerID, num_bytes: int) -> bool:
        if self._bytes[peer] + num_bytes > BUFFERED_BYTES:
            return False
        of_strangers = sum(number for other, number in self._bytes.items() if other not in self._met)
        most = STRANGERS_BYTES + (SMALL_MESSAGES_BYTES if num_bytes <= SMALL_BYTES else 0)
        return peer in self._met or of_strangers + num_bytes <= most

    def _make_room_for_bytes(self, peer: PeerID, num_bytes: int) -> None:
        """End all streams of the stranger that has most bytes, if this stranger will have fewer than that one.

        A message counts from its header on. So two names that send no more than headers could hold all room.
        """
        of_strangers = {other: number for other, number in self._bytes.items() if other not in self._met}
        most = max(of_strangers, key=of_strangers.__getitem__, default=peer)
        if peer in self._met or self._bytes[peer] + num_bytes >= self._bytes[most]:
            return
        streams = self._streams.get(most, [])
        while streams:  # all: it may have opened the newest ones only to keep the one that holds the bytes
            streams.pop()()

    def _wake(self) -> None:
        # A new event for the next wait: the callers that this one wakes look again, and some wait again.
        freed, self._freed = self._freed, asyncio.Event()
        freed.set()


_limits: WeakKeyDictionary[P2P, StreamLimits] = WeakKeyDictionary()
"""By connection to p2pd: its limits, which are dropped together with it."""


def limits_of(p2p: P2P) -> StreamLimits:
    """The limits of all streams that this process serves."""
    if p2p not in _limits:
        _limits[p2p] = StreamLimits()
    return _limits[p2p]
