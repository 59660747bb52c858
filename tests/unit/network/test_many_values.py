"""Messages of a few bytes that have many values: what they cost a peer that decodes, stores or reads them."""

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace

import msgpack
import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.proto import dht_pb2
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.serializer import MSGPackSerializer

from swarm.network.dht_bounds import decoding
from swarm.network.dht_bounds.decoding import plain
from swarm.network.dht_storage import (
    BYTES_AT_ONCE,
    MAX_KEY_BYTES,
    MAX_RECORDS,
    RECORD_BYTES,
    VAIN_CHECK_RECORDS,
    Allowance,
    BoundedStorage,
    KnownKeys,
    store_requested,
)
from swarm.network.hivemind_patches import STORES_AT_ONCE, repair_hivemind
from swarm.network.signed_records import MAX_SUBKEY_BYTES, RUNS_ID, SIGNATURE_BEGIN, OwnedRecords
from tests.helpers.owners import subkey_of

repair_hivemind()

KEYS = [RSAPrivateKey() for _ in range(2)]
RUNS = RUNS_ID.to_bytes()
encoded = MSGPackSerializer.dumps
MARGIN = 500
"""Factor by which a message may cost more than a text of the same length. Without bounds it was 5,000 and more."""


def lists_of(value: bytes, num_bytes: int) -> bytes:
    """A message of about this many bytes: lists of this value, over and over, in one list."""
    most = min(65_535, num_bytes // len(value))
    one = b"\xdc" + most.to_bytes(2, "big") + value * most
    count = max(1, num_bytes // len(one))
    return b"\xdc" + count.to_bytes(2, "big") + one * count


def as_dictionary(entries: bytes) -> bytes:
    """A dictionary of records, with these entries as the records."""
    return msgpack.packb(msgpack.ExtType(decoding.DICTIONARY, b"\x93\xc0\xc0" + entries))


def text(num_bytes: int) -> bytes:
    return encoded(bytes(num_bytes))


def cost(read: Callable[[bytes], object], message: bytes) -> float:
    """Processor time to read the message, in seconds: the least of a few times."""
    found = []
    for _ in range(5):
        began = time.process_time()
        try:
            read(message)
        except ValueError:
            pass
        found.append(time.process_time() - began)
    return min(found)


@pytest.mark.parametrize("num_bytes", [2**16, 4_000_000])
@pytest.mark.parametrize("value", [b"\x90", b"\x80", b"\xc0", b"\xd4\x40\x90"], ids=["lists", "maps", "none", "tuples"])
def test_many_values_cost_about_what_a_text_of_that_length_costs(value, num_bytes):
    message = lists_of(value, num_bytes)
    usual = cost(plain, text(num_bytes)) + 1e-5
    for read, sent in ((plain, message), (decoding.loads, message), (decoding.loads, as_dictionary(message))):
        assert cost(read, sent) < MARGIN * usual


def test_room_is_made_for_no_more_values_than_there_may_be():
    """Each of these lists, one inside another, announces 65,535 values. For 3 kB, room for 512 MiB was made."""
    message = b"\xdc\xff\xff" * 1000
    assert cost(decoding.loads, message) < 25 * (cost(plain, text(len(message))) + 1e-5)


@pytest.mark.parametrize("value", [[], {}, [b"value"], {"key": b"value"}, (), (1, 2), DictionaryDHTValue()])
def test_the_content_of_a_record_is_a_single_value(value):
    with pytest.raises(ValueError, match="more than a single value"):
        plain(encoded(value))


@pytest.mark.parametrize("value", [None, True, 7, 2.5, "text", b"", b"value"])
def test_a_single_value_is_read_as_hivemind_reads_it(value):
    assert plain(encoded(value)) == decoding.loads(encoded(value)) == value


def test_a_dictionary_of_all_records_that_there_may_be_is_read():
    records = DictionaryDHTValue()
    for number in range(MAX_RECORDS):
        records.store(b"owner %d" % number, bytes(1400), 2e9 + number)
    found = decoding.loads(encoded(records))
    assert dict(found.items()) == dict(records.items())
    assert len(found) == MAX_RECORDS


def test_entries_that_are_no_records_are_left_out_of_a_dictionary():
    """A node of Hivemind passes on whatever a caller has stored there."""
    others = [[1, b"value", 2e9], [b"c", ["value"], 2e9], [b"d", b"value", "late"], [b"e"], b"f", None, [[]] * 3]
    entries = [[b"a", b"value", 2e9], *others, [b"b", b"value", 2e9]]
    found = decoding.loads(as_dictionary(msgpack.packb(entries)))
    assert sorted(owner for owner, _ in found.items()) == [b"a", b"b"]


# ---- a node that is asked to store them ------------------------------------------------------------------------------


class Node:
    """The part of a DHT node that stores records."""

    def __init__(self):
        self.records = OwnedRecords(KEYS[0])
        self.storage = BoundedStorage(KnownKeys(self.records))
        self.record_validator = CompositeValidator([self.records])
        self.serializer, self.IS_DICTIONARY = MSGPackSerializer, DHTProtocol.IS_DICTIONARY
        self.spent = 0

    def store(self, key: bytes, subkeys: list[bytes], values: list[bytes]) -> list[bool]:
        request, allowance = request_for(key, subkeys, values), Allowance(spend=self.spend)
        return asyncio.run(store_requested(self, request, allowance))

    def spend(self, records: int) -> None:
        self.spent += records


def request_for(key: bytes, subkeys: list[bytes], values: list[bytes]) -> dht_pb2.StoreRequest:
    count, end = len(values), time.time() + 60
    return dht_pb2.StoreRequest(
        keys=[key] * count, subkeys=subkeys, values=values, expiration_time=[end] * count, in_cache=[False] * count
    )


@pytest.fixture
def node() -> Node:
    return Node()


def seconds_to_store(*request: object) -> float:
    found = []
    for _ in range(3):
        node, began = Node(), time.process_time()
        assert not any(node.store(*request))
        found.append(time.process_time() - began)
    return min(found)


def test_eight_records_of_many_values_cost_what_eight_texts_cost():
    """A node stood still for a second because of a message of 520 kB."""
    owner, signature = encoded(OwnedRecords(KEYS[1]).local_public_key), SIGNATURE_BEGIN + b"A" * 344 + b"]"
    lists, texts = lists_of(b"\x90", 64_000), text(64_000)
    usual = seconds_to_store(RUNS, [owner] * 8, [texts + signature] * 8)
    for key in (bytes(20), RUNS):
        assert seconds_to_store(key, [lists] * 8, [b"value"] * 8) < 10 * usual + 0.02, "as names of owners"
    assert seconds_to_store(RUNS, [owner] * 8, [lists + signature] * 8) < 10 * usual + 0.02


def test_a_long_name_of_an_owner_is_not_decoded(node, monkeypatch):
    decoded = []
    monkeypatch.setattr("swarm.network.dht_storage.plain", lambda tag: decoded.append(len(tag)) or plain(tag))
    node.store(RUNS, [text(60_000), text(100)], [b"value"] * 2)
    assert decoded
    assert max(decoded) <= MAX_SUBKEY_BYTES


def test_other_tasks_get_their_turn_after_so_many_bytes(node):
    values = [text(60_000)] * 60

    async def turns_of_others() -> int:
        turns = 0
        storing = asyncio.ensure_future(store_requested(node, request_for(RUNS, [text(30)] * 60, values)))
        while not storing.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(turns_of_others()) >= 60 * 60_000 // BYTES_AT_ONCE - 1


def test_a_list_is_not_stored_though_its_owner_has_signed_it(node):
    writer = OwnedRecords(KEYS[1])
    end = time.time() + 60
    for value, is_stored in ((b"value", True), (None, True), ([b"value"], False), ([[]] * 500, False), ({}, False)):
        record = DHTRecord(RUNS, encoded(writer.local_public_key), encoded(value), end)
        signed = writer.sign_value(record)
        assert node.records.validate(DHTRecord(RUNS, record.subkey, signed, end)) == is_stored


def test_a_dictionary_costs_its_caller_what_it_costs_the_node(node):
    """Of thousands of values that are no records, the node counted none."""
    junk = as_dictionary(b"\xdc\x1f\xfe" + b"\x93\xc0\xc0\xc0" * 8190)
    node.store(RUNS, [DHTProtocol.IS_DICTIONARY], [junk])
    assert node.spent >= len(junk) // RECORD_BYTES > 10
    before = node.spent
    node.store(RUNS, [DHTProtocol.IS_DICTIONARY] * 2, [encoded(b"no dictionary"), b"\xc1"])
    assert node.spent >= before + 2 * VAIN_CHECK_RECORDS


def test_a_node_may_hand_over_all_records_of_a_run(node):
    node.record_validator = SimpleNamespace(_validators=[], validate=lambda record: True)
    records, end = DictionaryDHTValue(), time.time() + 60
    for number in range(MAX_RECORDS):
        records.store(subkey_of(f"peer {number}"), bytes(MAX_KEY_BYTES // MAX_RECORDS - 450), end)
    node.records.written.add(bytes(20))
    assert node.store(bytes(20), [DHTProtocol.IS_DICTIONARY], [encoded(records)]) == [True]
    assert node.spent < STORES_AT_ONCE
