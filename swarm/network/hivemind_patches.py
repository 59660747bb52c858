"""Repairs of Hivemind 1.1.12's transport and DHT, made before any process of it begins.

Without them:

- A call that is cancelled just before its answer arrives would end the task that reads all answers. The process would
  then never hear any peer again. Found by reading `ControlClient._read_from_persistent_conn`.
- A handler that is cancelled would leave its task behind.
- A stream whose handler has ended, while its caller still sends, would never be closed.
- A result that cannot be pickled for another process would leave that process waiting for good.
- To write down a peer id of a megabyte would take a quarter of an hour, in which nothing else would run.
- A node that names the asker among its neighbours would keep records from being stored. One that claims the places of
  other nodes would get their records. One that names itself in many places would be all that a search looks at, as
  would twenty nodes that stand next to the key.
- An answer that is no message would raise an error that no caller expects, and so end more than this call.
- A message could have any length, and a caller could have any number of streams and calls.
- p2pd would relay strangers' traffic, and would have the router open a port unasked, another one each time.
- Each attempt to open a stream to a dead peer would leave a connection to p2pd open, on both of its ends.
- A search would write its results into the records that other nodes have stored on this node. It would end with the
  first answer that claims to stay for ever. It would never end after an answer that cannot be sorted, or if a node
  names further nodes without end.
- A node would store anything from any caller, and would discard a whole answer for one invalid record in it.
- A message of 2 kB would end the process that decodes it. A node could take any number of places in the DHT, and be
  given all records again and again. It could use up the calls that a process answers, and keep a peer that calls it
  first from starting. A question could have any number of keys, and an answer any number of nodes.
  Names under which no peer answers would be remembered for good (all these: `swarm.network.dht_bounds`).
- Each peer would need torch's manager process for its shared memory (some 60 MB). If a peer were killed together with
  it, files would stay in shared memory until the machine is switched off.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import closing
from functools import partial, wraps
from pathlib import Path
from uuid import UUID

import hivemind.dht.node
import torch.multiprocessing
from google.protobuf.message import DecodeError, Message
from hivemind.dht.node import Blacklist, DHTNode, _SearchState
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P, P2PContext, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import dht_pb2, p2pd_pb2
from hivemind.utils import MPFuture, ValueWithExpiration, get_dht_time, get_logger
from hivemind.utils.mpfuture import UpdateType
from hivemind.utils.serializer import MSGPackSerializer

from swarm.network.dht_bounds import decoding, nodes, places, searches
from swarm.network.dht_bounds.calls import RunningCalls
from swarm.network.dht_storage import Allowance, BoundedStorage, KnownKeys, store_requested
from swarm.network.served_stream import MAX_MESSAGE_BYTES, ServedStream
from swarm.network.signed_records import MAX_LIFE_SECONDS, records_of
from swarm.network.stream_limits import limits_of

logger = get_logger(__name__)

P2PD_CONFIG = Path(__file__).with_name("p2pd") / "config.json"
CONNECTIONS, KEPT_CONNECTIONS = 1536, 1152
"""Above the first number of connections, p2pd closes some of any peers, down to the second. A group has 1,024 members
at most."""
_SETTINGS = {"f": P2PD_CONFIG, "relay": False, "relayService": False, "natPortMap": False}
_SETTINGS |= {"connHi": CONNECTIONS, "connLo": KEPT_CONNECTIONS}
MAX_PEER_ID_BYTES = 64
"""Longest peer id that is accepted. Those of libp2p have 34 to 42 bytes."""
STORES_AT_ONCE, STORES_PER_SECOND = 4096, 64.0
"""Records that this node looks at for one caller, at once and then per second; records in dictionaries count, too. The
first number also limits the keys of one call. A member stores a few records each second."""
_stored = nodes.CallerLimits(STORES_AT_ONCE, STORES_PER_SECOND)


class LiveCalls(dict):
    """Calls whose answers are still awaited. The answer to any other call, such as a cancelled one, is ignored."""

    def __contains__(self, call_id: object) -> bool:
        return super().__contains__(call_id) and not self[call_id].done()


class LiveTasks(dict):
    """Tasks that are running; each is removed when it is done."""

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


def _expected_error(call):
    """Make a call raise P2PHandlerError for an unreadable answer, as if the other side's handler had failed."""

    @wraps(call)
    async def repaired(*args, **kwargs):
        try:
            return await call(*args, **kwargs)
        except (ValueError, TypeError, DecodeError) as error:  # too long, no marker, no protobuf, or too many entries
            raise P2PHandlerError(f"an answer that cannot be read: {error}") from error

    return repaired


def _with_checked_answers(call):
    """Refuse answers in the DHT that are longer than the caller has asked for, before anything in them is read."""

    @wraps(call)
    async def repaired(
        self: P2P, peer_id: PeerID, handle_name: str, request: Message, answer_type: type[Message]
    ) -> Message:
        answer = await call(self, peer_id, handle_name, request, answer_type)
        nodes.check_answer(request, answer)
        return answer

    return repaired


async def _add_handler(
    self: P2P,
    name: str,
    handler,
    input_protobuf_type: type,
    *,
    stream_input: bool = False,
    stream_output: bool = False,
    balanced: bool = False,
) -> None:
    """As Hivemind's, except that calls with a stream in either direction are served by `ServedStream`."""
    if not stream_input and not stream_output:
        return await self._add_protobuf_unary_handler(name, handler, input_protobuf_type, balanced=balanced)

    async def serve(stream_info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        context = P2PContext(handle_name=name, local_id=self.peer_id, remote_id=stream_info.peer_id)
        with closing(writer):
            stream = ServedStream(limits_of(self), context, reader, writer, input_protobuf_type)
            await stream.serve(handler, stream_input)

    await self.add_binary_stream_handler(name, serve, balanced=balanced)


_handle_call = ControlClient._handle_persistent_request


async def _handle_some_calls(self: ControlClient, call_id: UUID, request: p2pd_pb2.CallUnaryRequest) -> None:
    """Answer a call, unless its caller, or all callers together, have too many unanswered calls."""
    if not hasattr(self, "_running_calls"):
        self._running_calls = RunningCalls()
    caller, num_bytes = request.peer, len(request.data)
    if not self._running_calls.begin(caller, num_bytes):
        refusal = p2pd_pb2.CallUnaryResponse(error=b"too many calls at a time")
        await self._pending_messages.put(
            p2pd_pb2.PersistentConnectionRequest(callId=call_id.bytes, unaryResponse=refusal)
        )
        return
    try:
        await _handle_call(self, call_id, request)
    finally:
        self._running_calls.end(caller, num_bytes)


def _with_settings(make_arguments):
    """Start p2pd without relays and port mapping, and with room for more connections.

    By default p2pd relays for any peer, at this volunteer's cost, and no argument of Hivemind's changes that.
    `-relayService=0` alone does nothing: p2pd starts a second relay whenever its configuration enables relays, which it
    does by default, and a flag can only switch them on. Calls over other peers' relays end with it as well; this
    program made none.

    `swarm.network.home` opens ports of the router, and measures them. 512 connections, p2pd's default, would be too few
    for a large swarm. A stranger could then easily make p2pd close connections of members.
    """

    @wraps(make_arguments)
    def repaired(*args, **kwargs) -> list[str]:
        return make_arguments(*args, **{**kwargs, **_SETTINGS})

    return repaired


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
    def add(self, candidate: ValueWithExpiration | None, source_node_id: DHTID | None) -> None:
        latest = get_dht_time() + MAX_LIFE_SECONDS
        if candidate is not None and not candidate.expiration_time <= latest:  # true for NaN, too
            candidate = ValueWithExpiration(candidate.value, latest)
        # Hivemind keeps the first dictionary and writes later ones into it; it may be the one that this node stores.
        is_first = not isinstance(self.binary_value, DictionaryDHTValue)
        if candidate is not None and isinstance(candidate.value, DictionaryDHTValue) and is_first:
            entries = DictionaryDHTValue(candidate.value.maxsize)
            for subkey, (value, expiration_time) in candidate.value.items():
                entries.store(subkey, value, expiration_time)
            candidate = ValueWithExpiration(entries, candidate.expiration_time)
        add_candidate(self, candidate, source_node_id)

    @wraps(add_candidate)
    def repaired(self, candidate: ValueWithExpiration | None, source_node_id: DHTID | None) -> None:
        try:
            add(self, candidate, source_node_id)
        except Exception as error:  # it would end the search's task, and its caller would wait for good
            logger.debug(f"what {source_node_id} has found is left out: {error!r}")

    return repaired


def _with_bounded_storage(create):
    @wraps(create)
    async def repaired(cls, *args, **kwargs) -> DHTProtocol:
        protocol = await create(cls, *args, **kwargs)
        if (records := records_of(protocol)) is not None:
            protocol.storage = BoundedStorage(KnownKeys(records))
        return protocol

    return repaired


_store_all = DHTProtocol.rpc_store
_pings: set[asyncio.Task] = set()


async def _store_some(self: DHTProtocol, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
    if not isinstance(self.storage, BoundedStorage):
        return await _store_all(self, request, context)
    if len(request.keys) > STORES_AT_ONCE:
        raise ValueError(f"{len(request.keys)} records at once")
    nodes.check_place(request.peer)  # before a task reads it, whose error nothing would handle
    if request.peer:  # the caller may want to be in the routing table
        ping = asyncio.create_task(self.rpc_ping(dht_pb2.PingRequest(peer=request.peer), context))
        _pings.add(ping)
        ping.add_done_callback(_pings.discard)
    if not _stored.may(self, context.remote_id):
        raise ValueError("this peer has stored enough for now")
    allowance = Allowance(
        is_left=partial(_stored.may, self, context.remote_id), spend=partial(_stored.spend, self, context.remote_id)
    )
    return dht_pb2.StoreResponse(store_ok=await store_requested(self, request, allowance), peer=self.node_info)


def _drop_invalid(self: DHTProtocol, key: bytes, dictionary: DictionaryDHTValue) -> bool:
    """Remove invalid records from a dictionary; return whether it is a dictionary at all.

    The other records of the answer may be valid: nodes of other programs store anything.
    """
    if not isinstance(dictionary, DictionaryDHTValue):
        return False
    for subkey, (value, expiration_time) in list(dictionary.items()):
        if not self._validate_record(key, self.serializer.dumps(subkey), value, expiration_time):
            del dictionary[subkey]
    return True


def _send_what_can_be_sent(send):
    @wraps(send)
    def repaired(self: MPFuture, update_type: UpdateType, payload: object = None) -> None:
        try:
            send(self, update_type, payload)
        except Exception as error:  # the payload cannot be pickled, and nothing of it was sent
            send(self, UpdateType.EXCEPTION, ValueError(f"the answer cannot be passed on: {type(error).__name__}"))

    return repaired


def _of_bounded_length(make):
    @wraps(make)
    def repaired(self: PeerID, peer_id_bytes: bytes) -> None:
        if len(peer_id_bytes) > MAX_PEER_ID_BYTES:
            raise ValueError(f"a peer id of {len(peer_id_bytes)} bytes")
        make(self, peer_id_bytes)

    return repaired


def _share_memory_without_manager() -> None:
    """Go back to torch's own choice on Linux, which Hivemind changes: memory without a name, freed with its last user.

    A person may choose otherwise, by Hivemind's environment variable.
    """
    if "HIVEMIND_MEMORY_SHARING_STRATEGY" in os.environ:
        return
    if "file_descriptor" in torch.multiprocessing.get_all_sharing_strategies():
        torch.multiprocessing.set_sharing_strategy("file_descriptor")


def repair_hivemind() -> None:
    """Repair Hivemind in this process and in all processes that it will fork. Further calls do nothing."""
    if P2P.add_protobuf_handler is _add_handler:
        return
    _share_memory_without_manager()
    ControlClient.__init__ = _keep_live_calls_alone(ControlClient.__init__)
    ControlClient.stream_open = _open_stream
    P2P.receive_raw_data = staticmethod(_receive_raw_data)
    P2P.receive_protobuf = staticmethod(_expected_error(P2P.receive_protobuf))
    P2P._call_unary_protobuf_handler = _expected_error(_with_checked_answers(P2P._call_unary_protobuf_handler))
    ControlClient._handle_persistent_request = _handle_some_calls
    P2P.add_protobuf_handler = _add_handler
    P2P._make_process_args = staticmethod(_with_settings(P2P._make_process_args))
    DHTProtocol.create = classmethod(_with_bounded_storage(DHTProtocol.create.__func__))
    DHTProtocol.rpc_store = _store_some
    DHTProtocol._validate_dictionary = _drop_invalid
    RoutingTable.get_nearest_neighbors = places.and_met_peers(RoutingTable.get_nearest_neighbors)
    DHTNode._filter_blacklisted = places.without_false_places(DHTNode._filter_blacklisted)
    DHTNode.find_nearest_nodes = places.of_a_search(DHTNode.find_nearest_nodes)
    DHTNode.get_many_by_id = places.of_a_search(DHTNode.get_many_by_id, asks_met=True)
    PeerID.__init__ = _of_bounded_length(PeerID.__init__)
    MPFuture._send_update = _send_what_can_be_sent(MPFuture._send_update)
    DHTProtocol.update_routing_table = nodes.update_routing_table
    DHTProtocol.rpc_find = nodes.rpc_find
    DHTProtocol.rpc_ping = nodes.rpc_ping
    DHTProtocol.call_ping = nodes.call_ping
    DHTProtocol.call_store = nodes.call_store
    DHTNode.create = classmethod(nodes.hear_all_first_peers(DHTNode.create.__func__))
    MSGPackSerializer.loads = staticmethod(decoding.loads)
    Blacklist.register_failure = searches.register_failure
    hivemind.dht.node.traverse_dht = searches.with_an_end(hivemind.dht.node.traverse_dht)
    _SearchState.add_candidate = _add_to_a_copy(_SearchState.add_candidate)
