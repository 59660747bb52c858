"""What a node of the DHT decodes, believes and answers, whatever it is told."""

import asyncio
from types import SimpleNamespace

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.serializer import MSGPackSerializer
from hypothesis import given
from hypothesis import strategies as some

from swarm.network.dht_bounds import decoding, nodes
from swarm.network.hivemind_patches import repair_hivemind
from swarm.runtime.token_bucket import TokenBuckets
from tests.helpers.attacks.dht_nodes import nested, of_unknown_types

repair_hivemind()
PEERS = [PeerID(bytes([18, 32, *[number] * 32])) for number in range(3)]


def test_what_hivemind_encodes_is_decoded():
    records = DictionaryDHTValue(maxsize=7)
    records.store(b"owner", b"value", 2e9)
    for said in (records, ("a", (1, [2.5, None]), {"key": b"value"})):
        found = MSGPackSerializer.loads(MSGPackSerializer.dumps(said))
        assert type(found) is type(said)
        assert MSGPackSerializer.dumps(found) == MSGPackSerializer.dumps(said)
    assert MSGPackSerializer.loads is decoding.loads


def test_tuples_inside_each_other_end_nothing_and_unknown_types_are_no_line_of_the_log(caplog):
    for message in (nested(20), nested(300), nested(20_000), of_unknown_types(1000), b"", b"\xdd\xff\xff\xff\xff"):
        with pytest.raises(ValueError, match=r"it cannot be read|inside each other|type 127"):
            decoding.loads(message)
    assert not caplog.records


@given(some.binary(max_size=200))
def test_anything_else_is_a_value_error(message):
    try:
        decoding.loads(message)
    except ValueError:
        pass


def node_at(place: DHTID) -> SimpleNamespace:
    """As much of a node as believes others."""
    table = RoutingTable(place, bucket_size=20, depth_modulo=5)
    return SimpleNamespace(node_id=place, routing_table=table, storage={}, num_replicas=5)


def test_a_peer_stands_in_one_place_and_not_in_that_of_another():
    node = node_at(DHTID(0))

    async def run() -> None:
        await nodes.update_routing_table(node, DHTID(500), PEERS[0])
        for place in range(1, 40):
            await nodes.update_routing_table(node, DHTID(place), PEERS[1])
        await nodes.update_routing_table(node, DHTID(500), PEERS[2])
        await nodes.update_routing_table(node, DHTID(0), PEERS[2])

    asyncio.run(run())
    table = node.routing_table
    assert table.get(node_id=DHTID(500)) == PEERS[0]
    assert [place for place in range(40) if DHTID(place) in table] == [39], "the last one that it has said"
    assert table.get(peer_id=PEERS[2]) is None
    asyncio.run(nodes.update_routing_table(node, None, PEERS[1], responded=False))
    assert DHTID(39) not in table


def answer(keys: list[bytes], peer: PeerID) -> dht_pb2.FindResponse:
    request = dht_pb2.FindRequest(keys=keys, peer=dht_pb2.NodeInfo(node_id=bytes(20)))
    return asyncio.run(nodes.rpc_find(None, request, SimpleNamespace(remote_id=peer)))


def test_a_question_has_few_keys_and_an_answer_few_bytes(monkeypatch):
    asked = []

    async def found(_self, request, _context):
        asked.append(len(request.keys))
        result = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=bytes(2**21), expiration_time=1.0)
        return dht_pb2.FindResponse(results=[result] * len(request.keys))

    monkeypatch.setattr(nodes, "_find", found)
    monkeypatch.setattr(nodes, "_answered", TokenBuckets(3 * 2**20, 0.0))
    keys = [bytes([number]) * 20 for number in range(100)]
    for too_many in (keys, [keys[0]] * 2):
        with pytest.raises(ValueError, match="a question for"):
            answer(too_many, PEERS[0])
    response = answer(keys[:3], PEERS[0])
    assert [len(result.value) for result in response.results] == [2**21, 0, 0]
    assert [result.type for result in response.results[1:]] == [dht_pb2.NOT_FOUND] * 2
    answer(keys[:1], PEERS[0])
    with pytest.raises(ValueError, match="enough answers"):
        answer(keys[:1], PEERS[0])
    assert asked == [3, 1], "who is refused costs nothing"
    assert answer(keys[:1], PEERS[1]).results[0].value, "another peer is answered"


def test_hivemind_uses_them():
    assert DHTProtocol.rpc_find is nodes.rpc_find
    assert DHTProtocol.update_routing_table is nodes.update_routing_table
