"""A DHT node that names nearer nodes without end, or answers late, holds up no search and hides no node."""

import asyncio
import time
from collections import defaultdict
from types import SimpleNamespace

import pytest
from hivemind.dht.node import Blacklist, DHTNode
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DHTLocalStorage
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time
from hivemind.utils.serializer import MSGPackSerializer
from sortedcontainers import SortedSet

from swarm.network.dht_bounds import searches
from swarm.network.hivemind_patches import repair_hivemind
from tests.helpers.virtual_time import run_in_virtual_time

repair_hivemind()
KEY = DHTID.generate(source="run.progress")
LIAR, *HONEST = [PeerID(bytes([18, 32, *[number] * 32])) for number in range(9)]
KEPT = MSGPackSerializer.dumps(b"a record")


class Network:
    """One node, and the answers of the others. The liar stands next to the key, and the honest nodes far from it.

    Args:
        answer_seconds: seconds that the liar takes for an answer
        invents: whether the liar names nodes without end, each nearer than all before, or else raises an unusual error
    """

    def __init__(self, answer_seconds: float = 0.0, invents: bool = True):
        self.answer_seconds, self.invents = answer_seconds, invents
        self.asked, self.stored, self.distance = [], [], 2**100
        self.node = node = DHTNode(_initialized_with_create=True)
        node.node_id, node.peer_id = DHTID(int(KEY) ^ 2**159), PeerID(bytes([18, 32, *[9] * 32]))
        node.num_workers, node.num_replicas, node.chunk_size = 4, 5, 16
        node.blacklist, node.reuse_get_requests = Blacklist(5.0, 2.0), True
        node.pending_get_requests = defaultdict(lambda: SortedSet(key=lambda found: -found.sufficient_expiration_time))
        node.cache_on_store = node.cache_locally = False
        node.cache_nearest = node.cache_refresh_before_expiry = 0
        table = RoutingTable(node.node_id, bucket_size=20, depth_modulo=5)
        table.add_or_update_node(DHTID(int(KEY) ^ 2**101), LIAR)
        for number, peer in enumerate(HONEST):
            table.add_or_update_node(DHTID(int(KEY) ^ (2**155 + number)), peer)
        node.protocol = SimpleNamespace(
            routing_table=table,
            bucket_size=20,
            serializer=MSGPackSerializer,
            record_validator=None,
            storage=DHTLocalStorage(),
            cache=DHTLocalStorage(),
            call_find=self.call_find,
            call_store=self.call_store,
        )

    async def call_find(self, peer, keys):
        self.asked.append(peer)
        if peer != LIAR:
            await asyncio.sleep(0.01)
            found = ValueWithExpiration(KEPT, get_dht_time() + 60) if peer == HONEST[-1] else None
            return {key: (found, {}) for key in keys}
        await asyncio.sleep(self.answer_seconds)
        if not self.invents:
            raise TypeError("'<' not supported between instances of 'bytes' and 'int'")
        named = {}
        for _ in range(30):
            self.distance -= 1
            named[DHTID(int(KEY) ^ self.distance)] = LIAR
        return {key: (None, dict(named)) for key in keys}

    async def call_store(self, peer, *_args, **_options):
        self.stored.append(peer)
        return [True]


async def in_time(search) -> object:
    return await asyncio.wait_for(search, 2 * (searches.SEARCH_SECONDS + searches.LAST_SECONDS))


@pytest.fixture(autouse=True)
def seconds(monkeypatch):
    monkeypatch.setattr(searches, "SEARCH_SECONDS", 1.0)
    monkeypatch.setattr(searches, "LAST_SECONDS", 0.5)


@pytest.mark.parametrize("answer_seconds", [0.0, 0.4, 30.0])
def test_a_record_is_found_behind_a_node_that_names_others_without_end(answer_seconds):
    network = Network(answer_seconds)
    found = asyncio.run(in_time(network.node.get("run.progress", latest=True)))
    assert found.value == b"a record"
    assert set(network.asked) == {LIAR, *HONEST}, "nodes that it knows itself it asks in any case"
    assert network.asked.count(LIAR) <= searches.MAX_CALLS + 1


@pytest.mark.parametrize("answer_seconds", [0.0, 0.4, 30.0])
def test_a_store_ends(answer_seconds, monkeypatch):
    network = Network(answer_seconds)

    async def store() -> None:
        began = time.monotonic()
        assert await network.node.store("run.progress", b"a record", get_dht_time() + 60)
        assert time.monotonic() - began < searches.SEARCH_SECONDS + searches.LAST_SECONDS + 0.01

    run_in_virtual_time(store, monkeypatch)
    assert network.stored
    assert network.asked.count(LIAR) <= searches.MAX_CALLS + 1


def test_the_nearest_nodes_are_found_as_far_as_the_search_came():
    network = Network()
    nearest = asyncio.run(in_time(network.node.find_nearest_nodes([KEY], k_nearest=5, exclude_self=True)))
    assert len(nearest[KEY]) == 5


def test_an_answer_that_makes_no_sense_is_ignored():
    network = Network(invents=False)
    found = asyncio.run(in_time(network.node.get("run.progress", latest=True)))
    assert found.value == b"a record"


def test_of_many_silent_nodes_the_earlier_are_forgotten(monkeypatch):
    """A lying node can name as many nodes as it likes that do not exist."""
    now = get_dht_time()
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", lambda: now)
    monkeypatch.setattr("hivemind.dht.node.get_dht_time", lambda: now)
    monkeypatch.setattr(searches, "MAX_SILENT", 50)
    blacklist = Blacklist(5.0, 2.0)
    for number in range(1000):
        now += 1.0
        blacklist.register_failure(PeerID(bytes([18, 32]) + number.to_bytes(32, "big")))
    assert 5 <= len(blacklist.ban_counter) <= 60
    for _ in range(2):
        now += 6.0
        blacklist.register_failure(HONEST[0])
    now += 6.0
    assert HONEST[0] in blacklist, "the second time for longer"


def test_several_keys_are_searched_for_at_once():
    network = Network(answer_seconds=0.02)
    keys = [f"run.{number}" for number in range(4)] + ["run.progress"]
    found = asyncio.run(in_time(network.node.get_many(keys, sufficient_expiration_time=float("inf"))))
    assert found["run.progress"].value == b"a record"
