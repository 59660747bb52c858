"""The server's side of one stream: it reads requests and sends answers, within limits of time, bytes and streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from hivemind.p2p import P2P, P2PContext
from hivemind.proto import p2pd_pb2
from hivemind.utils import get_logger

from swarm.network.stream_limits import MAX_REQUEST_BYTES, REQUEST_SECONDS, SLOWEST_BYTES_PER_SECOND, StreamLimits

logger = get_logger(__name__)

MAX_MESSAGE_BYTES = 2**23
PREFETCHED = 5
"""Messages of one stream that are read before its handler asks for them."""


class ServedStream:
    """One stream. It ends with its handler, when its caller hangs up, or when a request takes too long.

    A stranger's stream also ends if it has to make room for another stranger's.

    Args:
        limits: limits of all streams of this process
        context: the caller, and the name of the call
        reader: what the caller sends
        writer: where answers go
        message_type: protobuf type of the requests
    """

    def __init__(
        self,
        limits: StreamLimits,
        context: P2PContext,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        message_type: Any,
    ):
        self._limits, self._context, self._message_type = limits, context, message_type
        self._reader, self._writer = reader, writer
        self._requests: asyncio.Queue = asyncio.Queue(PREFETCHED)
        self._held_bytes = 0

    async def serve(self, handler: Callable, has_many_requests: bool) -> None:
        """Answer until the stream ends. A caller that has too many streams gets an error instead.

        Args:
            handler: gets the request, or an iterator of requests, and the context
            has_many_requests: whether the caller sends a stream of requests
        """
        caller = self._context.remote_id

        def end() -> None:
            answering.cancel()
            # Not closed: a caller that does not read what is on its way could keep the file open for good.
            self._writer.transport.abort()

        if not self._limits.open_stream(caller, end):
            return await self._fail("too many streams at a time")
        receiving = asyncio.ensure_future(self._receive_many() if has_many_requests else self._receive_one())
        answering = asyncio.ensure_future(self._answer(handler, has_many_requests))
        try:
            await asyncio.wait({receiving, answering}, return_when=asyncio.FIRST_COMPLETED)
            failed = answering.done() and not answering.cancelled()
            if failed and (error := answering.exception()) is not None:
                logger.debug(f"{self._context.handle_name} failed", exc_info=error)
                await self._fail(str(error))
        finally:
            receiving.cancel()
            answering.cancel()
            await asyncio.gather(receiving, answering, return_exceptions=True)
            self._limits.close_stream(caller, end)
            self._limits.give_bytes(caller, self._held_bytes)

    async def _fail(self, message: str) -> None:
        with suppress(Exception):  # the caller may be gone
            await P2P.send_protobuf(p2pd_pb2.RPCError(message=message), self._writer)

    async def _answer(self, handler: Callable, has_many_requests: bool) -> None:
        request = self._received() if has_many_requests else await self._requests.get()
        answers = handler(request, self._context)
        if not hasattr(answers, "__aiter__"):
            return await P2P.send_protobuf(await answers, self._writer)
        async for answer in answers:
            await P2P.send_protobuf(answer, self._writer)

    async def _received(self) -> AsyncIterator:
        while (request := await self._requests.get()) is not None:  # None: the caller has sent everything
            num_bytes, message = request
            yield message
            self._give_bytes(num_bytes)

    async def _receive_one(self) -> None:
        """Read the single message of a request. It is small, so its bytes are not counted against the limits."""
        async with asyncio.timeout(REQUEST_SECONDS):
            is_message, num_bytes = await self._read_header()
            if not is_message or num_bytes > MAX_REQUEST_BYTES:
                raise ValueError(f"a request of {num_bytes} bytes")
            request = self._message_type.FromString(await self._reader.readexactly(num_bytes))
            await self._read_end()
        await self._requests.put(request)
        await self._reader.read(1)  # until the caller hangs up

    async def _receive_many(self) -> None:
        header = await asyncio.wait_for(self._read_header(), REQUEST_SECONDS)
        while header[0]:
            await self._requests.put(await self._read_message(header[1]))
            header = await self._read_header()
        await self._reader.readexactly(header[1])
        await self._requests.put(None)
        await self._reader.read(1)

    async def _read_header(self) -> tuple[bool, int]:
        """Whether a message follows (False: the end marker), and its size in bytes."""
        header = await self._reader.readexactly(1 + P2P.HEADER_LEN)
        is_message, num_bytes = header[:1] == P2P.MESSAGE_MARKER, int.from_bytes(header[1:], P2P.BYTEORDER)
        if num_bytes > (MAX_MESSAGE_BYTES if is_message else MAX_REQUEST_BYTES):
            raise ValueError(f"a message of {num_bytes} bytes")
        return is_message, num_bytes

    async def _read_end(self) -> None:
        is_message, num_bytes = await self._read_header()
        if is_message:
            raise ValueError("more than one request")
        await self._reader.readexactly(num_bytes)

    async def _read_message(self, num_bytes: int) -> tuple[int, Any]:
        async with asyncio.timeout(REQUEST_SECONDS + num_bytes / SLOWEST_BYTES_PER_SECOND):
            await self._limits.take_bytes(self._context.remote_id, num_bytes)  # before the message is in memory
            self._held_bytes += num_bytes
            content = await self._reader.readexactly(num_bytes)
        return num_bytes, self._message_type.FromString(content)

    def _give_bytes(self, num_bytes: int) -> None:
        self._held_bytes -= num_bytes
        self._limits.give_bytes(self._context.remote_id, num_bytes)
