"""Downloads from one donor: asks for pieces over several streams, and goes on after a line has broken down."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import closing

from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError
from hivemind.proto.averaging_pb2 import DownloadData

from swarm.protocol.admission import OPEN
from swarm.protocol.certificates import printed
from swarm.protocol.messages import RoundFailed
from swarm.state_sync.download import Download
from swarm.state_sync.download_messages import Offer, Wish, ask_for
from swarm.state_sync.download_window import FIRST_PIECES

NUM_STREAMS = 8
"""Streams side by side: one does not fill a long link, since each starts with a small window of its own."""
PIECES_PER_STREAM = 4
"""Fewest pieces for each stream: a small download is not worth many streams."""
MAX_ATTEMPTS, AGAIN_SECONDS = 5, 1.0
"""Times in a row that a line may break down before a piece has arrived, and the pause after each."""

OpenStream = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
BROKEN = (P2PDaemonError, P2PHandlerError, OSError, asyncio.IncompleteReadError)


class NotKept(Exception):  # noqa: N818
    """The donor no longer has the snapshot that it offered: what has arrived of it is of no use any more."""


class Stream:
    """One of several streams to a donor, with the pieces that were asked for over it and the time of each request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self.asked: deque[tuple[int, float]] = deque()

    def send(self, data: bytes) -> None:
        """Send a wish or a request for a piece. Both are short and few, so this does not wait until they have left."""
        message = DownloadData(metadata=data).SerializeToString()
        self._writer.write(P2P.MESSAGE_MARKER + len(message).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER) + message)

    def ask(self, index: int) -> None:
        self.send(ask_for(index))
        self.asked.append((index, time.monotonic()))

    async def receive(self) -> DownloadData:
        message, error = await P2P.receive_protobuf(DownloadData, self._reader)
        if error is not None:
            raise RoundFailed(f"the donor could not send it: {printed(error.message)[:200]}")
        return message

    def close(self) -> None:
        self._writer.close()


class Pull:
    """Pulls one download from its donor.

    Args:
        download: the download, with what has arrived
        open_stream: opens a stream to its donor
        on_message: called with each message that arrives
        show: puts this peer's certificate before a wish
    """

    def __init__(
        self,
        download: Download,
        open_stream: OpenStream,
        on_message: Callable[[DownloadData], None],
        show: Callable[[bytes], bytes] = OPEN.show,
    ):
        self.download, self._open_stream, self._on_message, self._show = download, open_stream, on_message, show
        self._streams: list[Stream] = []
        self._is_complete = asyncio.Event()

    async def run(self) -> None:
        """Pull until all pieces have arrived.

        Raises:
            RoundFailed: the donor cannot be called, has not got it, or sends what it should not
        """
        download, attempts, renamed = self.download, 0, 0
        while not download.is_complete:
            before = download.pieces_to_come
            try:
                await self._ask_over_streams()
            except NotKept as error:
                renamed += 1
                if renamed == MAX_ATTEMPTS:
                    raise RoundFailed(f"{download.donor} offers another state each time") from error
                download.forget()
            except BROKEN as error:
                attempts = attempts + 1 if download.pieces_to_come == before else 0
                if download.offer is None or attempts == MAX_ATTEMPTS:
                    raise RoundFailed(f"{download.donor} broke off") from error
                await asyncio.sleep(AGAIN_SECONDS)

    async def _ask_over_streams(self) -> None:
        download = self.download
        first = await self._begin()
        complete = asyncio.ensure_future(self._is_complete.wait())
        waiting = {complete, asyncio.ensure_future(self._read(first))}
        more = min(NUM_STREAMS, download.pieces_to_come // PIECES_PER_STREAM) - 1
        waiting |= {asyncio.ensure_future(self._read_one_more()) for _ in range(more)}
        try:
            while not download.is_complete:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {complete}:
                    task.result()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            for stream in self._streams:
                stream.close()
                download.put_back(index for index, _ in stream.asked)
            self._streams.clear()

    async def _begin(self) -> Stream:
        """Open the first stream. Over it, the donor offers what it has, or goes on with what it has offered."""
        download = self.download
        is_new = download.offer is None
        stream = await self._open()
        try:
            snapshot = b"" if is_new else download.offer.snapshot
            stream.send(self._show(Wish(download.request.average_of, snapshot, download.request.waits).to_bytes()))
            for index in range(FIRST_PIECES if is_new else 0):
                stream.ask(index)  # saves a round trip; the donor ignores pieces that do not exist
            self._read_offer(await stream.receive())
        except BaseException:
            stream.close()
            raise
        known = [piece for piece in stream.asked if piece[0] < download.offer.num_pieces]
        stream.asked = deque(known)
        for index, _ in known:
            download.missing.remove(index)
            download.on_their_way += download.size_of(index)
        self._streams.append(stream)
        if download.is_complete:
            self._is_complete.set()
        return stream

    def _read_offer(self, message: DownloadData) -> None:
        download = self.download
        self._on_message(message)
        try:
            offer = Offer.from_bytes(message.metadata, download.request.max_bytes)
        except ValueError as error:
            raise RoundFailed(f"{download.donor} offers {error}") from error
        if download.offer is None:
            download.accept(offer)
        elif offer.snapshot != download.offer.snapshot:
            raise NotKept
        download.heard = time.monotonic()

    async def _read_one_more(self) -> None:
        """Open a further stream and read from it. If that fails, hangs, or breaks down later, the others suffice."""
        download = self.download
        try:
            stream = await self._open()
        except (*BROKEN, RoundFailed):
            return
        with closing(stream):
            try:
                stream.send(self._show(Wish(download.request.average_of, download.offer.snapshot).to_bytes()))
                offer = Offer.from_bytes((await stream.receive()).metadata, download.request.max_bytes)
            except (*BROKEN, ValueError, RoundFailed):
                return
            if offer.snapshot != download.offer.snapshot:
                return
            self._streams.append(stream)
            try:
                await self._read(stream)
            except BROKEN:  # a donor ends streams where strangers have too many
                self._streams.remove(stream)
                download.put_back(index for index, _ in stream.asked)
                self._ask()

    async def _open(self) -> Stream:
        seconds = self.download.timeouts.stream_seconds
        try:
            return Stream(*await asyncio.wait_for(self._open_stream(), seconds))
        except TimeoutError as error:
            raise RoundFailed(f"{self.download.donor} did not answer for {seconds:.0f} s") from error

    async def _read(self, stream: Stream) -> None:
        download = self.download
        self._ask()
        while True:
            message = await stream.receive()
            if not stream.asked:
                raise RoundFailed(f"{download.donor} sent a message that was not asked for")
            index, asked_at = stream.asked.popleft()
            download.take(index, message, time.monotonic() - asked_at)
            self._on_message(message)
            if download.is_complete:
                self._is_complete.set()
                return
            self._ask()

    def _ask(self) -> None:
        """Ask for as many pieces as may be on their way, each over the stream with the fewest."""
        while (index := self.download.next_piece()) is not None:
            min(self._streams, key=lambda stream: len(stream.asked)).ask(index)
