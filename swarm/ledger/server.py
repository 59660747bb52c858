"""Hands out this peer's ledger to any caller, slowly, and passes on the ledgers of peers that cannot be called."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator as Stream
from collections.abc import Callable
from pathlib import Path
from typing import AsyncIterator  # noqa: UP035 (hivemind does not recognise the one of collections.abc)

from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_logger

from swarm.ledger.lines import MAX_LINE_BYTES, digest_of
from swarm.ledger.messages import ANSWER_BYTES, PIECE_BYTES, LedgerOffer, LedgerWish
from swarm.runtime.async_utils import in_thread, until_caller_hangs_up
from swarm.runtime.line_use import LineUse
from swarm.runtime.token_bucket import TokenBucket, TokenBuckets

logger = get_logger(__name__)

MAX_STREAMS = 4
"""Streams at a time, one for each caller."""
STREAM_SECONDS = 60.0
"""How long one stream may last."""
BYTES_PER_SECOND = 2**19
"""Speed of all streams together; it is low, since rounds come first."""
CALLS, CALLS_PER_SECOND = 32, 2.0
"""Calls of one caller: at once, and then in a second. Each ledger that is passed on takes one call."""
ALL_CALLS, ALL_CALLS_PER_SECOND = 128, 16.0
"""Calls of all callers: at once, and then in a second. A peer id costs a stranger nothing."""

PassOn = Callable[[PeerID, averaging_pb2.DownloadData], Stream[averaging_pb2.DownloadData]]
"""Asks a peer for its ledger, over a connection that the asked peer has made."""


class LedgerServer:
    """Serves ledgers in the averaging process.

    Args:
        path: of this peer's ledger; None if it keeps none
        may_pass_on: whether a caller may have that peer's ledger through this one
        pass_on: asks that peer
        line: makes what this peer sends wait for its turn, and counts it
        bytes_per_second: speed of all streams together
    """

    def __init__(
        self,
        path: Path | None,
        may_pass_on: Callable[[PeerID], bool],
        pass_on: PassOn,
        line: LineUse | None = None,
        bytes_per_second: float = BYTES_PER_SECOND,
    ):
        self._path, self._may_pass_on, self._pass_on = path, may_pass_on, pass_on
        self._line, self._bytes_per_second = line or LineUse(), bytes_per_second
        self._callers: set[PeerID] = set()
        self._calls = TokenBuckets(CALLS, CALLS_PER_SECOND)
        self._all_calls = TokenBucket(ALL_CALLS, ALL_CALLS_PER_SECOND)
        self._turn = asyncio.Lock()

    async def rpc_download_ledger(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """Send a ledger from some place on. The caller need not be a member: a ledger is public."""
        caller = context.remote_id
        try:
            wish = LedgerWish.from_bytes(request.metadata)
            peer = PeerID(wish.peer) if wish.peer else None
        except ValueError as error:
            logger.debug(f"{caller} asked for {error}")
            return
        if caller in self._callers or len(self._callers) >= MAX_STREAMS or not self._may_call(caller):
            return
        if peer is not None and not self._may_pass_on(peer):
            return
        end = asyncio.get_running_loop().call_later(STREAM_SECONDS, asyncio.current_task().cancel)
        self._callers.add(caller)  # `end` frees this place in time, even if the caller reads slowly
        try:
            num_bytes = 0
            async for message in self._own(wish) if peer is None else self._of(peer, wish):
                num_bytes += len(message.metadata)
                if num_bytes > ANSWER_BYTES + PIECE_BYTES:
                    return
                await self._wait_for_turn(message.ByteSize())
                yield message
            await until_caller_hangs_up()
        finally:
            end.cancel()
            self._callers.discard(caller)

    def _may_call(self, caller: PeerID) -> bool:
        return self._calls.take(caller) and self._all_calls.take()

    async def _wait_for_turn(self, num_bytes: int) -> None:
        async with self._turn:
            await asyncio.sleep(num_bytes / self._bytes_per_second)
        await self._line.send(num_bytes)

    async def _own(self, wish: LedgerWish) -> Stream[averaging_pb2.DownloadData]:
        offer = await in_thread(self._offer, wish)
        yield averaging_pb2.DownloadData(metadata=offer.to_bytes())
        place, end = offer.begin, min(offer.size, offer.begin + ANSWER_BYTES)
        while place < end:
            piece = await in_thread(self._piece, place, min(PIECE_BYTES, end - place))
            if not piece:
                return
            place += len(piece)
            yield averaging_pb2.DownloadData(metadata=piece)

    async def _of(self, peer: PeerID, wish: LedgerWish) -> Stream[averaging_pb2.DownloadData]:
        own = LedgerWish(b"", wish.ledger, wish.begin)
        try:
            async for message in self._pass_on(peer, averaging_pb2.DownloadData(metadata=own.to_bytes())):
                if len(message.metadata) > PIECE_BYTES:
                    return
                yield averaging_pb2.DownloadData(metadata=message.metadata)
        except Exception as error:  # of the network: the peer is gone, or has another version
            logger.debug(f"{peer} does not hand over its ledger: {error!r}")

    def _offer(self, wish: LedgerWish) -> LedgerOffer:
        if self._path is None:
            return LedgerOffer()
        try:
            with open(self._path, "rb") as file:
                first = file.readline(MAX_LINE_BYTES + 1)
                size = file.seek(0, os.SEEK_END)
                os.fdatasync(file.fileno())  # a power failure must not take back what other peers have
        except OSError:
            return LedgerOffer()
        if not first.endswith(b"\n"):
            return LedgerOffer()
        ledger = digest_of(first[:-1])
        begin = wish.begin if ledger == wish.ledger else 0
        return LedgerOffer(ledger, min(begin, size), size)

    def _piece(self, place: int, num_bytes: int) -> bytes:
        try:
            with open(self._path, "rb") as file:
                file.seek(place)
                return file.read(num_bytes)
        except OSError:
            return b""
