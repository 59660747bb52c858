"""Which places of peers in the DHT a search believes, whatever the asked nodes say.

A search looks at the nodes that are nearest to a key, and a store calls five of them. A node could name itself under
twenty places next to the key, or name twenty peers that do not exist. Then a search looked at nothing else, the node
took all five copies of a record, and newcomers found no run. So there are four rules:

- A peer in this node's routing table has its place there, and no other.
- Any other peer has at most two places in a search. With only one, the first false answer about a peer would hide it.
- No answer fills more than half of the nodes that a search looks at.
- A search for records also asks peers that this peer has met, wherever they stand in its routing table. Twenty
  strangers that answer, each in its own place next to the key, hide nothing from it. A newcomer has met the peers of
  its join line.
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
"""Places in one search of a peer that is not in the routing table."""
NEW_PEERS = 10
"""New peers that one answer adds to a search, which looks at the 20 nearest nodes."""
MET_PEERS = 8
"""Met peers that each search for records asks, the latest ones. A record is pushed to as many of them."""


class Places:
    """The places of peers that one search believes.

    Args:
        node: the node that searches
        asks_met: whether the search also asks peers that this peer has met
    """

    def __init__(self, node: DHTNode, asks_met: bool = False):
        self._node, self._table = node, node.protocol.routing_table
        self._before = dict(self._table.peer_id_to_uid)
        """Places in the routing table when the search began. An asked peer can change its place in the table."""
        self._heard: defaultdict[PeerID, set[DHTID]] = defaultdict(set)
        """Places of other peers that this search has believed so far."""
        self.met = self._met_in_table() if asks_met else {}
        """Met peers that this search asks in any case, by place."""
        self.has_begun = False
        """Whether the search has chosen the nodes that it begins with."""

    def _met_in_table(self) -> dict[DHTID, PeerID]:
        records = records_of(self._node.protocol)
        if records is None:
            return {}
        met = {}
        for peer in reversed(records.met.peers):
            place = self._before.get(peer)
            if place is not None and peer not in self._node.blacklist:
                met[place] = peer
            if len(met) == MET_PEERS:
                break
        return met

    def begins_with(self, table: RoutingTable) -> dict[DHTID, PeerID]:
        """The met peers, while the search chooses from this table the nodes that it begins with. Later none."""
        return {} if self.has_begun or table is not self._table else self.met

    def believed(self, said: dict[DHTID, PeerID]) -> dict[DHTID, PeerID]:
        """The part of one answer about one key that is believed.

        Args:
            said: peers by their claimed places, the nearest to the key first
        """
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
        """Whether the claimed place of a peer is believed: never this node's own, or that of another known peer."""
        if place == self._node.node_id or peer == self._node.peer_id:
            return False
        if self._table.get(node_id=place) not in (None, peer):
            return False
        if peer in self._before:
            return self._before[peer] == place
        heard = self._heard.get(peer, ())
        return place in heard or len(heard) < PLACES


_search: ContextVar[Places] = ContextVar("search")
"""The search that goes on in this context."""


def of_a_search(search, asks_met: bool = False):
    """Wrap a method of `DHTNode` that searches, so that its calls share one `Places`.

    Args:
        search: the method
        asks_met: whether it searches for records, and so asks met peers in any case
    """

    @wraps(search)
    async def repaired(self: DHTNode, *args, **kwargs):
        token = _search.set(Places(self, asks_met))
        try:
            return await search(self, *args, **kwargs)
        finally:
            _search.reset(token)

    return repaired


def met_of_the_search() -> Collection[DHTID]:
    """Note that the search of this context has chosen where it begins; return the places of its met peers."""
    if (places := _search.get(None)) is None:
        return ()
    places.has_begun = True
    return places.met.keys()


def and_met_peers(nearest):
    """Wrap `RoutingTable.get_nearest_neighbors`, with which a search chooses the nodes that it begins with."""

    @wraps(nearest)
    def repaired(self: RoutingTable, *args, **kwargs) -> list[tuple[DHTID, PeerID]]:
        found = nearest(self, *args, **kwargs)
        places = _search.get(None)
        return found if places is None else [*found, *(places.begins_with(self).items() - found)]

    return repaired


def without_false_places(choose):
    """Wrap the method that removes silent peers from an answer, so that it removes false places as well."""

    @wraps(choose)
    def repaired(self: DHTNode, said: dict[DHTID, PeerID]) -> dict[DHTID, PeerID]:
        places = _search.get(None) or Places(self)
        return places.believed(choose(self, said))

    return repaired
