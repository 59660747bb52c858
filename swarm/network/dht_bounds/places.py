"""Where a search in the DHT believes that peers stand, whatever those say whom it asks.

A search looks at the nodes that are nearest to a key, and a store calls five of them. A node that named itself under
twenty places next to the key, or twenty peers that do not exist, was all that a search looked at: it took all five
copies of a record, and newcomers found no run. So a peer stands where this node's table has it; who is in no table
stands in two places of a search at most, so that one false word about it does not hide it; and no answer fills more
than half of what a search looks at.
"""

from __future__ import annotations

from collections import defaultdict
from contextvars import ContextVar
from functools import wraps

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

PLACES = 2
"""Of a peer that is not in the table, in one search."""
NEW_PEERS = 10
"""That one answer adds to a search; it looks at the 20 nodes that are nearest."""


class Places:
    """What one search believes.

    Args:
        node: that searches
    """

    def __init__(self, node: DHTNode):
        self._node, self._table = node, node.protocol.routing_table
        self._before = dict(self._table.peer_id_to_uid)
        """Of the table as it was when the search began: a peer that is asked can move in it."""
        self._heard: defaultdict[PeerID, set[DHTID]] = defaultdict(set)

    def believed(self, said: dict[DHTID, PeerID]) -> dict[DHTID, PeerID]:
        """What counts of one answer about one key, which begins with the nearest."""
        believed: dict[DHTID, PeerID] = {}
        num_new = 0
        for place, peer in said.items():
            if peer in believed.values() or not self._may_stand(peer, place):
                continue
            if peer not in self._before:
                num_new += peer not in self._heard
                if num_new > NEW_PEERS:
                    break
                self._heard[peer].add(place)
            believed[place] = peer
        return believed

    def _may_stand(self, peer: PeerID, place: DHTID) -> bool:
        """Nobody stands in this node's own place, or in that of another that it knows."""
        if place == self._node.node_id or peer == self._node.peer_id:
            return False
        if self._table.get(node_id=place) not in (None, peer):
            return False
        if peer in self._before:
            return self._before[peer] == place
        heard = self._heard.get(peer, ())
        return place in heard or len(heard) < PLACES


_search: ContextVar[Places] = ContextVar("search")
"""That goes on in this context."""


def of_a_search(search):
    """Wraps a method of `DHTNode` that searches."""

    @wraps(search)
    async def repaired(self: DHTNode, *args, **kwargs):
        token = _search.set(Places(self))
        try:
            return await search(self, *args, **kwargs)
        finally:
            _search.reset(token)

    return repaired


def without_false_places(choose):
    """Wraps what takes those who do not answer out of an answer."""

    @wraps(choose)
    def repaired(self: DHTNode, said: dict[DHTID, PeerID]) -> dict[DHTID, PeerID]:
        places = _search.get(None) or Places(self)
        return places.believed(choose(self, said))

    return repaired
