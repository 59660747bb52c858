"""Records of the DHT, join lines, requests to enrol, log-ins at the desk, and answers of routers: read or refused."""

import asyncio
import json
import struct
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from async_upnp_client.client import HttpRequest, HttpResponse
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey
from hypothesis import example, given
from hypothesis import strategies as some

from recipe.errors import InputError
from recipe.presets import digits
from swarm.desk.organiser.login import Login
from swarm.enrolment.join_line import SCHEME, JoinLine, is_join_line
from swarm.enrolment.messages import EnrolAnswer, EnrolRequest, Server
from swarm.membership.run_manifest import PROTOCOL, RunManifest
from swarm.network.dht_bounds import decoding
from swarm.network.dht_storage import BoundedStorage, KnownKeys, store_requested
from swarm.network.home.nat_pmp import answer_in, lease_in
from swarm.network.home.router import RouterRefuses
from swarm.network.home.upnp import GatewayRequester, UpnpRouter, location_in
from swarm.network.signed_records import KINDS, RUNS_KEY, OwnedRecords
from swarm.protocol.admission import Admission
from swarm.protocol.certificates import Authority, Signer
from tests.helpers.owners import Organiser
from tests.helpers.strangers.fuzzing import TIMES, damaged, json_junk, junk, messages, often, refused
from tests.helpers.strangers.home_routers import Gateway

pytestmark = pytest.mark.timeout(300 * TIMES)
KEYS = [RSAPrivateKey() for _ in range(2)]


# ---- the DHT ---------------------------------------------------------------------------------------------------------

ENCODED = MSGPackSerializer.dumps((b"owner", 7, {"key": [2.5, None]}))


@often(400)
@given(messages(MSGPackSerializer.dumps([b"owner", 7])) | damaged(ENCODED))
@example(ENCODED)
def test_what_hivemind_encodes(data):
    refused(decoding.loads, data)


ORGANISER, PREFIX = Organiser("run"), "run-1~abc"
MANIFEST = RunManifest(PROTOCOL, "run", digits()).signed_by(ORGANISER.signer).to_bytes()
keys = some.sampled_from([RUNS_KEY, *(f"{PREFIX}.{kind}" for kind in KINDS)]).map(
    lambda key: DHTID.generate(source=key)
)


def node() -> SimpleNamespace:
    """The DHT node of a member, without a network."""
    records = OwnedRecords(KEYS[0])
    records.take_part(Admission(ORGANISER.authority), PREFIX)
    return SimpleNamespace(
        storage=BoundedStorage(KnownKeys(records)),
        serializer=MSGPackSerializer,
        record_validator=CompositeValidator([records]),
        IS_DICTIONARY="dictionary",
    )


NODE, SIGNER = node(), OwnedRecords(KEYS[1])
SUBKEY = MSGPackSerializer.dumps(SIGNER.local_public_key)


encoded = MSGPackSerializer.dumps


def signed_record(key: bytes, content: bytes, expiration: float) -> bytes:
    return SIGNER.sign_value(DHTRecord(key, SUBKEY, content, expiration))


@often(400)
@given(
    keys.map(DHTID.to_bytes) | some.binary(max_size=30),
    some.just(SUBKEY) | damaged(SUBKEY) | junk.map(encoded),
    some.just(encoded(MANIFEST)) | messages(encoded([b"value"])) | damaged(MANIFEST),
    some.sampled_from([60.0, 1e9, -1.0, float("nan"), float("inf")]),
    some.booleans(),
)
def test_records(key, subkey, content, seconds, is_signed):
    expiration = time.time() + seconds
    value = signed_record(key, content, expiration) if is_signed and len(key) == 20 else content
    request = dht_pb2.StoreRequest(
        keys=[key], subkeys=[subkey], values=[value], expiration_time=[expiration], in_cache=[False]
    )
    refused(lambda request: asyncio.run(store_requested(NODE, request)), request)
    assert NODE.record_validator.validate(DHTRecord(key, subkey, value, expiration)) in (True, False)


@often(200)
@given(some.dictionaries(some.binary(max_size=20), some.binary(max_size=60), max_size=3), some.binary(max_size=60))
def test_dictionaries_of_records(entries, data):
    found = DictionaryDHTValue()
    for subkey, value in entries.items():
        found.store(subkey, value, time.time() + 60)
    for value in (MSGPackSerializer.dumps(found), data):
        request = dht_pb2.StoreRequest(
            keys=[DHTID.generate(source=f"{PREFIX}.progress").to_bytes()],
            subkeys=[NODE.IS_DICTIONARY.encode()],
            values=[value],
            expiration_time=[time.time() + 60],
            in_cache=[False],
        )
        refused(lambda request: asyncio.run(store_requested(NODE, request)), request)


@often(200)
@given(some.sampled_from([*json.loads(MANIFEST)]), json_junk, damaged(MANIFEST) | junk)
def test_manifests_that_name_runs(field, value, data):
    known = KnownKeys(OwnedRecords(KEYS[0]))
    for manifest in (json.dumps(json.loads(MANIFEST) | {field: value}), data):
        known.note_manifest(manifest, time.time() + 60)
    assert len(known.until) <= 2


# ---- becoming a member -----------------------------------------------------------------------------------------------

LINE = JoinLine("run", bytes(32), (f"/ip4/203.0.113.5/tcp/1/p2p/Qm{'Y' * 44}",), bytes(16), 31338, bytes(16))


@some.composite
def damaged_lines(draw) -> str:
    text = list(str(LINE))
    for _ in range(draw(some.integers(1, 3))):
        place = draw(some.integers(0, len(text)))
        text[place : place + draw(some.integers(0, 3))] = draw(some.text(max_size=3))
    return "".join(text)


@often(400)
@given(damaged_lines() | some.text(max_size=90).map(lambda text: SCHEME + text))
@example(str(LINE))
def test_join_lines(text):
    is_join_line(text)
    if not refused(JoinLine.parse, text, InputError):
        assert JoinLine.parse(text) == LINE


SERVER = Server(bytes(32), bytes(16))
REQUEST = EnrolRequest.signed(KEYS[1], SERVER, bytes(16), "ada").to_bytes()
ANSWER = EnrolAnswer(b"certificate", b"removals").to_bytes()


@often(400)
@given(messages(REQUEST))
@example(REQUEST)
def test_requests_to_enrol(data):
    if not refused(lambda data: EnrolRequest.from_bytes(data).check(SERVER), data):
        read, true = EnrolRequest.from_bytes(data), EnrolRequest.from_bytes(REQUEST)
        assert replace(read, signature=b"") == replace(true, signature=b"")  # base64 has several ways to say it


@often(200)
@given(messages(ANSWER))
@example(ANSWER)
def test_answers_to_them(data):
    refused(EnrolAnswer.from_bytes, data)


# ---- the desk --------------------------------------------------------------------------------------------------------

HER_KEY = Signer(Ed25519PrivateKey.generate())
LOGIN = Login("run", "https://desk.example", "0123456789abcdef", int(time.time())).signed_by(HER_KEY)


@often(300)
@given(messages(LOGIN))
def test_log_ins(data):
    authority = Authority("run", HER_KEY.public_key)
    if not refused(lambda data: Login.read(data, authority, time.time()), data):
        assert Login.read(data, authority, time.time()).challenge == "0123456789abcdef"


# ---- the router of a home --------------------------------------------------------------------------------------------

PMP = struct.pack("!BBHIHHI", 0, 130, 0, 7, 31337, 31338, 3600)


@often(400)
@given(some.binary(max_size=64) | damaged(PMP))
@example(PMP)
def test_answers_of_nat_pmp(data):
    def lease(data: bytes) -> None:
        if (answer := answer_in(data, 2, 8)) is not None:
            port, seconds = lease_in(answer, 31337)
            assert 0 < port < 2**16
            assert seconds > 0

    refused(lease, data, RouterRefuses)


FOUND = (
    b"HTTP/1.1 200 OK\r\nCACHE-CONTROL: max-age=120\r\nST: urn:schemas-upnp-org:device:InternetGatewayDevice:1\r\n"
    b"USN: uuid:1::urn:schemas-upnp-org:device:InternetGatewayDevice:1\r\nEXT:\r\nSERVER: a UPnP/1.1 b\r\n"
    b"LOCATION: http://192.168.1.1:5000/root.xml\r\n\r\n"
)


@often(300)
@given(damaged(FOUND) | some.binary(max_size=200))
@example(FOUND)
def test_answers_to_a_search_for_routers(data):
    found = location_in(data, ("192.168.1.1", 1900))
    assert found is None or found.startswith("http://192.168.1.1")


class Told(GatewayRequester):
    """A requester that gets these answers of a router, document by document."""

    def __init__(self, documents: dict[str, tuple[int, str]]):
        super().__init__("192.168.1.1")
        self._documents = documents

    async def async_http_request(self, http_request: HttpRequest) -> HttpResponse:
        path = http_request.url.removeprefix("http://192.168.1.1:5000")
        return HttpResponse(*_with_headers(self._documents.get(path, (404, ""))))


def _with_headers(document: tuple[int, str]) -> tuple[int, dict, str]:
    return document[0], {}, document[1]


HOME = Gateway()
DOCUMENTS = {path: HOME.answer(path, "") for path in ("/root.xml", "/scpd.xml")}
DOCUMENTS["/control"] = HOME.act("GetExternalIPAddress", {})


@some.composite
def descriptions(draw) -> dict[str, tuple[int, str]]:
    """True documents with damage in one of them, by letters or whole elements."""
    path = draw(some.sampled_from([*DOCUMENTS]))
    status, text = DOCUMENTS[path]
    pieces = text.replace(">", ">\n").split("\n") if draw(some.booleans()) else list(text)
    for _ in range(draw(some.integers(1, 3))):
        place = draw(some.integers(0, len(pieces)))
        pieces[place : place + draw(some.integers(0, 3))] = draw(
            some.lists(some.sampled_from(pieces) | some.text(max_size=9), max_size=2)
        )
    return DOCUMENTS | {path: (draw(some.sampled_from([status, 200, 500])), "".join(pieces))}


@often(200)
@given(descriptions())
@example(DOCUMENTS)
def test_descriptions_of_routers(documents):
    found = asyncio.run(UpnpRouter.at("http://192.168.1.1:5000/root.xml", "192.168.1.7", Told(documents)))
    assert found is None or found.external_host.count(".") == 3
    if documents == DOCUMENTS:
        assert found.external_host == HOME.external_host
