"""What a node of the DHT believes of others, and what it answers them.

- A node tells its place in the DHT itself. One that takes many places next to the key of a run would be given all
  records of it, and nobody else. So each peer has one place, and nobody gets that of another.
- Who asks for many keys at once, or for the same again and again, would keep the node busy for minutes; and an answer
  of more than 4 MiB does not get through.
- A newcomer is given the records that it should have, and may ask to be called back. Who is new again and again would
  use up the line of whoever gives (what is given counts as an answer); and who is called back and does not answer, the
  calls that a process answers at a time, so that it would hear no member any more.
- A start would fail if one of the first peers says that the newcomer's clock is off, or that it cannot be called back.
  That may be a lie: it counts if none of the first peers disagrees.
- Names cost a stranger nothing: what all of them use up is counted apart from what those use up who are known. Each
  would be remembered for good as somebody who may replace another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

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
"""Of one question; a peer of ours asks for one or two."""
MAX_ANSWER_BYTES = 3 * 2**20 + 2**18
"""Of all values in an answer; what does not fit has to be asked for alone."""
BYTES_AT_ONCE, BYTES_PER_SECOND = 2**24, 2**20
"""That a peer gets in answers and as a newcomer: members find each other in what is pushed to them, and a newcomer asks
a few times."""
ALL_BYTES_AT_ONCE, ALL_BYTES_PER_SECOND = 2**27, 2**20
"""That all strangers together get: 8 Mbit/s of a line, after what dozens of newcomers and watchers need at once."""
KEY_BYTES = 2**9
"""That each key counts for beside the bytes of its answer: its neighbours have to be found."""

HAND_OVERS, HAND_OVERS_PER_SECOND = 64, 1.0
"""Newcomers that are given records, of all: others find them by a search."""
PINGS_OF_A_PEER, ALL_PINGS = 2, 128
"""That are called back at a time."""


class CallerLimits:
    """How much each caller may use up: of those who are known, and of strangers, who crowd out each other only.

    Args:
        most, per_second: as of `TokenBuckets`
        of_all: what all strangers share beside that, if anything
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
        """It has used up so much."""
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
    """What a node does for others at most, and what it has done of that."""

    answered: CallerLimits = field(
        default_factory=lambda: CallerLimits(
            BYTES_AT_ONCE, BYTES_PER_SECOND, TokenBucket(ALL_BYTES_AT_ONCE, ALL_BYTES_PER_SECOND)
        )
    )
    """Bytes in answers and as a newcomer."""
    handed_over: TokenBucket = field(default_factory=lambda: TokenBucket(HAND_OVERS, HAND_OVERS_PER_SECOND))
    """Newcomers that are given records."""
    called_back: Counter[PeerID] = field(default_factory=Counter)
    """Calls at this moment to those who want to be called back."""


limits = NodeLimits()
"""Of the node in this process."""
_update_routing_table, _find, _ping = DHTProtocol.update_routing_table, DHTProtocol.rpc_find, DHTProtocol.rpc_ping
_call_ping, _call_store = DHTProtocol.call_ping, DHTProtocol.call_store
_objections: ContextVar[dict[PeerID, ValidationError]] = ContextVar("objections")
"""Of the first peers of the node that is being made."""


async def update_routing_table(self: DHTProtocol, node_id: DHTID | None, peer_id: PeerID, responded: bool = True):
    """As Hivemind's, for one place of each peer: a further one takes the place of the first."""
    table = self.routing_table
    if responded and node_id is not None:
        if node_id == self.node_id or table.get(node_id=node_id) not in (None, peer_id):
            return  # that is somebody else's
        before = table.get(peer_id=peer_id)
        if before is not None and before != node_id and before in table:
            del table[before]
        if node_id not in table and not (limits.answered.may(self, peer_id) and limits.handed_over.take()):
            silent = table.add_or_update_node(node_id, peer_id)
            _keep_few_replacements(table, node_id)
            if silent is not None:  # is it here?
                await self.call_ping(silent[1])
            return
    await _update_routing_table(self, node_id, peer_id, responded)
    if node_id is not None:
        _keep_few_replacements(table, node_id)


def _keep_few_replacements(table: RoutingTable, node_id: DHTID) -> None:
    """In the bucket of this place keep the latest, as many as are in use there."""
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
    """As Hivemind's; what a newcomer is handed over counts as what it gets in answers."""
    if options.get("in_cache") is False:  # said only of what is handed over
        limits.answered.spend(self, peer, sum(len(self.serializer.dumps(value)) for value in values))
    return await _call_store(self, peer, keys, values, *args, **options)


async def rpc_find(self: DHTProtocol, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
    """As Hivemind's, for a few keys and an answer that gets through.

    Raises:
        ValueError: this is more than anybody needs
    """
    if len(request.keys) > MAX_KEYS or len(set(request.keys)) < len(request.keys):
        raise ValueError(f"a question for {len(request.keys)} keys")
    if not limits.answered.may(self, context.remote_id):
        raise ValueError("this peer has had enough answers for now")
    response = await _find(self, request, context)
    num_bytes = 0  # of values: neighbours are few
    for result in response.results:
        num_bytes += len(result.value)
        if num_bytes > MAX_ANSWER_BYTES:
            num_bytes -= len(result.value)
            result.type = dht_pb2.NOT_FOUND
            result.ClearField("value")
    limits.answered.spend(self, context.remote_id, response.ByteSize() + KEY_BYTES * len(request.keys))
    return response


async def rpc_ping(self: DHTProtocol, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
    """As Hivemind's, which waits for the caller if it wants to be called back.

    Raises:
        ValueError: too many wait for that
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
    """As Hivemind's, except that a node that is being made goes on with its other first peers if this one objects."""
    try:
        return await _call_ping(self, peer, validate, strict)
    except ValidationError as objection:
        if (objections := _objections.get(None)) is None:
            raise
        objections[peer] = objection
        return None


def hear_all_first_peers(create):
    """Wraps `DHTNode.create`, which fails if one of the first peers objects.

    Raises:
        ValidationError: somebody objects, and nobody disagrees
    """

    @wraps(create)
    async def repaired(cls, *args, **kwargs) -> DHTNode:
        token = _objections.set(objections := {})
        try:
            node = await create(cls, *args, **kwargs)
        except RuntimeError:  # nobody has answered and agreed
            if objections:
                raise next(iter(objections.values())) from None
            raise
        finally:
            _objections.reset(token)
        for peer, objection in objections.items():
            logger.warning(f"{peer} says: {objection}. Another first peer disagrees, so this peer starts")
        return node

    return repaired
