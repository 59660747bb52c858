"""Bounds on what a DHT node decodes, believes and answers."""

import asyncio
import gc
from functools import partial
from types import SimpleNamespace

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import CompositeValidator
from hivemind.p2p import P2PHandlerError, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import ValueWithExpiration
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.serializer import MSGPackSerializer

from swarm.network.dht_bounds import decoding, nodes
from swarm.network.dht_storage import BoundedStorage, KnownKeys
from swarm.network.hivemind_patches import repair_hivemind
from swarm.network.signed_records import OwnedRecords
from swarm.runtime.token_bucket import TokenBucket
from tests.helpers.attacks.dht_nodes import nested, of_unknown_types

repair_hivemind()
PEERS = [PeerID(bytes([18, 32, *[number] * 32])) for number in range(3)]


def test_what_hivemind_encodes_is_decoded():
    records = DictionaryDHTValue()
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


def node_at(place: DHTID) -> SimpleNamespace:
    """The part of a DHT node that believes other nodes."""

    async def ignore(*_, **__) -> None:
        """Call no peer, and remember no caller."""

    return SimpleNamespace(
        node_id=place,
        node_info=dht_pb2.NodeInfo(node_id=place.to_bytes()),
        routing_table=RoutingTable(place, bucket_size=20, depth_modulo=5),
        bucket_size=20,
        storage={},
        cache={},
        num_replicas=5,
        record_validator=None,
        rpc_ping=ignore,
        update_routing_table=ignore,
    )


def limit(monkeypatch, **limits: nodes.CallerLimits | TokenBucket) -> None:
    """Set the limits of a node in this test. Used-up amounts do not come back."""
    monkeypatch.setattr(nodes, "limits", nodes.NodeLimits(**limits))


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


def test_names_without_end_are_not_remembered_for_good(monkeypatch):
    limit(monkeypatch, handed_over=TokenBucket(100, 0.0))
    node, pinged = node_at(DHTID.generate(source="own")), []

    async def call_ping(peer):
        pinged.append(peer)

    async def come(names: int) -> None:
        node.call_ping = call_ping
        for number in range(names):
            peer = PeerID(bytes([18, 32]) + number.to_bytes(32, "big"))
            await nodes.update_routing_table(node, DHTID.generate(source=number), peer)

    asyncio.run(come(5000))
    table = node.routing_table
    in_buckets = [place for bucket in table.buckets for place in (*bucket.nodes_to_peer_id, *bucket.replacement_nodes)]
    assert len(in_buckets) <= 2 * 20 * len(table.buckets) < 3000
    assert set(table.uid_to_peer_id) == set(in_buckets) == set(table.peer_id_to_uid.values())
    assert DHTID.generate(source=4999) in table, "the latest is known"
    assert pinged


def node_with(num_bytes: int, asked: list[DHTID]) -> SimpleNamespace:
    """A node that has a value of this size for every key, and notes the keys that it is asked for."""
    node, found = node_at(DHTID(0)), ValueWithExpiration(bytes(num_bytes), 1.0)
    node.storage = SimpleNamespace(get=lambda key: asked.append(key) or found)
    return node


def answer(node: SimpleNamespace, keys: list[bytes], peer: PeerID) -> dht_pb2.FindResponse:
    request = dht_pb2.FindRequest(keys=keys, peer=dht_pb2.NodeInfo(node_id=bytes(20)))
    return asyncio.run(nodes.rpc_find(node, request, SimpleNamespace(remote_id=peer)))


def test_a_question_has_few_keys_and_an_answer_few_bytes(monkeypatch):
    node = node_with(2**21, asked := [])
    limit(monkeypatch, answered=nodes.CallerLimits(3 * 2**20, 0.0))
    keys = [bytes([number]) * 20 for number in range(100)]
    for too_many in (keys, [keys[0]] * 2):
        with pytest.raises(ValueError, match="a question for"):
            answer(node, too_many, PEERS[0])
    response = answer(node, keys[:3], PEERS[0])
    assert [len(result.value) for result in response.results] == [2**21, 0, 0]
    assert [result.type for result in response.results[1:]] == [dht_pb2.NOT_FOUND] * 2
    answer(node, keys[:1], PEERS[0])
    with pytest.raises(ValueError, match="enough answers"):
        answer(node, keys[:1], PEERS[0])
    assert asked == [DHTID.from_bytes(key) for key in (*keys[:3], keys[0])], "a refused call costs nothing"
    assert answer(node, keys[:1], PEERS[1]).results[0].value, "another peer is answered"


def test_neighbours_count_as_part_of_an_answer(monkeypatch):
    """For a question of 700 bytes with unknown keys, a node would send 37 kB, without end."""
    node = node_at(DHTID(0))
    for number in range(1, 21):
        node.routing_table.add_or_update_node(DHTID(number), PeerID(bytes([18, 32, *[number] * 32])))
    limit(monkeypatch, answered=nodes.CallerLimits(2**17, 0.0))
    keys = [bytes([number]) * 20 for number in range(nodes.MAX_KEYS)]
    question = dht_pb2.FindRequest(keys=keys, peer=dht_pb2.NodeInfo(node_id=bytes(20)))
    sent = []

    async def ask() -> None:
        for _ in range(100):
            sent.append((await nodes.rpc_find(node, question, SimpleNamespace(remote_id=PEERS[0]))).ByteSize())

    with pytest.raises(ValueError, match="enough answers"):
        asyncio.run(ask())
    assert sent[0] > 2**15
    assert sum(sent) < 2**18


def test_strangers_together_get_a_part_of_a_line_and_a_known_peer_gets_its_own(monkeypatch):
    node, records = node_with(2**20, []), OwnedRecords(RSAPrivateKey())
    node.record_validator = CompositeValidator([records])
    limit(monkeypatch, answered=nodes.CallerLimits(2**24, 0.0, TokenBucket(2**21, 0.0)))
    for peer in PEERS[:2]:
        answer(node, [bytes(20)], peer)
    with pytest.raises(ValueError, match="enough answers"):
        answer(node, [bytes(20)], PEERS[2])
    records.met.add([PEERS[2]])
    assert answer(node, [bytes(20)], PEERS[2]).results


def test_a_peer_that_is_new_again_and_again_is_given_all_records_a_few_times(monkeypatch):
    """Each time the records go over this peer's line, for a question of some bytes."""
    limit(monkeypatch, handed_over=TokenBucket(3, 0.0))
    node, given = node_at(DHTID(0)), []
    node.storage = {DHTID(7): SimpleNamespace(value=b"all records", expiration_time=2e9)}

    async def call_store(peer, keys, *_, **__):
        given.append((peer, keys))

    async def run() -> None:
        node.call_store = call_store
        for place in range(100, 140):
            await nodes.update_routing_table(node, DHTID(place), PEERS[1])
        await nodes.update_routing_table(node, DHTID(500), PEERS[2])
        await asyncio.sleep(0)

    asyncio.run(run())
    assert [peer for peer, _ in given] == [PEERS[1]] * 3
    assert node.routing_table.get(peer_id=PEERS[1]) == DHTID(139)
    assert node.routing_table.get(peer_id=PEERS[2]) == DHTID(500), "it is known all the same"


def giving(store) -> SimpleNamespace:
    """A node that gives newcomers records.

    Args:
        store: what each newcomer does with a message
    """
    node = node_at(DHTID(0))
    node.serializer, node.call_store = MSGPackSerializer, partial(nodes.call_store, node)
    node.update_routing_table = partial(nodes.update_routing_table, node)
    node.IS_DICTIONARY, node.rpc_semaphore, node.wait_timeout = DHTProtocol.IS_DICTIONARY, asyncio.Semaphore(), 1.0
    node.get_stub = lambda peer: SimpleNamespace(rpc_store=partial(store, peer))
    return node


def test_records_that_are_handed_over_count_as_an_answer(monkeypatch):
    """A peer that fills a node's storage, and is new again and again, would have it send megabytes per second."""
    answered = nodes.CallerLimits(2**20, 0.0, TokenBucket(2**20, 0.0))
    limit(monkeypatch, answered=answered, handed_over=TokenBucket(1000, 0.0))
    given = []

    async def store(peer, *_, **__) -> dht_pb2.StoreResponse:
        given.append(peer)
        return dht_pb2.StoreResponse()

    records = DictionaryDHTValue()
    for number in range(300):
        records.store(bytes([number % 256, number // 256]), bytes(1000), 2e9)
    node = giving(store)
    node.storage = {DHTID(7): SimpleNamespace(value=records, expiration_time=2e9)}

    async def run() -> None:
        for place in range(100, 140):
            await nodes.update_routing_table(node, DHTID(place), PEERS[1])
            await asyncio.sleep(0)
        await nodes.update_routing_table(node, DHTID(500), PEERS[2])
        await asyncio.sleep(0)

    asyncio.run(run())
    assert given == [PEERS[1]] * 4, "1 MiB, and what was over"
    assert DHTID(500) in node.routing_table


@pytest.mark.parametrize("takes", [True, False])
def test_records_are_handed_over_key_by_key_and_a_newcomer_that_refuses_them_stays_known(takes, monkeypatch):
    """All in one message may be too long. A newcomer that was forgotten for it came again, and was given all again."""
    limit(monkeypatch)
    given, keys, place = [], [DHTID(number) for number in (7, 8, 9)], DHTID(100)

    async def store(peer, request, timeout) -> dht_pb2.StoreResponse:
        given.append(list(request.keys))
        if not takes:
            raise P2PHandlerError("too many calls at a time")
        return dht_pb2.StoreResponse(store_ok=[True])

    async def run() -> list[bool] | None:
        node = giving(store)
        node.routing_table.add_or_update_node(place, PEERS[1])
        stored = await nodes.call_store(node, PEERS[1], keys, [DictionaryDHTValue()] * 3, [2e9] * 3, in_cache=False)
        await asyncio.sleep(0)
        assert node.routing_table.get(peer_id=PEERS[1]) == place
        return stored

    assert asyncio.run(run()) == ([True] * 3 if takes else None)
    assert given == [[key.to_bytes()] for key in (keys if takes else keys[:1])]


def test_a_peer_that_wants_to_be_called_back_and_does_not_answer_holds_few_calls(monkeypatch):
    """Members need some of the calls that a process answers at a time."""
    monkeypatch.setattr(nodes, "ALL_PINGS", 3)
    limit(monkeypatch)
    node, place = node_at(DHTID(0)), DHTID(7)

    async def run() -> list[list[bool]]:
        silence = asyncio.Event()

        async def call_ping(*_, **__) -> DHTID:
            await silence.wait()
            return place

        def call(peer: PeerID, validate: bool = True) -> asyncio.Future:
            request = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=place.to_bytes()), validate=validate)
            return asyncio.ensure_future(nodes.rpc_ping(node, request, SimpleNamespace(remote_id=peer)))

        node.call_ping = call_ping
        calls = [call(PEERS[0]) for _ in range(5)] + [call(PEERS[1]) for _ in range(5)]
        await asyncio.sleep(0)
        assert not (await call(PEERS[2], validate=False)).available, "others are answered"
        waiting = [not call.done() for call in calls]
        silence.set()
        await asyncio.gather(*calls, return_exceptions=True)
        return [waiting, [(await call(PEERS[2])).available]]

    waiting, again = asyncio.run(run())
    assert waiting == [True, True, False, False, False, True, False, False, False, False]
    assert again == [True], "nothing stays counted"


@pytest.mark.slow
def test_names_of_strangers_crowd_out_strangers_and_no_known_peer():
    records = OwnedRecords(RSAPrivateKey())
    records.met.add([PEERS[1]])
    node = SimpleNamespace(record_validator=CompositeValidator([records]))
    limits = nodes.CallerLimits(10, 0.0)
    for number in range(5000):
        name = PeerID(bytes([18, 32]) + number.to_bytes(32, "big"))
        limits.spend(node, name, 100)
    assert not limits.may(node, PEERS[0])
    assert limits.may(node, PEERS[1]), "it has averaged with this peer"
    limits.spend(node, PEERS[1], 100)
    assert not limits.may(node, PEERS[1]), "and has a limit of its own"


def test_a_call_with_too_many_records_is_refused():
    node = SimpleNamespace(storage=BoundedStorage(KnownKeys(OwnedRecords(RSAPrivateKey()))))
    request = dht_pb2.StoreRequest(keys=[bytes(20)] * 60_000)
    with pytest.raises(ValueError, match="60000 records at once"):
        asyncio.run(DHTProtocol.rpc_store(node, request, SimpleNamespace(remote_id=PEERS[0])))


def test_a_caller_without_a_possible_place_is_refused_and_leaves_no_failed_task_behind(caplog):
    """Each such call put twenty lines of an error that nothing had handled on the volunteer's screen."""
    node, here = node_at(DHTID(0)), SimpleNamespace(remote_id=PEERS[0])
    node.storage = BoundedStorage(KnownKeys(OwnedRecords(RSAPrivateKey())))
    node.rpc_ping = partial(nodes.rpc_ping, node)
    nowhere = dht_pb2.NodeInfo(node_id=b"\xff" * 21)

    async def run() -> None:
        for call in (
            nodes.rpc_find(node, dht_pb2.FindRequest(peer=nowhere), here),
            DHTProtocol.rpc_store(node, dht_pb2.StoreRequest(peer=nowhere), here),
        ):
            with pytest.raises(ValueError, match="a place of 21 bytes"):
                await call
        await asyncio.sleep(0)
        gc.collect()

    asyncio.run(run())
    assert not caplog.records


def test_hivemind_uses_these_bounds():
    assert DHTProtocol.rpc_ping is nodes.rpc_ping
    assert DHTProtocol.rpc_find is nodes.rpc_find
    assert DHTProtocol.update_routing_table is nodes.update_routing_table
    assert DHTProtocol.call_store is nodes.call_store
