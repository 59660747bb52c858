"""An answer or a record of one stranger ends no search, no call and no process of other peers."""

import asyncio
import multiprocessing
import pickle
import threading
import time
from collections import Counter
from types import SimpleNamespace

import msgpack
import pytest
from google.protobuf.message import Message
from hivemind.dht.node import DHTNode, _SearchState
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MPFuture, ValueWithExpiration
from hivemind.utils.serializer import MSGPackSerializer

from swarm.network.dht_bounds import decoding
from swarm.network.dht_bounds.decoding import plain
from swarm.network.dht_storage import store_requested
from swarm.network.hivemind_patches import MAX_PEER_ID_BYTES, repair_hivemind
from swarm.network.signed_records import RUNS_ID

repair_hivemind()
NESTED = b"\x91" * 600 + b"\xc0"
"""Lists inside each other: msgpack reads them, and pickle does not."""
TOO_MANY = msgpack.packb([None] * (decoding.MAX_VALUES + 1))
LIAR = PeerID(bytes([18, 32, *[9] * 32]))


@pytest.mark.parametrize("read", [plain, decoding.loads])
@pytest.mark.parametrize("sent", [NESTED, TOO_MANY], ids=["nested", "too many"])
def test_a_value_that_a_search_could_not_hand_on_is_no_record(read, sent):
    with pytest.raises(ValueError, match=r"inside each other|too many values|more than a single value"):
        read(sent)


def test_a_value_that_is_read_can_be_passed_on_to_another_process():
    deepest = b"\x91" * (decoding.MAX_NESTED - 1) + b"\xc0"
    found = decoding.loads(MSGPackSerializer.dumps((1, [2, {"key": (3,)}])))
    assert pickle.loads(pickle.dumps(found)) == (1, [2, {"key": (3,)}])
    assert pickle.dumps(decoding.loads(deepest))


def test_the_bounds_that_the_sender_of_a_dictionary_names_are_not_used():
    entries = [[b"one", b"value", 2e9]]
    sent = msgpack.ExtType(decoding.DICTIONARY, msgpack.packb(["many", 1e300, entries]))
    found = decoding.loads(msgpack.packb(sent))
    assert isinstance(found, DictionaryDHTValue)
    assert (found.maxsize, found.latest_expiration_time) == (float("inf"), 2e9)


def of_mixed_kinds(is_over_in_seconds: float) -> DictionaryDHTValue:
    """Records with owners of two types. Hivemind compares them as soon as the first record is over, and cannot."""
    now, records = time.time(), DictionaryDHTValue()
    for owner, end in ((b"a", now + is_over_in_seconds), (1, now + 60), (b"c", now + 60)):
        records.store(owner, b"value", end)
    return records


def test_a_record_whose_owner_is_no_bytes_is_left_out_and_the_others_are_not():
    """A node of Hivemind passes on whatever a caller has stored there."""
    found = decoding.loads(MSGPackSerializer.dumps(of_mixed_kinds(0.05)))
    time.sleep(0.1)
    assert [owner for owner, _ in found.items()] == [b"c"]


def test_an_answer_that_cannot_be_sorted_ends_no_search():
    """The caller that had asked for it waited for good."""

    async def found() -> object:
        search = _SearchState(DHTID(7), float("inf"))
        answer = of_mixed_kinds(0.05)
        await asyncio.sleep(0.1)
        search.add_candidate(ValueWithExpiration(answer, time.time() + 60), DHTID(1))
        search.finish_search()
        return await search.future

    assert asyncio.run(found()) is None


def test_an_answer_that_is_a_plain_mapping_is_dropped():
    assert not vars(DHTProtocol)["_validate_dictionary"](SimpleNamespace(), b"key", {})


def test_a_long_peer_id_is_refused_before_it_is_written_down():
    with pytest.raises(ValueError, match="a peer id of"):
        PeerID(bytes(2**22))
    assert PeerID(bytes(MAX_PEER_ID_BYTES))


def test_a_result_that_cannot_be_passed_on_ends_the_wait_for_it():
    future = MPFuture()
    process = multiprocessing.get_context("fork").Process(target=future.set_result, args=(threading.Lock(),))
    process.start()
    with pytest.raises(ValueError, match="cannot be passed on"):
        future.result(timeout=20)
    process.join()


def test_no_answer_may_name_the_askers_place_or_a_known_one_for_another_peer():
    own, known, new = (DHTID.generate(source=name) for name in ("own", "known", "new"))
    honest, liar = (PeerID(bytes([18, 32, *[number] * 32])) for number in (1, 2))
    table = RoutingTable(own, bucket_size=20, depth_modulo=5)
    table.add_or_update_node(known, honest)
    protocol = SimpleNamespace(routing_table=table)
    node = SimpleNamespace(node_id=own, peer_id=PeerID(bytes(34)), blacklist=Counter(), protocol=protocol)
    assert vars(DHTNode)["_filter_blacklisted"](node, {own: liar, known: liar, new: liar}) == {new: liar}
    assert vars(DHTNode)["_filter_blacklisted"](node, {known: honest}) == {known: honest}


@pytest.mark.parametrize(("key", "in_cache"), [(RUNS_ID.to_bytes(), True), (b"\0" + RUNS_ID.to_bytes(), False)])
def test_nothing_is_stored_past_the_checks_of_its_key(key, in_cache):
    """A value in the cache would be answered in place of all that is stored.

    A longer key would lead to the same place.
    """
    node = SimpleNamespace(IS_DICTIONARY="dictionary")  # the node has nothing else that could be asked
    request = dht_pb2.StoreRequest(
        keys=[key], subkeys=[b"one"], values=[b"value"], expiration_time=[time.time() + 60], in_cache=[in_cache]
    )
    assert asyncio.run(store_requested(node, request)) == [False]


class Answered(P2P):
    """A connection to p2pd through which each call gets the same answer.

    Args:
        answer: what another peer answers
    """

    def __init__(self, answer: Message):
        super().__init__()
        self._client, self._answer = self, answer.SerializeToString()

    def __del__(self) -> None:
        """End nothing: there is no p2pd."""

    async def call_unary_handler(self, *_) -> bytes:
        return self._answer


def asking(answer: Message) -> DHTProtocol:
    """A DHT node whose calls get this answer."""
    node = DHTProtocol(_initialized_with_create=True)
    node.p2p, node.client_mode, node.authorizer, node.wait_timeout = Answered(answer), True, None, 20.0
    node.node_id, node.node_info, node.record_validator = DHTID(0), dht_pb2.NodeInfo(), None
    node.rpc_semaphore, node.routing_table = asyncio.Semaphore(), RoutingTable(DHTID(0), 20, 5)
    return node


def naming(node_ids: list[bytes], peer_ids: list[bytes]) -> dht_pb2.FindResponse:
    """An answer about one key that names these nodes."""
    return dht_pb2.FindResponse(results=[dht_pb2.FindResult(nearest_node_ids=node_ids, nearest_peer_ids=peer_ids)])


def test_an_answer_that_names_very_many_nodes_is_refused_before_they_are_read(monkeypatch):
    """500,000 places of five bytes, each of a peer without a name, kept the asking process busy for seconds."""
    read, key = [], DHTID(7)
    places = [number.to_bytes(5, "big") for number in range(500_000)]
    monkeypatch.setattr(DHTID, "from_bytes", read.append)
    monkeypatch.setattr("hivemind.dht.protocol.PeerID", read.append)

    async def ask() -> None:
        for few_peers in ([b""] * len(places), []):
            assert await asking(naming(places, few_peers)).call_find(LIAR, [key]) is None
        assert await asking(naming([b""], [b""] * 500_000)).call_find(LIAR, [key]) is None

    asyncio.run(ask())
    assert read == []


def test_an_answer_that_names_as_many_nodes_as_hivemind_does_is_read():
    named = {DHTID(number): PeerID(bytes([18, 32, *[number] * 32])) for number in range(1, 21)}
    answer = naming([place.to_bytes() for place in named], [peer.to_bytes() for peer in named.values()])
    found = asyncio.run(asking(answer).call_find(LIAR, [DHTID(7)]))
    assert found == {DHTID(7): (None, named)}


def test_an_answer_to_a_store_has_no_more_entries_than_the_store():
    """A peer that pushes a record looks at each entry."""

    async def stored(num_entries: int) -> list[bool] | None:
        node = asking(dht_pb2.StoreResponse(store_ok=[True] * num_entries))
        return await node.call_store(LIAR, [DHTID(7)], [b"value"], [2e9], subkeys=[b"owner"])

    assert asyncio.run(stored(2)) is None
    assert asyncio.run(stored(1)) == [True]


@pytest.mark.parametrize("num_bytes", [19, 21, 2**20])
def test_an_answer_with_an_impossible_place_is_a_call_that_failed(num_bytes):
    """Hivemind's ping raised an error for it that ended the start of a peer, and that other callers do not expect."""
    answer = dht_pb2.PingResponse(peer=dht_pb2.NodeInfo(node_id=b"\xff" * num_bytes))
    assert asyncio.run(asking(answer).call_ping(LIAR)) is None
