"""How many streams, and how many bytes of them, each caller may keep a process of this peer busy with.

An open stream costs a file, and a message that is being read costs its size. A name costs a stranger nothing, so all
strangers together have a limit as well; whoever has been in a group with this process is no stranger.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from hivemind.p2p import P2P, PeerID
from hivemind.utils import get_logger

from swarm.network.acquaintances import Acquaintances

logger = get_logger(__name__)

STREAMS = 24
"""Of one peer at a time: 8 stripes of parts, 8 slices of a state, a knock, and as many as it may be about to close."""
STRANGERS_STREAMS = 512
"""Of all strangers together, or a quarter of the files that may be open if that is less. One stranger may have as many
as any other peer: a newcomer downloads the state in slices, and sends parts before we know of its group."""
BUFFERED_BYTES = 2**26
"""Of one peer: messages that are being read, or have been and wait for their handler."""
STRANGERS_BYTES = 2**24
"""Of all strangers together. Twice as much took 43 MB of the averaging process, and 19 MB of p2pd."""
REQUEST_SECONDS = 10.0
"""In which a request is complete."""
MAX_REQUEST_BYTES = 2**16
"""Of a request that is a single message."""
SLOWEST_BYTES_PER_SECOND = 50_000
"""A message of parts that has begun may take so much longer than `REQUEST_SECONDS`, over a slow line."""
MAX_COMPLAINTS = 16


class StreamLimits:
    """What the callers of one process use at this moment. It belongs to one event loop."""

    def __init__(self) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.strangers_streams = min(STRANGERS_STREAMS, files // 4) if files > 0 else STRANGERS_STREAMS
        self._met = Acquaintances()
        self._streams: Counter[PeerID] = Counter()
        self._bytes: Counter[PeerID] = Counter()
        self._freed = asyncio.Event()
        self._complained: set[PeerID | None] = set()

    def met(self, peers: Iterable[PeerID]) -> None:
        """These have been in a group with this process."""
        self._met.add(peers)
        self._wake()

    @property
    def known(self) -> tuple[PeerID, ...]:
        """Who is no stranger."""
        return self._met.peers

    def forget(self, peers: Iterable[PeerID]) -> None:
        """These are strangers from now on; what they use counts as strangers' use."""
        self._met.drop(peers)

    def knows(self, peer: PeerID) -> bool:
        """Whether it has been in a group with this process."""
        return peer in self._met

    def open_stream(self, peer: PeerID) -> bool:
        """Whether one more stream of this peer may be served; then `close_stream` has to be called for it."""
        is_stranger = peer not in self._met
        if self._streams[peer] >= STREAMS:
            self._complain_once(peer, f"{peer} has {STREAMS} streams open")
            return False
        if is_stranger and self._of_strangers(self._streams) >= self.strangers_streams:
            self._complain_once(None, f"Strangers have {self.strangers_streams} streams open")
            return False
        self._streams[peer] += 1
        return True

    def _complain_once(self, about: PeerID | None, what: str) -> None:
        if about not in self._complained and len(self._complained) < MAX_COMPLAINTS:
            self._complained.add(about)
            logger.warning(f"{what}: further ones are refused")

    def close_stream(self, peer: PeerID) -> None:
        """A stream that was served has ended."""
        self._take(self._streams, peer, 1)

    async def take_bytes(self, peer: PeerID, num_bytes: int) -> None:
        """Wait until so many bytes of this peer may be buffered; `give_bytes` gives them back."""
        while not self._has_room(peer, num_bytes):
            await self._freed.wait()
        self._bytes[peer] += num_bytes

    def give_bytes(self, peer: PeerID, num_bytes: int) -> None:
        """They are not buffered any more."""
        self._take(self._bytes, peer, num_bytes)
        self._wake()

    def _has_room(self, peer: PeerID, num_bytes: int) -> bool:
        if self._bytes[peer] + num_bytes > BUFFERED_BYTES:
            return False
        return peer in self._met or self._of_strangers(self._bytes) + num_bytes <= STRANGERS_BYTES

    def _of_strangers(self, used: Counter[PeerID]) -> int:
        return sum(number for peer, number in used.items() if peer not in self._met)

    def _wake(self) -> None:
        freed, self._freed = self._freed, asyncio.Event()
        freed.set()

    @staticmethod
    def _take(used: Counter[PeerID], peer: PeerID, number: int) -> None:
        used[peer] -= number
        if used[peer] <= 0:
            del used[peer]


_limits: WeakKeyDictionary[P2P, StreamLimits] = WeakKeyDictionary()
"""Each as long as its connection to p2pd."""


def limits_of(p2p: P2P) -> StreamLimits:
    """The limits of all streams that this process serves."""
    if p2p not in _limits:
        _limits[p2p] = StreamLimits()
    return _limits[p2p]
