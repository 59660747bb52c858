"""Records with signatures that nobody has made: what they cost the node that is to store, pass on or read them."""

import asyncio
import time

import pytest
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey

from swarm.network.dht_storage import CHECKED_AT_ONCE, BoundedStorage, KnownKeys, store_requested
from swarm.network.signed_records import RUNS_ID, OwnedRecords
from tests.helpers.owners import subkey_of

KEYS = [RSAPrivateKey() for _ in range(2)]
RUNS = RUNS_ID.to_bytes()
encoded = MSGPackSerializer.dumps


class Node:
    """As much of a node of the DHT as stores records."""

    def __init__(self):
        self.records = OwnedRecords(KEYS[0])
        self.storage = BoundedStorage(KnownKeys(self.records))
        self.record_validator = CompositeValidator([self.records])
        self.serializer, self.IS_DICTIONARY = MSGPackSerializer, b""


def request_for(values: list[bytes], subkey: bytes) -> dht_pb2.StoreRequest:
    """To store them as manifests of one owner."""
    count, ends = len(values), [time.time() + 60 + number for number in range(len(values))]
    return dht_pb2.StoreRequest(
        keys=[RUNS] * count,
        subkeys=[encoded(subkey)] * count,
        values=values,
        expiration_time=ends,
        in_cache=[False] * count,
    )


@pytest.fixture
def node() -> Node:
    return Node()


def test_a_value_that_begins_thousands_of_signatures_is_refused_at_once(node):
    """From each of them, their end was looked for: 4 s for one record, and a call has sixty."""
    value = encoded(b"[signature:" * 6000)
    record = DHTRecord(RUNS, encoded(subkey_of("anybody")), value, time.time() + 60)
    began = time.process_time()
    assert not node.records.validate(record)
    assert asyncio.run(store_requested(node, request_for([value] * 3, subkey_of("anybody")))) == [False] * 3
    assert time.process_time() - began < 0.5


def test_one_signature_is_what_a_record_has(node):
    writer = OwnedRecords(KEYS[1])
    record = DHTRecord(RUNS, encoded(writer.local_public_key), encoded(b"manifest"), time.time() + 60)
    signed = writer.sign_value(record)
    signature = signed.removeprefix(record.value)
    stored = asyncio.run(
        store_requested(node, request_for([record.value, signed + signature], writer.local_public_key))
    )
    assert stored == [False, False]
    assert node.records.validate(DHTRecord(RUNS, record.subkey, signed, record.expiration_time))


def test_others_get_their_answers_while_many_records_are_looked_at(node):
    async def turns_of_others() -> int:
        turns = 0
        storing = asyncio.ensure_future(store_requested(node, request_for([b"?"] * 1000, subkey_of("anybody"))))
        while not storing.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(turns_of_others()) >= 1000 // CHECKED_AT_ONCE
