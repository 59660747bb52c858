"""What a node of the DHT believes of others, and what it answers them.

- A node tells its place in the DHT itself. One that takes many places next to the key of a run would be given all
  records of it, and nobody else. So each peer has one place, and nobody gets that of another.
- Who asks for many keys at once, or for the same again and again, would keep the node busy for minutes; and an answer
  of more than 4 MiB does not get through.
"""

from __future__ import annotations

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2

from swarm.runtime.token_bucket import TokenBuckets

MAX_KEYS = 32
"""Of one question; a peer of ours asks for one or two."""
MAX_ANSWER_BYTES = 3 * 2**20 + 2**18
"""Of all values in an answer; what does not fit has to be asked for alone."""
BYTES_AT_ONCE, BYTES_PER_SECOND = 2**24, 2**20
"""That a peer gets in answers: members find each other in what is pushed to them, and a newcomer asks a few times."""

_update_routing_table, _find = DHTProtocol.update_routing_table, DHTProtocol.rpc_find
_answered = TokenBuckets(BYTES_AT_ONCE, BYTES_PER_SECOND)


async def update_routing_table(self: DHTProtocol, node_id: DHTID | None, peer_id: PeerID, responded: bool = True):
    """As Hivemind's, for one place of each peer: a further one takes the place of the first."""
    table = self.routing_table
    if responded and node_id is not None:
        if node_id == self.node_id or table.get(node_id=node_id) not in (None, peer_id):
            return  # that is somebody else's
        before = table.get(peer_id=peer_id)
        if before is not None and before != node_id and before in table:
            del table[before]
    await _update_routing_table(self, node_id, peer_id, responded)


async def rpc_find(self: DHTProtocol, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
    """As Hivemind's, for a few keys and an answer that gets through.

    Raises:
        ValueError: this is more than anybody needs
    """
    if len(request.keys) > MAX_KEYS or len(set(request.keys)) < len(request.keys):
        raise ValueError(f"a question for {len(request.keys)} keys")
    if not _answered.may(context.remote_id):
        raise ValueError("this peer has had enough answers for now")
    response = await _find(self, request, context)
    num_bytes = 0
    for result in response.results:
        num_bytes += len(result.value)
        if num_bytes > MAX_ANSWER_BYTES:
            num_bytes -= len(result.value)
            result.type = dht_pb2.NOT_FOUND
            result.ClearField("value")
    _answered.spend(context.remote_id, num_bytes)
    return response
