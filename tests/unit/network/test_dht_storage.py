"""A DHT node keeps what it knows, and no more than it can bear, whatever callers ask it to store."""

import asyncio
import random
import time
import tracemalloc
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey

from recipe.presets import digits
from swarm.membership.run_manifest import PROTOCOL, RunManifest
from swarm.network import dht_storage
from swarm.network.dht_storage import (
    MAX_KEY_BYTES,
    MAX_MANIFESTS,
    MAX_OTHER_RUNS,
    MAX_RECORDS,
    BoundedStorage,
    KnownKeys,
)
from swarm.network.record_push import PushedHere
from swarm.network.signed_records import MAX_MANIFEST_VALUE_BYTES, RUNS_ID, OwnedRecords, peer_of
from tests.helpers.owners import subkey_of

pytestmark = pytest.mark.timeout(60)
KEY = RSAPrivateKey()


def manifest(run_id: str) -> RunManifest:
    return RunManifest(PROTOCOL, run_id, digits())


def signed(run_id: str) -> bytes:
    return MSGPackSerializer.dumps(manifest(run_id).to_bytes()) + b"[signature:c2lnbmVk]"


@cache
def key_of(run_id: str, kind: str = "progress") -> DHTID:
    return DHTID.generate(source=f"{manifest(run_id).key_prefix}.{kind}")


class Node:
    """A node's storage, without a network."""

    def __init__(self):
        self.records = OwnedRecords(KEY)
        self.storage = BoundedStorage(KnownKeys(self.records))
        self.own = self.records.local_public_key

    def stores(self, key: DHTID, name: str, value: bytes = b"value", seconds: float = 60.0) -> bool:
        return self.storage.store(key, value, time.time() + seconds, subkey=subkey_of(name))

    def writes(self, key: DHTID, value: bytes = b"value") -> bool:
        """Whether the node stores a record of its own."""
        self.records.written.add(key.to_bytes())
        return self.storage.store(key, value, time.time() + 60, subkey=self.own)

    def has(self, key: DHTID, name: str) -> bool:
        found = self.storage.get(key)
        return found is not None and subkey_of(name) in found.value


@pytest.fixture
def node():
    return Node()


def test_only_known_keys_are_stored(node):
    assert not node.stores(DHTID.generate(source="anything"), "anna")
    assert not node.stores(key_of("run"), "anna")
    assert node.stores(RUNS_ID, "organiser", signed("run"))
    assert node.stores(key_of("run"), "anna"), "a node that trains nothing keeps the records of a run"
    assert node.stores(key_of("run", "addresses"), "anna")
    assert not node.stores(key_of("run", "anything"), "anna")
    assert node.writes(key_of("own"))
    assert node.stores(key_of("own"), "anna")


def test_a_run_is_known_as_long_as_its_manifest(node, monkeypatch):
    assert node.stores(RUNS_ID, "organiser", signed("run"), seconds=60)
    assert node.stores(key_of("run"), "anna")
    later = time.time() + 61
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", lambda: later)
    monkeypatch.setattr(dht_storage, "get_dht_time", lambda: later)
    assert not node.storage.store(key_of("run"), b"value", later + 60, subkey=subkey_of("ben"))


def test_manifests_of_strangers_make_no_more_runs_known(node):
    for number in range(MAX_OTHER_RUNS + 5):
        assert node.stores(RUNS_ID, f"organiser {number}", signed(f"run{number}"))
    known = [node.stores(key_of(f"run{number}"), "anna") for number in range(MAX_OTHER_RUNS + 5)]
    assert known == [True] * MAX_OTHER_RUNS + [False] * 5
    assert node.writes(key_of("own"))
    assert node.writes(RUNS_ID, signed("own"))
    assert node.stores(key_of("own"), "anna"), "the own run is known besides"


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 60_000, b"null", b'{"run_id": 7, "fingerprint": "0123456789"}'])
def test_a_manifest_that_makes_no_sense_makes_no_run_known(node, content):
    assert node.stores(RUNS_ID, "liar", MSGPackSerializer.dumps(content))
    assert node.stores(RUNS_ID, "liar 2", b"\xc1")
    assert node.storage.known.until == {}


def test_ten_thousand_records_of_strangers_push_out_no_known_record(node):
    key = key_of("run")
    assert node.writes(key)
    assert node.stores(key, "anna"), "an honest newcomer"
    began = time.perf_counter()
    stored = sum(node.stores(key, f"stranger {number}") for number in range(10_000))
    assert time.perf_counter() - began < 20
    assert stored == MAX_RECORDS - 2
    node.records.met.add([peer_of(subkey_of("ben"))])
    assert node.stores(key, "ben"), "an acquaintance has room all the same"
    assert node.writes(key, b"newer")
    assert node.has(key, "anna")
    assert node.has(key, "ben")
    assert len(node.storage.get(key).value) == MAX_RECORDS
    assert node.stores(key, "stranger 0", b"newer", seconds=90), "a peer that is there already can go on"


def test_bytes_are_bounded_and_an_answer_gets_through(node):
    rng = random.Random(0)
    for number in range(200):
        node.stores(RUNS_ID, f"liar {number}", rng.randbytes(MAX_MANIFEST_VALUE_BYTES))
    assert node.writes(RUNS_ID, signed("own")), "the own manifest is stored all the same"
    node.records.met.add([peer_of(subkey_of("organiser"))])
    assert node.stores(RUNS_ID, "organiser", rng.randbytes(MAX_MANIFEST_VALUE_BYTES))
    assert node.has(RUNS_ID, "organiser")
    assert node.own in node.storage.get(RUNS_ID).value
    answer = MSGPackSerializer.dumps(node.storage.get(RUNS_ID).value)
    assert MAX_KEY_BYTES / 2 < len(answer) < 2**22 - 2**16


def test_many_small_manifests_are_no_more_than_a_thousand(node):
    assert (
        sum(node.stores(RUNS_ID, f"{number}", signed("run")) for number in range(MAX_MANIFESTS + 50)) == MAX_MANIFESTS
    )


def test_two_thousand_honest_peers_have_room(node):
    key = key_of("run")
    node.records.written.add(key.to_bytes())
    assert all(node.stores(key, f"peer {number}", bytes(450)) for number in range(MAX_RECORDS))
    assert all(node.stores(key, f"peer {number}", bytes(450), seconds=61) for number in range(MAX_RECORDS))
    assert len(MSGPackSerializer.dumps(node.storage.get(key).value)) < 2**22 - 2**16


def test_other_runs_share_what_is_left(node):
    for number in range(MAX_OTHER_RUNS):
        assert node.stores(RUNS_ID, f"organiser {number}", signed(f"run{number}"))
    stored = sum(
        2000 * node.stores(key_of(f"run{run}", kind), f"stranger {number}", bytes(2000))
        for run in range(MAX_OTHER_RUNS)
        for kind in ("progress", "addresses")
        for number in range(500)
    )
    assert dht_storage.MAX_OTHERS_BYTES / 2 < stored <= dht_storage.MAX_OTHERS_BYTES


def test_a_flood_of_progress_records_does_not_stay(node):
    assert node.stores(RUNS_ID, "organiser", signed("run"))
    assert not node.stores(key_of("run"), "stranger", seconds=600)
    assert node.stores(key_of("run"), "stranger", seconds=60)
    assert node.stores(key_of("run", "addresses"), "stranger", seconds=600)


def test_renewals_leave_nothing_behind(node):
    key = key_of("run")
    node.records.written.add(key.to_bytes())
    assert node.stores(key, "anna", b"value", seconds=60)
    tracemalloc.start()
    try:
        for number in range(10_000):
            assert node.stores(key, "anna", b"value", seconds=60 + number / 1000)
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()


def test_an_older_record_that_is_sent_again_ends_nothing(node):
    """Otherwise its end would be taken for that of the newer one."""
    key = key_of("run")
    node.records.written.add(key.to_bytes())
    assert node.stores(key, "anna", b"new", seconds=60)
    assert not node.stores(key, "anna", b"old", seconds=0.05)
    time.sleep(0.1)
    assert node.has(key, "anna")


def test_what_has_no_owner_is_not_stored(node):
    key, records = key_of("run"), DictionaryDHTValue()
    node.records.written.add(key.to_bytes())
    records.store(subkey_of("anna"), b"value", time.time() + 60)
    for value in (b"value", records):
        assert not node.storage.store(key, value, time.time() + 60)


def test_acquaintances_are_read_first(node):
    key = "run.progress"
    key_id = DHTID.generate(source=key)
    node.records.written.add(key_id.to_bytes())
    for number in range(100):
        assert node.stores(key_id, f"stranger {number}", MSGPackSerializer.dumps("lie"))
    assert node.stores(key_id, "anna", MSGPackSerializer.dumps("truth"))
    node.records.met.add([peer_of(subkey_of("anna"))])
    validator = SimpleNamespace(_validators=[node.records], strip_value=node.records.strip_value)
    protocol = SimpleNamespace(storage=node.storage, serializer=MSGPackSerializer, record_validator=validator)
    found = asyncio.run(PushedHere(key, 10, 2000)(None, SimpleNamespace(protocol=protocol)))
    assert len(found.value) == 10
    assert found.value[subkey_of("anna")].value == "truth"


def test_names_of_runs_stay_apart():
    assert manifest("a.b").key_prefix != manifest("a-b").key_prefix
    assert replace(manifest("a"), recipe=replace(digits(), seed=1)).key_prefix != manifest("a").key_prefix
