"""A DHT node that lies about its own place, or about those of others, takes over no search and no store."""

import asyncio
import hashlib
import inspect
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
from hivemind.dht.node import Blacklist, DHTNode
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, ValueWithExpiration, get_dht_time

from recipe.errors import InputError
from swarm.network import dht_options
from swarm.network.acquaintances import Acquaintances
from swarm.network.dht_bounds import nodes, places, searches
from swarm.network.dht_bounds.places import NEW_PEERS, PLACES
from swarm.network.dht_options import NetworkOptions
from swarm.network.hivemind_patches import repair_hivemind
from tests.helpers.virtual_time import run_in_virtual_time

repair_hivemind()
KEY = DHTID.generate(source="swarm.runs")
HONEST = [f"honest {number}" for number in range(19)]
Answer = dict[DHTID, PeerID]


def peer(name: str) -> PeerID:
    return PeerID(b"\x12\x20" + hashlib.sha256(name.encode()).digest())


def next_to_key(distance: int) -> DHTID:
    return DHTID(int(KEY) ^ distance)


TWO = ("liar", "another liar")
LIARS = (*TWO, *(f"liar {number}" for number in range(3, 25)))
PEERS = {peer(name): name for name in (*HONEST, *LIARS)}


class Network:
    """Hivemind's node with its routing table, and the answers of all other nodes.

    Args:
        in_table: names in the routing table of the node that searches
        liar_says: neighbours that the liars name
        has_record: names of the nodes that have the record
    """

    serializer, record_validator, bucket_size = MSGPackSerializer, None, 20

    def __init__(self, in_table: Sequence[str], liar_says: Callable[[], Answer], has_record: Sequence[str] = ()):
        self.liar_says, self.has_record = liar_says, has_record
        self.asked, self.stored = Counter(), Counter()
        self.storage, self.cache = DHTLocalStorage(), DHTLocalStorage()
        node = self.node = DHTNode.__new__(DHTNode)
        node.node_id, node.peer_id, node.num_workers, node.num_replicas = place("me"), peer("me"), 4, 5
        node.protocol, node.blacklist = self, Blacklist(5.0, 2.0)
        node.reuse_get_requests, node.chunk_size, node.cache_refresh_before_expiry = False, 16, 0
        node.cache_locally, node.cache_nearest, node.cache_on_store = False, 0, False
        self.routing_table = RoutingTable(node.node_id, self.bucket_size, 5)
        for name in in_table:
            self.routing_table.add_or_update_node(place(name), peer(name))

    async def call_find(self, to: PeerID, keys: Sequence[DHTID]) -> dict | None:
        name = PEERS.get(to)
        self.asked[name] += 1
        await asyncio.sleep(0 if name in LIARS else 0.001)
        if name is None:
            return None
        others = {place(other): peer(other) for other in HONEST if other != name}
        near = self.liar_says() if name in LIARS else others
        found = None
        if name in self.has_record:
            found = DictionaryDHTValue()
            found.store(b"owner", MSGPackSerializer.dumps(b"manifest"), get_dht_time() + 60)
            found = ValueWithExpiration(found, get_dht_time() + 60)
        return {key: (found, dict(near)) for key in keys}

    async def call_store(self, to: PeerID, *_args, **_kwargs) -> list[bool] | None:
        name = PEERS.get(to)
        self.stored[name] += 1
        return None if name is None else [True]

    async def store(self) -> None:
        await self.node.store("swarm.runs", b"manifest", get_dht_time() + 60, subkey=b"owner")

    async def get(self) -> object:
        return await self.node.get("swarm.runs", latest=True)


def place(name: str) -> DHTID:
    """The place of a node. Liars stand next to the key, and the honest nodes one behind the other, farther away."""
    if name in LIARS:
        return next_to_key(1000 + LIARS.index(name))
    return next_to_key(2**100 * (1 + HONEST.index(name))) if name in HONEST else DHTID.generate(source=name)


def itself_in_many_places() -> Answer:
    return {next_to_key(distance): peer("liar") for distance in range(1, 21)}


def peers_that_do_not_exist() -> Answer:
    return {next_to_key(distance): peer(f"nobody {distance}") for distance in range(1, 21)}


LIES = pytest.mark.parametrize("liar_says", [itself_in_many_places, peers_that_do_not_exist])


@LIES
def test_the_copies_of_a_record_are_kept_by_several_nodes(liar_says):
    """The liar claimed to have kept all five copies, and no other node had one."""
    network = Network([*HONEST[:6], "liar"], liar_says)
    asyncio.run(asyncio.wait_for(network.store(), 10))
    assert network.stored["liar"] <= 1
    assert sum(network.stored[name] for name in HONEST) >= 4


@LIES
def test_a_record_is_found_beside_a_node_that_claims_to_stand_everywhere(liar_says):
    """Before, only the places next to the key were looked at, and all of them were the liar's."""
    network = Network([*HONEST[:6], "liar"], liar_says, has_record=[HONEST[5]])
    found = asyncio.run(asyncio.wait_for(network.get(), 10))
    assert found is not None
    assert found.value[b"owner"].value == b"manifest"


def test_two_liars_that_name_peers_that_do_not_exist_do_not_hide_known_nodes():
    """A newcomer knows the two liars, some nodes, and a member. Before, it looked at the made-up peers only."""
    numbers = itertools.count(1)

    def other_peers_each_time() -> Answer:
        return {next_to_key(number): peer(f"nobody {number}") for number in itertools.islice(numbers, NEW_PEERS)}

    network = Network([*HONEST[:6], *TWO], other_peers_each_time, has_record=[HONEST[5]])
    found = asyncio.run(asyncio.wait_for(network.get(), 10))
    assert all(network.asked[name] for name in TWO)
    assert found is not None
    assert found.value[b"owner"].value == b"manifest"


@pytest.fixture
def met(monkeypatch) -> Acquaintances:
    """Peers that the node has met."""
    met = Acquaintances()
    monkeypatch.setattr(places, "records_of", lambda protocol: SimpleNamespace(met=met))
    return met


def liars_that_answer() -> Answer:
    return {place(name): peer(name) for name in LIARS}


def test_strangers_that_answer_do_not_hide_a_record_from_a_peer_that_has_met_its_keeper(met):
    """They are all that stands next to the key; the keeper stands far away, and has been asked in each search."""
    network = Network([HONEST[0], *LIARS], liars_that_answer, has_record=[HONEST[0]])
    assert asyncio.run(asyncio.wait_for(network.get(), 10)) is None, "or the liars hide nothing"
    met.add([peer("of another run"), peer(HONEST[0])])
    found = asyncio.run(asyncio.wait_for(network.get(), 10))
    assert found is not None
    assert found.value[b"owner"].value == b"manifest"


def test_met_peers_are_asked_once_in_a_search_and_only_the_latest(met):
    known = HONEST[: places.MET_PEERS + 2]
    network = Network([*known, *LIARS], liars_that_answer)
    met.add(map(peer, known))
    asyncio.run(asyncio.wait_for(network.get(), 10))
    assert [network.asked[name] for name in known] == [0, 0, *[1] * places.MET_PEERS]


def test_a_met_peer_that_does_not_answer_does_not_keep_a_search_from_ending(met, monkeypatch):
    """Also where others are silent, so that the search ends with its last questions."""

    async def get() -> None:
        network = Network([*HONEST[:6], "liar"], dict, has_record=[HONEST[5]])
        answer = network.call_find

        async def call_find(to: PeerID, keys: Sequence[DHTID]) -> dict | None:
            if to in map(peer, HONEST[:5]):
                await asyncio.sleep(3600)
            return await answer(to, keys)

        network.call_find = call_find
        began = time.monotonic()
        assert await network.get() is not None
        assert time.monotonic() - began <= searches.SEARCH_SECONDS + searches.LAST_SECONDS + 0.1

    met.add([peer(HONEST[0])])
    run_in_virtual_time(get, monkeypatch)


def test_a_node_that_stands_nearer_with_each_answer_is_asked_a_few_times():
    """It is in no table, where it would have one place."""
    distances = itertools.count(2**90, -1)
    network = Network([*HONEST[:6], "another liar"], lambda: {next_to_key(next(distances)): peer("liar")})
    asyncio.run(asyncio.wait_for(network.get(), 10))
    assert 0 < network.asked["liar"] <= PLACES


def test_one_search_hears_of_all_nodes_however_few_it_knew():
    network = Network(HONEST[:1], dict)
    found = asyncio.run(asyncio.wait_for(network.node.find_nearest_nodes([KEY]), 10))
    assert len(HONEST) > NEW_PEERS + 1, "more than one answer tells of"
    assert set(found[KEY].values()) >= {peer(name) for name in HONEST}


def test_a_false_statement_about_a_node_does_not_hide_it():
    """A stranger that is heard first says that the nodes with the record stand far away."""

    def far_away() -> Answer:
        return {DHTID(int(place(name)) ^ 2**159): peer(name) for name in HONEST[6:]}

    network = Network([*HONEST[:3], "liar"], far_away)
    found = asyncio.run(asyncio.wait_for(network.node.find_nearest_nodes([KEY]), 10))
    assert set(found[KEY]) >= {place(name) for name in HONEST}


@pytest.fixture
def options(monkeypatch) -> dict[str, object]:
    """The options with which a peer of this program starts Hivemind's node."""
    given = {}

    def start(**options) -> None:
        given.update(options)
        raise InputError("no node is started")

    monkeypatch.setattr(dht_options, "SwarmDHT", start)
    with pytest.raises(InputError, match="no node is started"):
        dht_options.start_dht(NetworkOptions(host_maddrs=("/ip4/127.0.0.1/tcp/0",)))
    return given


def keep_results_as(network: Network, options: dict[str, object]) -> None:
    """Have the node that searches keep and pass on results as one that is started with these options."""
    by_default = inspect.signature(DHTNode.create).parameters
    for name in ("cache_locally", "cache_nearest", "cache_on_store"):
        setattr(network.node, name, options.get(name, by_default[name].default))


def test_what_a_search_has_found_is_sent_to_no_other_node(options):
    """All records of a key went to a node next to it after each search, and each node of this program refuses them."""
    network = Network(HONEST[:6], dict, has_record=[HONEST[5]])
    keep_results_as(network, options)

    async def look() -> None:
        assert await network.get() is not None
        await asyncio.sleep(0)  # for what the search has begun at its end

    asyncio.run(asyncio.wait_for(look(), 10))
    assert not network.stored


def test_a_false_end_of_what_a_search_has_found_hides_no_record_that_is_stored_later(options):
    """An empty answer that claims to stay for an hour was given on for that hour, in place of all stored records."""
    network = Network(["liar"], dict)
    keep_results_as(network, options)

    async def call_find(to: PeerID, keys: Sequence[DHTID]) -> dict:
        return {key: (ValueWithExpiration(DictionaryDHTValue(), get_dht_time() + 3599), {}) for key in keys}

    async def ignore(*_) -> None:
        """Remember no caller."""

    async def answer() -> dht_pb2.FindResponse:
        await network.get()
        network.storage.store(KEY, b"manifest", get_dht_time() + 60, subkey=b"owner")
        question = dht_pb2.FindRequest(keys=[KEY.to_bytes()])
        return await nodes.rpc_find(network, question, SimpleNamespace(remote_id=peer("newcomer")))

    network.call_find, network.rpc_ping, network.node_info = call_find, ignore, dht_pb2.NodeInfo()
    (result,) = asyncio.run(asyncio.wait_for(answer(), 10)).results
    assert [owner for owner, _ in MSGPackSerializer.loads(result.value).items()] == [b"owner"]
