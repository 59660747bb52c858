"""Records that go from node to node without a search; both classes run in the DHT process (`DHT.run_coroutine`).

Hivemind's `store` first asks all nodes that are near a key which ones are nearer, and its `get` asks them what they
have. In a swarm where every node knows every other one, that is known already, and what was pushed is here.
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
AGAIN_SECONDS = 1.0
"""From one attempt to the next to have somebody take a list."""
MEMBERS = 8
"""That get a record wherever they are: in a swarm of nine, all the others."""
NEWER_SECONDS = 0.001
"""By which a record that was searched a place for ends later than when it was pushed: a node takes what is newer."""


class Push:
    """Store a record of this peer on the nodes next to its key, as far as this node knows them, and on this one.

    Args:
        subkey: of this peer's own records
        to: further nodes, of which as many get it as are asked at once
    """

    def __init__(self, key: str, subkey: bytes, value: Any, expiration_time: float, to: Sequence[PeerID] = ()):
        self.key, self.subkey, self.value, self.expiration_time = key, subkey, value, expiration_time
        self.to = tuple(to)[-MORE_RECEIVERS:]

    async def __call__(self, _dht: DHT, node: DHTNode) -> int:
        """How many other nodes have taken it; of the further ones, if there are any: others may all be strangers."""
        protocol, key = node.protocol, DHTID.generate(source=self.key)
        subkey, value = protocol.serializer.dumps(self.subkey), protocol.serializer.dumps(self.value)
        record = DHTRecord(key.to_bytes(), subkey, value, self.expiration_time)
        signed = protocol.record_validator.sign_value(record)
        own = DHTRecord(key.to_bytes(), subkey, signed, self.expiration_time)
        protocol.record_validator.validate(own)  # a list of the organiser counts here from now on
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
    """The nodes next to the key, and those next to it of whom this peer has averaged with.

    The first may all be strangers, who keep the record for themselves; members hear of each other all the same.
    """
    table, records = node.protocol.routing_table, records_of(node.protocol)
    nearest = [peer for _, peer in table.get_nearest_neighbors(key, node.num_replicas)]
    met = [] if records is None else [(peer, table.get(peer_id=peer)) for peer in records.met.peers]
    members = sorted((place.xor_distance(key), peer) for peer, place in met if place is not None)
    return list(dict.fromkeys([*nearest, *(peer for _, peer in members[:MEMBERS])]))


class PushedHere:
    """What others have stored under a key on this node.

    Hivemind's `get` would also give what this node has found earlier, which may have changed since.

    Args:
        most: entries, those of acquaintances first
        max_bytes: of a value and its signature
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
    """Begin to push a record of this peer, and to store it where a search leads; tells when either is done.

    Where nodes are silent or lie, a search takes seconds, and may lead to those who keep the record for themselves. By
    then it is here and with those whom this peer knows.

    Args:
        dht: of `start_dht`
    """
    pushed = dht.run_coroutine(Push(key, dht.owner, value, expiration_time - NEWER_SECONDS), return_future=True)
    stored = dht.store(key, subkey=dht.owner, value=value, expiration_time=expiration_time, return_future=True)
    return pushed, stored


def push_list(
    dht: Any, prefix: str, kind: str, signed: bytes, to: Sequence[PeerID] = (), timeout_seconds: float = 10
) -> int:
    """Store a list of the organiser's where others look for it, and at further peers; how many have taken it.

    Args:
        dht: of `start_dht`
        prefix: of the run's keys
        kind: of the list
        signed: the list

    Raises:
        concurrent.futures.TimeoutError: the DHT process did not answer
    """
    push = Push(f"{prefix}.{kind}", dht.owner, signed, get_dht_time() + MAX_LIFE_SECONDS - 60, to)
    return dht.run_coroutine(push, return_future=True).result(timeout_seconds)


def push_until_taken(
    dht: Any, prefix: str, kind: str, signed: bytes, to: Sequence[PeerID], timeout_seconds: float = 10
) -> int:
    """As `push_list`, again and again while none of these peers takes it.

    Strangers may just have used up the patience that a peer has with strangers, of whom the organiser is one.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        seconds = max(AGAIN_SECONDS, deadline - time.monotonic())  # it may have slept for longer than it wanted
        taken = push_list(dht, prefix, kind, signed, to, seconds)
        if taken or not to or time.monotonic() + 2 * AGAIN_SECONDS > deadline:
            return taken
        time.sleep(AGAIN_SECONDS)
