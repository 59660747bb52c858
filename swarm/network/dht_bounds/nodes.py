"""What a DHT node believes other nodes, and how much it answers them.

- A node chooses its place in the DHT itself. A stranger in many places next to the key of a run would be given all
  records of the run. So each peer has one place, and no peer gets the place of another.
- A caller that asks for many keys at once, or for the same again and again, would keep the node busy for minutes. And
  an answer of more than 4 MiB does not get through. One that names hundreds of thousands of nodes would keep the
  asking node busy for seconds. So questions and answers are bounded.
- A newcomer is given the records that it should store. A caller that is new again and again would use up the node's
  line. So the records that it is given count as answers.
- A newcomer may ask to be called back. A caller that then does not answer would use up the calls that a process answers
  at a time. No member would be heard any more. So the calls back are bounded.
- A start would fail if one of the first peers says that the newcomer's clock is off, or that it cannot be called back.
  That may be a lie, so it counts only if none of the first peers disagrees.
- Names cost a stranger nothing. So what strangers use up is counted apart from what known peers use up. And only a few
  names are kept as replacements for other nodes; Hivemind would remember each of them for good.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from google.protobuf.message import Message
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol, ValidationError
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import get_logger

from swarm.network.signed_records import records_of
from swarm.runtime.token_bucket import TokenBucket, TokenBuckets

logger = get_logger(__name__)

MAX_KEYS = 32
"""Keys of one question. A peer of this program asks for one or two."""
MAX_ANSWER_BYTES = 3 * 2**20 + 2**18
"""Bytes of all values in an answer. A value that does not fit has to be asked for alone."""
BYTES_AT_ONCE, BYTES_PER_SECOND = 2**24, 2**20
"""Bytes that a peer gets in answers and as a newcomer, at once and then per second. That is enough: members find each
other by pushed records, and a newcomer asks a few times."""
ALL_BYTES_AT_ONCE, ALL_BYTES_PER_SECOND = 2**27, 2**20
"""Bytes that all strangers together get: first what dozens of newcomers and watchers need at once, then 8 Mbit/s of the
line."""
KEY_BYTES = 2**9
"""Bytes that each key of a question counts for beside its answer, since its neighbours have to be found."""
MAX_NEIGHBOURS = 64
"""Nodes that an answer names for one key at most. Nodes of Hivemind name 20."""

HAND_OVERS, HAND_OVERS_PER_SECOND = 64, 1.0
"""Newcomers that are given records, at once and then per second. Further ones find the records by a search."""
PINGS_OF_A_PEER, ALL_PINGS = 2, 128
"""Calls back that one peer, and all peers together, may wait for at a time."""


class CallerLimits:
    """How much each caller may use up. Strangers are counted apart from known peers, and crowd out strangers only.

    Args:
        most: what one caller may use up at once
        per_second: what comes back to it per second
        of_all: a further limit that all strangers share, if any
    """

    def __init__(self, most: float, per_second: float, of_all: TokenBucket | None = None):
        self._known, self._strangers = TokenBuckets(most, per_second), TokenBuckets(most, per_second)
        self._of_all = of_all

    def may(self, protocol: DHTProtocol, caller: PeerID) -> bool:
        """Whether this caller has anything left."""
        if self._is_known(protocol, caller):
            return self._known.may(caller)
        return (self._of_all is None or self._of_all.left > 0) and self._strangers.may(caller)

    def spend(self, protocol: DHTProtocol, caller: PeerID, amount: float) -> None:
        """Note that this caller has used up so much."""
        if self._is_known(protocol, caller):
            self._known.spend(caller, amount)
            return
        self._strangers.spend(caller, amount)
        if self._of_all is not None:
            self._of_all.spend(amount)

    def _is_known(self, protocol: DHTProtocol, caller: PeerID) -> bool:
        records = records_of(protocol)
        return records is not None and caller in records.met


@dataclass
class NodeLimits:
    """The limits of what a node does for other nodes, and how much of it is used up."""

    answered: CallerLimits = field(
        default_factory=lambda: CallerLimits(
            BYTES_AT_ONCE, BYTES_PER_SECOND, TokenBucket(ALL_BYTES_AT_ONCE, ALL_BYTES_PER_SECOND)
        )
    )
    """Bytes that callers get in answers and as newcomers."""
    handed_over: TokenBucket = field(default_factory=lambda: TokenBucket(HAND_OVERS, HAND_OVERS_PER_SECOND))
    """Newcomers that may still be given records."""
    called_back: Counter[PeerID] = field(default_factory=Counter)
    """Unfinished calls back, by caller."""


limits = NodeLimits()
"""The limits of the node in this process."""
_update_routing_table, _find, _ping = DHTProtocol.update_routing_table, DHTProtocol.rpc_find, DHTProtocol.rpc_ping
_call_ping, _call_store = DHTProtocol.call_ping, DHTProtocol.call_store
_objections: ContextVar[dict[PeerID, ValidationError]] = ContextVar("objections")
"""Objections of first peers to the node that is being made in this context."""


async def update_routing_table(self: DHTProtocol, node_id: DHTID | None, peer_id: PeerID, responded: bool = True):
    """As Hivemind's, but with one place for each peer: a new place replaces the former one."""
    table = self.routing_table
    if responded and node_id is not None:
        if node_id == self.node_id or table.get(node_id=node_id) not in (None, peer_id):
            return  # the place of another peer
        before = table.get(peer_id=peer_id)
        if before is not None and before != node_id and before in table:
            del table[before]
        if node_id not in table and not (limits.answered.may(self, peer_id) and limits.handed_over.take()):
            # Do what Hivemind does, except to hand over records.
            silent = table.add_or_update_node(node_id, peer_id)
            _keep_few_replacements(table, node_id)
            if silent is not None:  # the bucket is full: its oldest node is removed if it does not answer
                await self.call_ping(silent[1])
            return
    await _update_routing_table(self, node_id, peer_id, responded)
    if node_id is not None:
        _keep_few_replacements(table, node_id)


def _keep_few_replacements(table: RoutingTable, node_id: DHTID) -> None:
    """Keep only the latest replacement nodes in the bucket of this place, as many as the bucket has nodes at most."""
    bucket = table.buckets[table.get_bucket_index(node_id)]
    while len(bucket.replacement_nodes) > bucket.size:
        oldest, peer = next(iter(bucket.replacement_nodes.items()))
        del bucket.replacement_nodes[oldest]
        table.uid_to_peer_id.pop(oldest, None)
        if table.peer_id_to_uid.get(peer) == oldest:
            del table.peer_id_to_uid[peer]


async def call_store(
    self: DHTProtocol, peer: PeerID, keys: Sequence[DHTID], values: Sequence[Any], *args: Any, **options: Any
) -> list[bool] | None:
    """As Hivemind's, but records that a newcomer is handed over count as answers, and are sent key by key."""
    if options.get("in_cache") is not False:  # Hivemind passes it only for records that are handed over
        return await _call_store(self, peer, keys, values, *args, **options)
    limits.answered.spend(self, peer, sum(len(self.serializer.dumps(value)) for value in values))
    return await _hand_over(self, peer, keys, values, *args)


async def _hand_over(
    self: DHTProtocol, peer: PeerID, keys: Sequence[DHTID], values: Sequence[Any], ends: Sequence[float]
) -> list[bool] | None:
    """Send a newcomer its records, one key in a message: all of them may be more than a message can have.

    A newcomer that takes no more now keeps its place. Otherwise it would be new again, and be given all once more.
    """
    table, stored = self.routing_table, []
    for key, value, end in zip(keys, values, ends, strict=True):
        place = table.get(peer_id=peer)
        answer = await _call_store(self, peer, [key], [value], [end], in_cache=False)
        if answer is None:
            await asyncio.sleep(0)  # until Hivemind has removed it from the table
            if place is not None and place not in table and peer not in table:
                table.add_or_update_node(place, peer)
                _keep_few_replacements(table, place)
            return None
        stored += answer
    return stored


def check_place(node: dht_pb2.NodeInfo) -> None:
    """Check the place that a node says it has. A node that wants to be in no routing table names none.

    Raises:
        ValueError: it is no place
    """
    if len(node.node_id) not in (0, DHTID.HASH_NBYTES):
        raise ValueError(f"a place of {len(node.node_id)} bytes")


def check_answer(request: Message, answer: Message) -> None:
    """Check what another node answers before it is read: reading takes time for each entry, in which nothing else runs.

    Args:
        request: what the node was asked
        answer: any answer; those that do not come from a DHT node are not looked at

    Raises:
        ValueError: the answer names too many nodes, has more entries than the request, or names an impossible place
    """
    if isinstance(answer, dht_pb2.FindResponse):
        if len(answer.results) > len(request.keys):
            raise ValueError(f"an answer for {len(answer.results)} keys")
        for result in answer.results:
            if (num_named := max(len(result.nearest_node_ids), len(result.nearest_peer_ids))) > MAX_NEIGHBOURS:
                raise ValueError(f"an answer that names {num_named} nodes")
    if isinstance(answer, dht_pb2.StoreResponse) and len(answer.store_ok) > len(request.keys):
        raise ValueError(f"an answer for {len(answer.store_ok)} records")
    if isinstance(answer, (dht_pb2.FindResponse, dht_pb2.StoreResponse, dht_pb2.PingResponse)):
        check_place(answer.peer)


async def rpc_find(self: DHTProtocol, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
    """As Hivemind's, with bounds on the keys of a question and on the size of the answer.

    Raises:
        ValueError: the question has too many keys or a key twice, the caller has had enough answers for now, or it
            names an impossible place
    """
    check_place(request.peer)  # Hivemind reads it in a task whose error nothing would handle
    if len(request.keys) > MAX_KEYS or len(set(request.keys)) < len(request.keys):
        raise ValueError(f"a question for {len(request.keys)} keys")
    if not limits.answered.may(self, context.remote_id):
        raise ValueError("this peer has had enough answers for now")
    response = await _find(self, request, context)
    num_bytes = 0  # of values alone, since neighbours are few
    for result in response.results:
        num_bytes += len(result.value)
        if num_bytes > MAX_ANSWER_BYTES:
            num_bytes -= len(result.value)
            result.type = dht_pb2.NOT_FOUND
            result.ClearField("value")
    limits.answered.spend(self, context.remote_id, response.ByteSize() + KEY_BYTES * len(request.keys))
    return response


async def rpc_ping(self: DHTProtocol, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
    """As Hivemind's, with bounds on the calls back: each waits for the caller's answer.

    Raises:
        ValueError: too many calls back are unfinished
    """
    if not request.validate:
        return await _ping(self, request, context)
    caller, called_back = context.remote_id, limits.called_back
    if called_back[caller] >= PINGS_OF_A_PEER or called_back.total() >= ALL_PINGS:
        raise ValueError("too many want to be called back at this moment")
    called_back[caller] += 1
    try:
        return await _ping(self, request, context)
    finally:
        called_back[caller] -= 1
        if not called_back[caller]:
            del called_back[caller]


async def call_ping(self: DHTProtocol, peer: PeerID, validate: bool = False, strict: bool = True) -> DHTID | None:
    """As Hivemind's, except that a node that is being made goes on with its other first peers if this peer objects."""
    try:
        return await _call_ping(self, peer, validate, strict)
    except ValidationError as objection:
        if (objections := _objections.get(None)) is None:
            raise
        objections[peer] = objection
        return None


def hear_all_first_peers(create):
    """Wrap `DHTNode.create` so that it fails only if a first peer objects and no other first peer disagrees.

    The wrapped function raises that peer's ValidationError.
    """

    @wraps(create)
    async def repaired(cls, *args, **kwargs) -> DHTNode:
        token = _objections.set(objections := {})
        try:
            node = await create(cls, *args, **kwargs)
        except RuntimeError:  # no first peer has answered without an objection
            if objections:
                raise next(iter(objections.values())) from None
            raise
        finally:
            _objections.reset(token)
        for peer, objection in objections.items():
            logger.warning(f"{peer} says: {objection}. Another first peer disagrees, so this peer starts")
        return node

    return repaired
