"""Records that go from node to node without a search. Both classes run in the DHT process (`DHT.run_coroutine`).

Hivemind's `store` first asks the nodes near a key which nodes are nearer, and its `get` asks them for their records. In
a swarm where every node knows every other node, the nearest nodes are known already, and pushed records are on this
node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from hivemind import DHT
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils.timed_storage import ValueWithExpiration, get_dht_time

from swarm.network.dht_bounds.decoding import plain
from swarm.network.signed_records import MAX_LIFE_SECONDS, peer_of, records_of

MORE_RECEIVERS = 64
"""Further nodes that a record is pushed to at most."""
AGAIN_SECONDS = 1.0
"""Pause between two attempts to have a list taken."""
MEMBERS = 8
"""Members that get a record wherever they stand in the DHT: in a swarm of nine, all other peers."""
NEWER_SECONDS = 0.001
"""How much earlier a pushed record ends than the same record stored by a search. A node takes only the newer of two, so
the second one is taken, too."""


class Push:
    """Stores a record of this peer on this node, and on those nodes next to its key that this node knows.

    Args:
        key: DHT key, as text
        subkey: subkey of this peer's records
        value: content of the record
        expiration_time: DHT time in seconds
        to: further nodes that are asked; of more than `MORE_RECEIVERS`, the last ones
    """

    def __init__(self, key: str, subkey: bytes, value: Any, expiration_time: float, to: Sequence[PeerID] = ()):
        self.key, self.subkey, self.value, self.expiration_time = key, subkey, value, expiration_time
        self.to = tuple(to)[-MORE_RECEIVERS:]

    async def __call__(self, _dht: DHT, node: DHTNode) -> int:
        """Push the record.

        Returns:
            how many other nodes have taken it. If `to` names nodes, only these count: the rest may be strangers
        """
        protocol, key = node.protocol, DHTID.generate(source=self.key)
        subkey, value = protocol.serializer.dumps(self.subkey), protocol.serializer.dumps(self.value)
        record = DHTRecord(key.to_bytes(), subkey, value, self.expiration_time)
        signed = protocol.record_validator.sign_value(record)
        own = DHTRecord(key.to_bytes(), subkey, signed, self.expiration_time)
        protocol.record_validator.validate(own)  # has a side effect: a list of the organiser counts here from now on
        protocol.storage.store(key, signed, self.expiration_time, subkey=self.subkey)
        asked = [
            peer
            for peer in dict.fromkeys([*_receivers(node, key), *self.to])
            if peer not in node.blacklist and peer != node.peer_id
        ]
        stores = (
            protocol.call_store(peer, [key], [signed], [self.expiration_time], subkeys=[self.subkey]) for peer in asked
        )
        answers = zip(asked, await asyncio.gather(*stores), strict=True)
        return sum(bool(taken and all(taken)) for peer, taken in answers if not self.to or peer in self.to)


def _receivers(node: DHTNode, key: DHTID) -> list[PeerID]:
    """The nodes next to the key, and the acquaintances next to it.

    The nodes next to the key may all be strangers that keep the record for themselves. Members get it all the same.
    """
    table, records = node.protocol.routing_table, records_of(node.protocol)
    nearest = [peer for _, peer in table.get_nearest_neighbors(key, node.num_replicas)]
    met = [] if records is None else [(peer, table.get(peer_id=peer)) for peer in records.met.peers]
    members = sorted((place.xor_distance(key), peer) for peer, place in met if place is not None)
    return list(dict.fromkeys([*nearest, *(peer for _, peer in members[:MEMBERS])]))


class PushedHere:
    """Returns the records that other peers have stored under a key on this node; None if there are none.

    Hivemind's `get` would ask other nodes as well.

    Args:
        key: DHT key, as text
        most: entries that are returned at most, those of acquaintances first
        max_bytes: size of a value with its signature; larger ones are left out
    """

    def __init__(self, key: str, most: int, max_bytes: int):
        self.key, self.most, self.max_bytes = key, most, max_bytes

    async def __call__(self, _dht: DHT, node: DHTNode) -> ValueWithExpiration | None:
        key = DHTID.generate(source=self.key)
        found = node.protocol.storage.get(key)
        if found is None or not isinstance(found.value, DictionaryDHTValue):
            return None
        entries, records = {}, records_of(node.protocol)
        pushed = list(found.value.items())
        if len(pushed) > self.most and records is not None:
            pushed.sort(key=lambda entry: peer_of(entry[0]) not in records.met)
        for subkey, (value, expiration) in pushed[: self.most]:
            if len(value) > self.max_bytes:
                continue
            record = DHTRecord(key.to_bytes(), node.protocol.serializer.dumps(subkey), value, expiration)
            said = plain(node.protocol.record_validator.strip_value(record))
            entries[subkey] = ValueWithExpiration(said, expiration)
        return ValueWithExpiration(entries, found.expiration_time)


def publish(dht: Any, key: str, value: Any, expiration_time: float) -> tuple[Future, Future]:
    """Begin to push a record of this peer, and to store it on the nodes that a search finds.

    Where nodes are silent or lie, a search takes seconds, and may find nodes that keep the record for themselves. By
    then the record is on this node and on the nodes that this peer knows.

    Args:
        dht: as returned by `start_dht`
        key: DHT key, as text
        value: content of the record
        expiration_time: DHT time in seconds

    Returns:
        futures of the push and of the search
    """
    pushed = dht.run_coroutine(Push(key, dht.owner, value, expiration_time - NEWER_SECONDS), return_future=True)
    stored = dht.store(key, subkey=dht.owner, value=value, expiration_time=expiration_time, return_future=True)
    return pushed, stored


def push_list(
    dht: Any, prefix: str, kind: str, signed: bytes, to: Sequence[PeerID] = (), timeout_seconds: float = 10
) -> int:
    """Push a list of the organiser to the nodes next to its key, and to further peers.

    Args:
        dht: as returned by `start_dht`
        prefix: start of the run's keys
        kind: kind of the list
        signed: the list, as it was signed
        to: further peers
        timeout_seconds: how long the DHT process may take

    Returns:
        how many peers have taken it, as of `Push`

    Raises:
        concurrent.futures.TimeoutError: the DHT process did not answer
    """
    push = Push(f"{prefix}.{kind}", dht.owner, signed, get_dht_time() + MAX_LIFE_SECONDS - 60, to)
    return dht.run_coroutine(push, return_future=True).result(timeout_seconds)


def push_until_taken(
    dht: Any, prefix: str, kind: str, signed: bytes, to: Sequence[PeerID], timeout_seconds: float = 10
) -> int:
    """As `push_list`, repeated until one of the peers `to` takes it, or until the time is over.

    The organiser is a stranger to the peers. Strangers may just have used up the checks that a peer makes for them.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        seconds = max(AGAIN_SECONDS, deadline - time.monotonic())  # a sleep may last longer than asked for
        taken = push_list(dht, prefix, kind, signed, to, seconds)
        if taken or not to or time.monotonic() + 2 * AGAIN_SECONDS > deadline:
            return taken
        time.sleep(AGAIN_SECONDS)
