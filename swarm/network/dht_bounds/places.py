"""Where a search in the DHT believes that peers stand, whatever those say whom it asks.

A search looks at the nodes that are nearest to a key, and a store calls five of them. A node that named itself under
twenty places next to the key, or twenty peers that do not exist, was all that a search looked at: it took all five
copies of a record, and newcomers found no run. So a peer stands where this node's table has it; who is in no table
stands in two places of a search at most, so that one false word about it does not hide it; and no answer fills more
than half of what a search looks at.

Twenty strangers that do answer, each in its own place next to a key, would still be all that a search looks at. So a
search also asks peers that this one has met, however far from the key they stand. A newcomer has met the peers whose
addresses a person gave it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from contextvars import ContextVar
from functools import wraps

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.p2p import PeerID

from swarm.network.signed_records import records_of

PLACES = 2
"""Of a peer that is not in the table, in one search."""
NEW_PEERS = 10
"""That one answer adds to a search; it looks at the 20 nodes that are nearest."""
MET_PEERS = 8
"""Peers that this one has met, the latest ones, which each search asks. A record is pushed to as many of them."""


class Places:
    """What one search believes.

    Args:
        node: that searches
        asks_met: whether it asks peers that it has met, wherever they stand
    """

    def __init__(self, node: DHTNode, asks_met: bool = False):
        self._node, self._table = node, node.protocol.routing_table
        self._before = dict(self._table.peer_id_to_uid)
        """Of the table as it was when the search began: a peer that is asked can move in it."""
        self._heard: defaultdict[PeerID, set[DHTID]] = defaultdict(set)
        self.met = self._met_in_table() if asks_met else {}
        """Peers that this search asks in any case, and where they stand."""
        self.has_begun = False
        """Whether the nodes to begin with have been chosen."""

    def _met_in_table(self) -> dict[DHTID, PeerID]:
        records = records_of(self._node.protocol)
        if records is None:
            return {}
        met = {}
        for peer in reversed(records.met.peers):
            place = self._before.get(peer)
            if place is not None and place in self._table and peer not in self._node.blacklist:
                met[place] = peer
            if len(met) == MET_PEERS:
                break
        return met

    def begins_with(self, table: RoutingTable) -> dict[DHTID, PeerID]:
        """The met peers, while the search chooses from this table which nodes to begin with; later none."""
        return {} if self.has_begun or table is not self._table else self.met

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


def of_a_search(search, asks_met: bool = False):
    """Wraps a method of `DHTNode` that searches, for what others have stored if it `asks_met` peers."""

    @wraps(search)
    async def repaired(self: DHTNode, *args, **kwargs):
        token = _search.set(Places(self, asks_met))
        try:
            return await search(self, *args, **kwargs)
        finally:
            _search.reset(token)

    return repaired


def met_of_the_search() -> Collection[DHTID]:
    """Where the peers stand that the search of this context asks in any case. It has chosen where to begin."""
    if (places := _search.get(None)) is None:
        return ()
    places.has_begun = True
    return places.met.keys()


def and_met_peers(nearest):
    """Wraps what chooses the nodes that a search begins with: `RoutingTable.get_nearest_neighbors`."""

    @wraps(nearest)
    def repaired(self: RoutingTable, *args, **kwargs) -> list[tuple[DHTID, PeerID]]:
        found = nearest(self, *args, **kwargs)
        places = _search.get(None)
        return found if places is None else [*found, *(places.begins_with(self).items() - found)]

    return repaired


def without_false_places(choose):
    """Wraps what takes those who do not answer out of an answer."""

    @wraps(choose)
    def repaired(self: DHTNode, said: dict[DHTID, PeerID]) -> dict[DHTID, PeerID]:
        places = _search.get(None) or Places(self)
        return places.believed(choose(self, said))

    return repaired
