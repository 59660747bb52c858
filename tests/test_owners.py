"""Nobody can speak for another peer, whatever is stored in the DHT."""

import random
import time
from dataclasses import replace

import pytest
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from recipe.presets import digits
from swarm.network import NetworkOptions, start_dht, stop_dht, visible_addresses
from swarm.noticeboard import Noticeboard
from swarm.owners import OwnedRecords, owned_entries, peer_of
from swarm.pushes import PushedHere
from swarm.record import TRAINING, PeerProgress
from swarm.run_card import PROTOCOL, RUNS_KEY, RunCard, publish_card, read_cards
from tests.owners import Sign, subkey_of

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


def test_records_say_who_wrote_them(dhts):
    later = time.time() + 60
    for dht in dhts:
        assert peer_of(dht.owner) == dht.peer_id
        assert dht.store("who", subkey=dht.owner, value=str(dht.peer_id), expiration_time=later)
    for dht in dhts:
        said = dict(owned_entries(dht.get("who", latest=True), 10))
        assert said == {other.peer_id: str(other.peer_id) for other in dhts}


def test_nobody_writes_for_another_or_for_nobody(dhts):
    victim, liar, reader = dhts
    later = time.time() + 60
    assert victim.store("mine", subkey=victim.owner, value="true", expiration_time=later)
    for subkey in (victim.owner, subkey_of("nobody's"), b"[owner:ssh-rsa AAAA]", b"plain", "text"):
        assert not liar.store("mine", subkey=subkey, value="false", expiration_time=later + 1)
    assert not liar.store("mine", "false", expiration_time=later + 1)
    assert dict(owned_entries(reader.get("mine", latest=True), 10)) == {victim.peer_id: "true"}


@pytest.mark.parametrize(
    ("value", "seconds", "subkey"),
    [
        ((1, b"\xc1"), 60, None),  # a byte that msgpack never uses
        ((0, b""), 60, None),
        ((1, b"\xa5ab"), 60, None),  # five letters, of which two came
        ((2, b"\xc4\x01a"), 60, None),  # two values
        ((1, b"\xa1\xff"), 60, None),  # text that is none
        ((1, b"\xd4\x40\x00"), 60, None),  # one of Hivemind's own types
        ((60_000, b"\x91"), 60, None),  # lists in lists
        ((2**17, b"a"), 60, None),  # too large
        ((1, b"\xc0"), 7200, None),
        ((1, b"\xc0"), float("nan"), None),
        ((1, b"\xc0"), 60, lambda owner: [owner]),
        ((1, b"\xc0"), 60, lambda owner: owner + b"more"),
    ],
)
def test_a_record_that_nobody_could_read_is_not_stored(dhts, value, seconds, subkey):
    """Of such a key, Hivemind's readers would wait for ever."""
    liar, victim, reader = dhts
    assert victim.store("shared", subkey=victim.owner, value="honest", expiration_time=time.time() + 60)
    owner = liar.owner if subkey is None else subkey(liar.owner)
    answers = liar.run_coroutine(Sign("shared", owner, value, time.time() + seconds), return_future=True).result(20)
    assert answers == [False, False]
    found = reader.get("shared", latest=True, return_future=True).result(20)
    assert dict(owned_entries(found, 10))[victim.peer_id] == "honest"


def test_a_record_that_can_be_read_is_stored(dhts):
    """The same way as those above."""
    liar, _, reader = dhts
    said = Sign("readable", liar.owner, (1, b"\xc3"), time.time() + 60)
    assert liar.run_coroutine(said, return_future=True).result(20) == [True, True]
    assert dict(owned_entries(reader.get("readable", latest=True), 10)) == {liar.peer_id: True}
    pushed = reader.run_coroutine(PushedHere("readable", 10, 2000), return_future=True).result(20)
    assert dict(owned_entries(pushed, 10)) == {liar.peer_id: True}, "without a search"
    few = PushedHere("readable", 10, 100)
    assert reader.run_coroutine(few, return_future=True).result(20).value == {}, "its signature alone is longer"
    assert reader.run_coroutine(PushedHere("something else", 10, 2000), return_future=True).result(20) is None


def test_who_is_told_nothing_does_not_read_what_it_has_found_before(dhts):
    """Nobody pushes records to an outbound-only peer; what it reads is what there is."""
    first, second, _ = dhts
    client = start_dht(NetworkOptions(initial_peers=tuple(visible_addresses(first)), client_mode=True))
    try:
        boards = [Noticeboard(dht, "run.progress") for dht in (first, second, client)]
        for step in range(4):
            for board, name in zip(boards, ("anna", "ben", "cleo"), strict=True):
                now = get_dht_time()
                board.post(PeerProgress(name, step, 0, 0.0, now - 1, now, name == "cleo", TRAINING)).result(20)
            for board in boards:
                assert {record.step for record in board.look().values()} == {step}
        pushed = client.run_coroutine(PushedHere("run.progress", 10, 2000), return_future=True).result(20)
        assert {owner for owner, _ in owned_entries(pushed, 10)} == {client.peer_id}, "its own"
    finally:
        stop_dht(client)


def test_the_word_of_who_invited_counts_and_otherwise_what_most_say(dhts):
    organiser, *liars = dhts
    true = RunCard(PROTOCOL, "run", digits())
    false = RunCard(PROTOCOL, "run", replace(digits(), learning_rate=1.0))
    for liar in liars:
        assert publish_card(liar, false)
    assert publish_card(organiser, true)
    invited = visible_addresses(organiser)
    assert read_cards(liars[0], invited) == {"run": true}
    assert read_cards(organiser) == {"run": false}
    assert organiser.store(RUNS_KEY, subkey=organiser.owner, value=None, expiration_time=time.time() + 1200)
    assert read_cards(organiser, invited) == {"run": false}, "who invited says nothing"


def test_a_subkey_that_would_be_passed_on_in_other_bytes_is_refused():
    """Its signature would be wrong for whoever reads it, and all that comes with it would be thrown away."""
    validator = OwnedRecords(RSAPrivateKey())
    owner = validator.local_public_key
    for subkey, valid in ((MSGPackSerializer.dumps(owner), True), (b"\xc6" + len(owner).to_bytes(4) + owner, False)):
        record = DHTRecord(b"key", subkey, MSGPackSerializer.dumps("said"), time.time() + 60)
        assert validator.validate(replace(record, value=validator.sign_value(record))) == valid


def test_mutated_subkeys_name_a_peer_or_nobody():
    random.seed(0)
    good = subkey_of("anna")
    assert isinstance(peer_of(good), PeerID)
    for _ in range(10_000):
        spoiled = bytearray(good)
        for _ in range(random.randint(1, 4)):
            place = random.randrange(len(spoiled))
            spoiled[place : place + random.randint(0, 2)] = random.randbytes(random.randint(0, 3))
        assert peer_of(bytes(spoiled)) is None or peer_of(bytes(spoiled)) != peer_of(good) or spoiled == good
