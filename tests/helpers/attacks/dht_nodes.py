"""Attacks of a stranger as a node of the DHT: by what it stores, asks and answers, and by the places that it claims."""

from __future__ import annotations

import asyncio
import itertools
import os
import struct
from collections.abc import Awaitable, Callable

import msgpack
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2PContext
from hivemind.proto import dht_pb2
from hivemind.utils import get_dht_time

from tests.helpers.attacks.tools import Outsider, dht_stub

TUPLE, UNKNOWN = 0x40, 0x7F
"""Type codes of Hivemind's msgpack encoding: of a tuple, and of a type that is not registered."""
DEPTH = 300
PLACES = 20


def nested(depth: int = DEPTH) -> bytes:
    """Return tuples inside each other, each of one element. Each level takes 6 bytes."""
    message = msgpack.packb([])
    for _ in range(depth):
        message = b"\xc9" + struct.pack(">I", len(message)) + bytes([TUPLE]) + message
    return message


def of_unknown_types(count: int = 200_000) -> bytes:
    """Return a list of so many elements, each of an unknown type."""
    return b"\xdd" + struct.pack(">I", count) + bytes([0xD4, UNKNOWN, 0]) * count


async def nested_store(node: Outsider) -> None:
    """Asks peers to store a dictionary of records that overflows the stack of a peer that decodes it."""
    await _store_again_and_again(node, nested())


async def unknown_types(node: Outsider) -> None:
    """The same with a dictionary that produces one line of the log for each three bytes."""
    await _store_again_and_again(node, of_unknown_types())


async def _store_again_and_again(node: Outsider, value: bytes) -> None:
    async for turn in node.turns(1.0):
        for peer in {node.target, *await node.members()}:
            call = dht_pb2.StoreRequest(
                keys=[DHTID.generate(source=node.progress_key).to_bytes()],
                subkeys=[DHTProtocol.IS_DICTIONARY],
                values=[value],
                expiration_time=[get_dht_time() + 60],
                in_cache=[False],
            )
            await _answer_of(dht_stub(node.p2p, peer).rpc_store(call, timeout=5))
        node.report(f"asked {turn + 1} times to store {len(value)} bytes")


def answer_nested() -> None:
    """Make each DHT node of this process and of those that it forks answer every question with nested tuples."""

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        found = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=nested(), expiration_time=get_dht_time() + 60)
        return dht_pb2.FindResponse(results=[found for _ in request.keys], peer=self.node_info)

    DHTProtocol.rpc_find = rpc_find


async def nested_answers(node: Outsider) -> None:
    """Stands next to the key of the run, where all peers search, and gives answers that no peer can decode."""
    await _stand_at(node, places=1)


def name_nearer_ones() -> None:
    """Make each DHT node of this process and of those that it forks answer every question with places of its own.

    Each place is nearer to the key than all that it has named before."""
    distances = itertools.count(2**150, -1)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        response = dht_pb2.FindResponse(peer=self.node_info)
        for key in request.keys:
            named = [int(DHTID.from_bytes(key)) ^ next(distances) for _ in range(PLACES)]
            response.results.append(
                dht_pb2.FindResult(
                    type=dht_pb2.NOT_FOUND,
                    nearest_node_ids=[DHTID(place).to_bytes() for place in named],
                    nearest_peer_ids=[self.p2p.peer_id.to_bytes()] * PLACES,
                )
            )
        return response

    DHTProtocol.rpc_find = rpc_find


async def nearer_names(node: Outsider) -> None:
    """Stands next to the key of the run, and names ever nearer nodes to a peer that searches."""
    await _stand_at(node, places=1)


def keep_for_itself() -> None:
    """Make each DHT node of this process and of those that it forks accept every record and return none."""

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        return dht_pb2.StoreResponse(store_ok=[True] * len(request.keys), peer=self.node_info)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        nothing = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
        return dht_pb2.FindResponse(results=[nothing for _ in request.keys], peer=self.node_info)

    DHTProtocol.rpc_store, DHTProtocol.rpc_find = rpc_store, rpc_find


async def places(node: Outsider) -> None:
    """Stands in the twenty places next to the key of the run, under one name, and returns no record stored there."""
    await _stand_at(node, places=PLACES)


async def _stand_at(node: Outsider, places: int) -> None:
    key = int(DHTID.generate(source=node.progress_key))
    async for turn in node.turns(2.0):
        for peer in {node.target, *await node.members()}:
            for number in range(1, places + 1):
                place = dht_pb2.NodeInfo(node_id=DHTID(key ^ number).to_bytes())
                await _answer_of(dht_stub(node.p2p, peer).rpc_ping(dht_pb2.PingRequest(peer=place), timeout=5))
        node.report(f"stood in {places} places, {turn + 1} times")


async def many_keys(node: Outsider, keys: int = 150_000, at_once: int = 8) -> None:
    """Asks for the same key very many times in one question."""
    key, me = DHTID.generate(source=node.progress_key).to_bytes(), dht_pb2.NodeInfo(node_id=os.urandom(20))
    question = dht_pb2.FindRequest(keys=[key] * keys, peer=me)
    async for turn in node.turns(2.0):
        calls = (dht_stub(node.p2p, node.target).rpc_find(question, timeout=40) for _ in range(at_once))
        answers = await asyncio.gather(*map(_answer_of, calls))
        node.report(f"asked {turn + 1} times for {keys} keys, {sum(answer is not None for answer in answers)} answers")


async def _answer_of(call: Awaitable) -> object | None:
    try:
        return await call
    except Exception:  # a refused call and a lost peer count the same: no answer
        return None


ATTACKS: dict[str, Callable[[Outsider], Awaitable[None]]] = {
    "nested-store": nested_store,
    "unknown-types": unknown_types,
    "nested-answers": nested_answers,
    "nearer-names": nearer_names,
    "places": places,
    "many-keys": many_keys,
}
PREPARATIONS: dict[str, Callable[[], None]] = {
    "nested-answers": answer_nested,
    "nearer-names": name_nearer_ones,
    "places": keep_for_itself,
}
"""What an attack changes in this process before the attacker's own node begins."""
