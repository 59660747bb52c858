"""Repairs of Hivemind 1.1.12's transport and DHT, made before any process of it begins.

- A call that is cancelled just before its answer arrives would end the task that reads all answers: the process would
  never hear anybody again. Found by reading ``ControlClient._read_from_persistent_conn``.
- A handler that is cancelled would leave its task behind.
- A stream whose handler has ended, while its caller still sends, would never be closed.
- A message could be as long as its sender likes.
- A stream that could not be opened would leave its connection to p2pd open, here and there, for each knock at the door
  of a dead peer.
- A search would write what it finds into what others have stored on this node.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import closing, suppress
from functools import wraps

from hivemind.dht.node import _SearchState
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils import ValueWithExpiration, get_logger

logger = get_logger(__name__)

MAX_MESSAGE_BYTES = 2**23


class LiveCalls(dict):
    """Calls that somebody still waits for; an answer to any other is not expected."""

    def __contains__(self, call_id: object) -> bool:
        return super().__contains__(call_id) and not self[call_id].done()


class LiveTasks(dict):
    """Tasks, each as long as it runs."""

    def __setitem__(self, call_id: object, task: asyncio.Task) -> None:
        super().__setitem__(call_id, task)
        task.add_done_callback(lambda _: self.pop(call_id, None))


def _keep_live_calls_alone(make):
    @wraps(make)
    def repaired(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self._pending_calls, self._handler_tasks = LiveCalls(), LiveTasks()

    return repaired


async def _receive_raw_data(reader: asyncio.StreamReader) -> bytes:
    num_bytes = int.from_bytes(await reader.readexactly(P2P.HEADER_LEN), P2P.BYTEORDER)
    if num_bytes > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {num_bytes} bytes")
    return await reader.readexactly(num_bytes)


async def _serve_streams(
    self: P2P, name: str, handler, input_protobuf_type: type, max_prefetch: int = 5, balanced: bool = False
) -> None:
    """Serve a protocol of streams; each ends with its handler, or when its caller hangs up, whichever comes first."""

    async def serve(stream_info, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        context = P2PContext(handle_name=name, local_id=self.peer_id, remote_id=stream_info.peer_id)
        requests: asyncio.Queue = asyncio.Queue(max_prefetch)

        async def receive() -> None:
            while True:
                await requests.put((await P2P.receive_protobuf(input_protobuf_type, reader))[0])

        async def received() -> AsyncIterator:
            while (request := await requests.get()) is not None:  # None: the caller has sent everything
                yield request

        async def answer() -> None:
            async for response in handler(received(), context):
                await P2P.send_protobuf(response, writer)

        with closing(writer):
            receiving, answering = asyncio.ensure_future(receive()), asyncio.ensure_future(answer())
            try:
                await asyncio.wait({receiving, answering}, return_when=asyncio.FIRST_COMPLETED)
                failed = answering.done() and not answering.cancelled()
                if failed and (error := answering.exception()) is not None:
                    logger.debug(f"{name} failed", exc_info=error)
                    with suppress(Exception):  # the caller may be gone
                        await P2P.send_protobuf(p2pd_pb2.RPCError(message=str(error)), writer)
            finally:
                receiving.cancel()
                answering.cancel()
                await asyncio.gather(receiving, answering, return_exceptions=True)

    await self.add_binary_stream_handler(name, serve, balanced=balanced)


async def _open_stream(
    self: ControlClient, peer_id: PeerID, protocols: Sequence[str]
) -> tuple[StreamInfo, asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await self.daemon_connector.open_connection()
    try:
        wanted = p2pd_pb2.StreamOpenRequest(peer=peer_id.to_bytes(), proto=list(protocols))
        await write_pbmsg(writer, p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=wanted))
        response = p2pd_pb2.Response()
        await read_pbmsg_safe(reader, response)
        raise_if_failed(response)
    except BaseException:
        writer.close()
        raise
    return StreamInfo.from_protobuf(response.streamInfo), reader, writer


def _add_to_a_copy(add_candidate):
    @wraps(add_candidate)
    def repaired(self, candidate: ValueWithExpiration | None, source_node_id: DHTID | None) -> None:
        is_first = not isinstance(self.binary_value, DictionaryDHTValue)  # kept, and the others are written into it
        if candidate is not None and isinstance(candidate.value, DictionaryDHTValue) and is_first:
            entries = DictionaryDHTValue(candidate.value.maxsize)
            for subkey, (value, expiration_time) in candidate.value.items():
                entries.store(subkey, value, expiration_time)
            candidate = ValueWithExpiration(entries, candidate.expiration_time)
        add_candidate(self, candidate, source_node_id)

    return repaired


def repair_hivemind() -> None:
    """In this process and all that it will fork."""
    if P2P._add_protobuf_stream_handler is _serve_streams:
        return
    ControlClient.__init__ = _keep_live_calls_alone(ControlClient.__init__)
    ControlClient.stream_open = _open_stream
    P2P.receive_raw_data = staticmethod(_receive_raw_data)
    P2P._add_protobuf_stream_handler = _serve_streams
    _SearchState.add_candidate = _add_to_a_copy(_SearchState.add_candidate)
