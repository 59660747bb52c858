"""Records with forged signatures: what they cost the node that is to store, pass on or read them."""

import asyncio
import base64
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from swarm.network.dht_bounds.calls import ALL_LARGE_BYTES, CALLS, SMALL_BYTES, RunningCalls
from swarm.network.dht_storage import (
    CHECKED_AT_ONCE,
    VAIN_CHECK_RECORDS,
    BoundedStorage,
    KnownKeys,
    store_requested,
)
from swarm.network.hivemind_patches import STORES_AT_ONCE, repair_hivemind
from swarm.network.signed_records import RUNS_ID, OwnedRecords, peer_of
from tests.helpers.owners import subkey_of

repair_hivemind()

KEYS = [RSAPrivateKey() for _ in range(2)]
RUNS = RUNS_ID.to_bytes()
encoded = MSGPackSerializer.dumps


class Node:
    """The part of a DHT node that stores records."""

    node_info = dht_pb2.NodeInfo()

    def __init__(self):
        self.records = OwnedRecords(KEYS[0])
        self.storage = BoundedStorage(KnownKeys(self.records))
        self.record_validator = CompositeValidator([self.records])
        self.serializer, self.IS_DICTIONARY = MSGPackSerializer, DHTProtocol.IS_DICTIONARY

    async def rpc_ping(self, _request: dht_pb2.PingRequest, _context: object) -> None:
        """A node would note the caller that stores something."""


def request_for(values: list[bytes], subkey: bytes) -> dht_pb2.StoreRequest:
    """A request to store these values as manifests of one owner."""
    count, ends = len(values), [time.time() + 60 + number for number in range(len(values))]
    return dht_pb2.StoreRequest(
        keys=[RUNS] * count,
        subkeys=[encoded(subkey)] * count,
        values=values,
        expiration_time=ends,
        in_cache=[False] * count,
    )


def forged(content: bytes) -> bytes:
    """A value with 256 bytes that are no signature."""
    return encoded(content) + b"[signature:" + base64.b64encode(bytes(256)) + b"]"


def dictionary_for(entries: dict[bytes, bytes], key: bytes = RUNS) -> dht_pb2.StoreRequest:
    """A request to store records of many owners at once, as a node hands them over."""
    records, end = DictionaryDHTValue(), time.time() + 60
    for owner, value in entries.items():
        records.store(owner, value, end)
    return dht_pb2.StoreRequest(
        keys=[key],
        subkeys=[DHTProtocol.IS_DICTIONARY],
        values=[encoded(records)],
        expiration_time=[end],
        in_cache=[False],
    )


def stored_by(caller: PeerID, node: Node, request: dht_pb2.StoreRequest) -> list[bool]:
    return list(asyncio.run(DHTProtocol.rpc_store(node, request, SimpleNamespace(remote_id=caller))).store_ok)


@pytest.fixture
def checks(monkeypatch) -> list[bytes]:
    """The data of which signatures have been computed."""
    checked, verify = [], RSAPublicKey.verify

    def noted(key: RSAPublicKey, data: bytes, signature: bytes) -> bool:
        checked.append(data)
        return verify(key, data, signature)

    monkeypatch.setattr(RSAPublicKey, "verify", noted)
    return checked


@pytest.fixture
def node() -> Node:
    return Node()


def test_a_value_that_begins_thousands_of_signatures_is_refused_at_once(node):
    """From each beginning, its end was looked for: 4 s for one record, and a call has sixty."""
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


def test_other_peers_get_their_answers_while_many_records_are_looked_at(node):
    async def turns_of_others() -> int:
        turns = 0
        storing = asyncio.ensure_future(store_requested(node, request_for([b"?"] * 1000, subkey_of("anybody"))))
        while not storing.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(turns_of_others()) >= 1000 // CHECKED_AT_ONCE


STRANGERS = [PeerID(bytes([18, 32, 7, *[number] * 31])) for number in range(3)]
MOST_IN_VAIN = STORES_AT_ONCE // VAIN_CHECK_RECORDS + 30
"""Most checks in vain by one caller. One more comes back each second."""


def test_forged_signatures_cost_their_caller_much(node, checks):
    """In the name of a member, whose records are always checked, thousands were checked."""
    member = subkey_of("a member")
    node.records.met.add([peer_of(member)])
    request = request_for([forged(b"%d" % number) for number in range(500)], member)
    assert not any(stored_by(STRANGERS[0], node, request))
    assert 0 < len(checks) <= MOST_IN_VAIN
    writer = OwnedRecords(KEYS[1])
    record = DHTRecord(RUNS, encoded(writer.local_public_key), encoded(b"manifest"), time.time() + 60)
    honest = request_for([writer.sign_value(record)], writer.local_public_key)
    honest.expiration_time[0] = record.expiration_time
    assert stored_by(STRANGERS[1], node, honest) == [True], "others are not refused for it"


def test_forged_signatures_in_dictionaries_of_records_cost_as_much(node, checks):
    members = [subkey_of(f"member {number}") for number in range(300)]
    node.records.met.add(peer_of(member) for member in members)
    for turn in range(3):
        with suppress(ValueError):  # the caller has stored enough for now
            stored_by(STRANGERS[1], node, dictionary_for({member: forged(b"%d" % turn) for member in members}))
    assert 0 < len(checks) <= MOST_IN_VAIN


def test_records_in_dictionaries_are_counted(node, monkeypatch):
    """Before, they counted as one, so one name had 130,000 of them looked at in a second."""
    looked_at, may_store = [], node.storage.may_store
    monkeypatch.setattr(node.storage, "may_store", lambda *record: looked_at.append(record) or may_store(*record))
    entries = {b"owner %d" % number: b"?" for number in range(2000)}
    for key in (bytes(20), RUNS, RUNS, RUNS, RUNS):
        with suppress(ValueError):
            assert stored_by(STRANGERS[2], node, dictionary_for(entries, key)) == [False]
    assert 4000 <= len(looked_at) <= STORES_AT_ONCE + 1000, "of the first key none is"


def test_a_call_is_answered_while_strangers_hold_large_ones():
    """Otherwise a process would hold 4 GiB of such calls, since names cost nothing."""
    calls, names = RunningCalls(), [b"name %d" % number for number in range(100)]
    large = sum(calls.begin(name, 2**22) for name in names for _ in range(4))
    assert large == ALL_LARGE_BYTES // 2**22
    assert calls.begin(b"a member", SMALL_BYTES)
    assert not calls.begin(b"a member", SMALL_BYTES + 1)
    calls.end(names[0], 2**22)
    assert calls.begin(b"a member", SMALL_BYTES + 1)


def test_one_caller_holds_two_large_calls_and_few_small_ones():
    calls = RunningCalls()
    assert [calls.begin(b"one", 2**22) for _ in range(3)] == [True, True, False]
    assert sum(calls.begin(b"one", 100) for _ in range(2 * CALLS)) == CALLS - 2
    assert calls.begin(b"another", 2**22)
