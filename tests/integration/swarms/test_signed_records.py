"""No peer can write for another peer, whatever is stored in the DHT."""

import base64
import random
import time
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from recipe.presets import digits
from swarm.membership.progress_record import TRAINING, PeerProgress
from swarm.membership.progress_store import ProgressStore
from swarm.membership.run_manifest import PROTOCOL, RunManifest, publish_manifest, read_manifests
from swarm.network.dht_options import NetworkOptions, start_dht, stop_dht, visible_addresses
from swarm.network.record_push import PushedHere
from swarm.network.signed_records import RUNS_KEY, OwnedRecords, owned_entries, peer_of
from swarm.runtime.token_bucket import TokenBucket
from tests.helpers.owners import Sign, subkey_of

pytestmark = pytest.mark.timeout(60)

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


@pytest.fixture(scope="module")
def dhts():
    """Three nodes that know each other."""
    started = []
    try:
        for _ in range(3):
            peers = tuple(visible_addresses(started[0])) if started else ()
            started.append(start_dht(NetworkOptions(host_maddrs=LOOPBACK, initial_peers=peers)))
        yield started
    finally:
        for dht in reversed(started):
            stop_dht(dht)


def key_of(dhts, run_id: str) -> str:
    """Return a key that all nodes know, since they have its run's manifest."""
    manifest = RunManifest(PROTOCOL, run_id, digits())
    assert publish_manifest(dhts[0], manifest)
    return f"{manifest.key_prefix}.addresses"


def test_records_name_their_writer(dhts):
    later, key = time.time() + 60, key_of(dhts, "who")
    for dht in dhts:
        assert peer_of(dht.owner) == dht.peer_id
        assert dht.store(key, subkey=dht.owner, value=str(dht.peer_id), expiration_time=later)
    for dht in dhts:
        said = dict(owned_entries(dht.get(key, latest=True), 10))
        assert said == {other.peer_id: str(other.peer_id) for other in dhts}


def test_no_peer_writes_for_another_or_without_an_owner(dhts):
    victim, liar, reader = dhts
    later, key = time.time() + 60, key_of(dhts, "mine")
    assert victim.store(key, subkey=victim.owner, value="true", expiration_time=later)
    for subkey in (victim.owner, subkey_of("nobody's"), b"[owner:ssh-rsa AAAA]", b"plain", "text"):
        assert not liar.store(key, subkey=subkey, value="false", expiration_time=later + 1)
    assert not liar.store(key, "false", expiration_time=later + 1)
    assert dict(owned_entries(reader.get(key, latest=True), 10)) == {victim.peer_id: "true"}


@pytest.mark.parametrize(
    ("value", "seconds", "subkey"),
    [
        ((1, b"\xc1"), 60, None),  # a byte that msgpack never uses
        ((0, b""), 60, None),
        ((1, b"\xa5ab"), 60, None),  # five letters are announced, and two come
        ((2, b"\xc4\x01a"), 60, None),  # two values
        ((1, b"\xa1\xff"), 60, None),  # text that is no UTF-8
        ((1, b"\xd4\x40\x00"), 60, None),  # one of Hivemind's own types
        ((60_000, b"\x91"), 60, None),  # lists in lists
        ((2**17, b"a"), 60, None),  # too large
        ((1, b"\xc0"), 7200, None),
        ((1, b"\xc0"), float("nan"), None),
        ((1, b"\xc0"), 60, lambda owner: [owner]),
        ((1, b"\xc0"), 60, lambda owner: owner + b"more"),
    ],
)
def test_an_unreadable_record_is_not_stored(dhts, value, seconds, subkey):
    """Hivemind's readers would wait for ever for such a key."""
    liar, victim, reader = dhts
    key = key_of(dhts, "shared")
    assert victim.store(key, subkey=victim.owner, value="honest", expiration_time=time.time() + 60)
    owner = liar.owner if subkey is None else subkey(liar.owner)
    answers = liar.run_coroutine(Sign(key, owner, value, time.time() + seconds), return_future=True).result(20)
    assert answers == [False, False]
    found = reader.get(key, latest=True, return_future=True).result(20)
    assert dict(owned_entries(found, 10))[victim.peer_id] == "honest"


def test_a_record_that_can_be_read_is_stored(dhts):
    """It is stored in the same way as the records above."""
    liar, _, reader = dhts
    key = key_of(dhts, "readable")
    said = Sign(key, liar.owner, (1, b"\xc3"), time.time() + 60)
    assert liar.run_coroutine(said, return_future=True).result(20) == [True, True]
    assert dict(owned_entries(reader.get(key, latest=True), 10)) == {liar.peer_id: True}
    pushed = reader.run_coroutine(PushedHere(key, 10, 2000), return_future=True).result(20)
    assert dict(owned_entries(pushed, 10)) == {liar.peer_id: True}, "without a search"
    few = PushedHere(key, 10, 100)
    assert reader.run_coroutine(few, return_future=True).result(20).value == {}, "its signature alone is longer"
    assert reader.run_coroutine(PushedHere("something else", 10, 2000), return_future=True).result(20) is None


def test_a_client_mode_peer_does_not_read_earlier_results_of_a_search(dhts):
    """No peer pushes records to a client-mode peer; it has to search, and finds what there is."""
    first, second, _ = dhts
    client = start_dht(NetworkOptions(initial_peers=tuple(visible_addresses(first)), client_mode=True))
    try:
        key = key_of(dhts, "told").replace(".addresses", ".progress")
        boards = [ProgressStore(dht, key) for dht in (first, second, client)]
        for step in range(4):
            for board, name in zip(boards, ("anna", "ben", "cleo"), strict=True):
                now = get_dht_time()
                board.post(PeerProgress(name, step, 0, 0.0, now - 1, now, name == "cleo", TRAINING)).result(20)
            for board in boards:
                assert {record.step for record in board.look().values()} == {step}
        pushed = client.run_coroutine(PushedHere(key, 10, 2000), return_future=True).result(20)
        assert {owner for owner, _ in owned_entries(pushed, 10)} == {client.peer_id}, "its own"
    finally:
        stop_dht(client)


def test_the_inviting_peers_manifest_counts_and_otherwise_that_of_most_peers(dhts):
    organiser, *liars = dhts
    true = RunManifest(PROTOCOL, "run", digits())
    false = RunManifest(PROTOCOL, "run", replace(digits(), learning_rate=1.0))
    for liar in liars:
        assert publish_manifest(liar, false)
    assert publish_manifest(organiser, true)
    invited = visible_addresses(organiser)
    assert read_manifests(liars[0], invited) == {"run": true}
    assert read_manifests(organiser) == {"run": false}
    assert organiser.store(RUNS_KEY, subkey=organiser.owner, value=None, expiration_time=time.time() + 1200)
    assert read_manifests(organiser, invited) == {"run": false}, "the inviting peer has no manifest"


def test_a_public_key_names_the_peer_that_libp2p_names():
    for bits in (2048, 3072, 4096):
        key = rsa.generate_private_key(65537, bits)
        private = key.private_bytes(Encoding.DER, PrivateFormat.TraditionalOpenSSL, NoEncryption())
        file = crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=private).SerializeToString()
        assert peer_of(named(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))) == (
            PeerID.from_identity(file)
        )


def named(ssh_key: bytes) -> bytes:
    return b"[owner:" + ssh_key + b"]"


def ssh_key(exponent: bytes, modulus: bytes) -> bytes:
    fields = (b"ssh-rsa", exponent, modulus)
    return b"ssh-rsa " + base64.b64encode(b"".join(len(field).to_bytes(4, "big") + field for field in fields))


E, N = b"\x01\x00\x01", b"\0" + bytes([0x81] * 256)


@pytest.mark.parametrize(
    "key",
    [
        ssh_key(b"\x03", N),  # one modulus for as many owners as there are exponents
        ssh_key(b"\x01\x00\x03", N),
        ssh_key(b"\0" + E, N),  # the same key once more
        ssh_key(E, b"\0" + N),
        ssh_key(E, N + b"\0"),  # even
        ssh_key(E, b"\0" + N[129:]),  # 1,024 bits
        ssh_key(E, b"\0" + N[1:] * 2 + b"\x81"),  # more than 4,096
        ssh_key(E, N[1:]),  # negative
        ssh_key(E, N) + b"=",
        ssh_key(E, N)[:-1],
        b"ssh-rsa " + base64.b64encode(base64.b64decode(ssh_key(E, N)[8:]) + b"more"),
        ssh_key(E, b""),
    ],
)
def test_a_key_that_is_not_sound_owns_nothing(key):
    assert peer_of(named(ssh_key(E, N))) is not None
    assert peer_of(named(key)) is None


def test_what_strangers_sign_is_checked_so_often_only():
    validator = OwnedRecords(RSAPrivateKey())
    friend, stranger = (OwnedRecords(RSAPrivateKey()) for _ in range(2))
    validator.met.add([friend.own])
    validator.strangers = TokenBucket(2, 0)
    later = time.time() + 60

    def record(owner, number):
        unsigned = DHTRecord(
            b"key", MSGPackSerializer.dumps(owner.local_public_key), MSGPackSerializer.dumps(number), later
        )
        return replace(unsigned, value=owner.sign_value(unsigned))

    said = [record(stranger, number) for number in range(3)]
    assert [validator.validate(each) for each in said * 2] == [True, True, False] * 2, "those that were checked stay so"
    for owner in (friend, validator):
        assert validator.validate(record(owner, 0))


def test_a_subkey_that_would_be_passed_on_in_other_bytes_is_refused():
    """Its signature would be wrong for every reader, which would then discard all that comes with it."""
    validator = OwnedRecords(RSAPrivateKey())
    owner = validator.local_public_key
    for subkey, valid in ((MSGPackSerializer.dumps(owner), True), (b"\xc6" + len(owner).to_bytes(4) + owner, False)):
        record = DHTRecord(b"key", subkey, MSGPackSerializer.dumps("said"), time.time() + 60)
        assert validator.validate(replace(record, value=validator.sign_value(record))) == valid


def test_mutated_subkeys_name_another_peer_or_none():
    random.seed(0)
    good = subkey_of("anna")
    assert isinstance(peer_of(good), PeerID)
    for _ in range(10_000):
        spoiled = bytearray(good)
        for _ in range(random.randint(1, 4)):
            place = random.randrange(len(spoiled))
            spoiled[place : place + random.randint(0, 2)] = random.randbytes(random.randint(0, 3))
        assert peer_of(bytes(spoiled)) is None or peer_of(bytes(spoiled)) != peer_of(good) or spoiled == good
