"""The run manifest: what strangers may write into it, how a run is chosen, and how it outlives its first publisher."""

import dataclasses
import json
import queue
import threading
import time

import msgpack
import psutil
import pytest

from recipe.errors import InputError
from recipe.presets import digits
from swarm.membership.announcer import Announcer, CallLost
from swarm.membership.run_manifest import (
    MAX_MANIFEST_BYTES,
    PROTOCOL,
    NoAnswerError,
    OtherProtocolError,
    RunManifest,
    check_overrides,
    choose_manifest,
    publish_manifest,
    read_manifests,
)
from swarm.network.dht_options import NetworkOptions, start_dht, stop_dht, visible_addresses
from swarm.network.dht_storage import MAX_MANIFESTS
from swarm.network.known_peers import MAX_REMEMBERED, peer_of_address, read_book, to_remember, write_book
from swarm.network.signed_records import RUNS_KEY, peer_of
from swarm.runtime.processes import descendants
from tests.helpers.cli import wait_until
from tests.helpers.owners import subkey_of

pytestmark = pytest.mark.timeout(60)


def manifest(run_id: str = "mine", **changes) -> RunManifest:
    return RunManifest(PROTOCOL, run_id, dataclasses.replace(digits(), **changes))


def rewritten(**changes) -> bytes:
    return json.dumps({**json.loads(manifest().to_bytes()), **changes}).encode()


@pytest.fixture
def dhts():
    """Two DHT nodes that know each other; nodes that a test adds are stopped as well."""
    started = [start_dht(NetworkOptions(host_maddrs=("/ip4/127.0.0.1/tcp/0",)))]
    try:
        started.append(join(started[0]))
        yield started
    finally:
        for dht in reversed(started):
            stop_dht(dht)


def join(dht):
    peers = tuple(visible_addresses(dht))
    return start_dht(NetworkOptions(host_maddrs=("/ip4/127.0.0.1/tcp/0",), initial_peers=peers))


def expiration(dht) -> float:
    """When the last manifest ends that this node knows; 0 for no manifest."""
    found = dht.get(RUNS_KEY, latest=True)
    return max((entry.expiration_time for entry in found.value.values()), default=0) if found else 0


def test_labels_mean_the_same_for_all(tmp_path):
    begun = manifest().with_classes("cats and dogs", tmp_path)
    assert RunManifest.from_bytes(begun.to_bytes()) == begun
    assert begun.with_classes("cats and dogs", tmp_path) == begun
    with pytest.raises(InputError, match=f"The data in {tmp_path} are not the data of run"):
        begun.with_classes("dogs and cats", tmp_path)
    assert manifest().with_classes("", tmp_path) == manifest(), "of digits there is only one kind"


def test_round_trip_is_small_enough_for_one_atomic_pipe_write():
    assert RunManifest.from_bytes(manifest().to_bytes()) == manifest()
    assert (
        len(manifest().to_bytes()) < 3000
    )  # hivemind's command pipe has several writers, 4096 bytes stay in one piece


def test_key_prefix_tells_runs_and_recipes_apart_without_dots():
    prefixes = {c.key_prefix for c in (manifest("a.b"), manifest("a-b"), manifest("a_b"), manifest("a-b", seed=1))}
    assert len(prefixes) == 4
    assert not any("." in prefix for prefix in prefixes)
    assert manifest("run-1").key_prefix == f"run-1-{digits().fingerprint}"


@pytest.mark.parametrize("run_id", ["", "../up", ".hidden", "a/b", "two words", "x" * 65, "line\nbreak", None, 7])
def test_run_ids_are_plain_names(run_id):
    with pytest.raises(InputError, match="choose another --run-id"):
        manifest(run_id)
    with pytest.raises(InputError):
        RunManifest.from_bytes(rewritten(run_id=run_id))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 60_000,
        b"9" * 60_000,
        b" " * (MAX_MANIFEST_BYTES + 1),
        None,
        "text",
        rewritten(protocol=0),
        rewritten(protocol=True),
        rewritten(protocol="1"),
        rewritten(protocol=float("nan")),
        rewritten(recipe=None),
        rewritten(recipe={}),
        rewritten(fingerprint="0" * 16),
        rewritten(fingerprint=None),
    ],
)
def test_malformed_manifests(data):
    with pytest.raises(InputError) as caught:
        RunManifest.from_bytes(data)
    assert not isinstance(caught.value, OtherProtocolError)


def test_a_newer_protocol_asks_for_an_update():
    with pytest.raises(OtherProtocolError, match="update it"):
        RunManifest.from_bytes(rewritten(protocol=PROTOCOL + 1, recipe={"unknown": "shape"}))


def test_an_older_protocol_is_not_joined():
    with pytest.raises(OtherProtocolError, match="version that its peers use"):
        RunManifest.from_bytes(rewritten(protocol=PROTOCOL - 1))


def test_choosing_a_run():
    manifests = {"one": manifest("one"), "two": manifest("two")}
    assert choose_manifest({"one": manifests["one"]}, None) == manifests["one"]
    assert choose_manifest(manifests, "two") == manifests["two"]
    with pytest.raises(InputError, match=r"--run-id \(one, two\)"):
        choose_manifest(manifests, None)
    with pytest.raises(InputError, match=r"No run 'three' .* one, two, or leave it out \(python -m swarm\.peer"):
        choose_manifest(manifests, "three")
    with pytest.raises(InputError, match=r"know of no run: .*\(python -m swarm\.peer --recipe"):
        choose_manifest({}, "one")


def test_overrides_that_contradict_the_run_are_shown():
    check_overrides(manifest(), {})
    check_overrides(manifest(), {"target_batch_size": digits().target_batch_size})
    with pytest.raises(InputError) as caught:
        check_overrides(manifest(), {"target_batch_size": 1024, "seed": digits().seed, "optimizer": "sgd"})
    assert "target_batch_size: swarm 512, here 1024; optimizer: swarm adamw, here sgd" in str(caught.value)
    assert "drop the option" in str(caught.value)
    with pytest.raises(InputError, match="no setting 'colour'"):
        check_overrides(manifest(), {"colour": "red"})


def test_the_manifest_outlives_its_first_publisher(dhts):
    first, second = dhts
    assert publish_manifest(first, manifest(), expiration_seconds=5)
    manifests = read_manifests(second)
    assert manifests == {"mine": manifest()}
    announcer = Announcer(second, manifests["mine"], keep_seconds=5, period_seconds=0.75)
    try:
        published = expiration(second)
        stop_dht(first)
        wait_until(lambda: time.time() > published and expiration(second) > published, 20, "the first one's is over")
        dhts.append(join(second))
        assert read_manifests(dhts[-1]) == manifests
    finally:
        announcer.stop()
    ended = expiration(second)
    wait_until(lambda: time.time() > ended, 20, "all have ended")
    assert read_manifests(dhts[-1], timeout_seconds=0) == {}


def test_reading_waits_for_the_first_manifest_and_leaves_out_bad_ones(dhts, caplog):
    first, second = dhts
    assert first.store(RUNS_KEY, subkey=first.owner, value=b"?", expiration_time=time.time() + 60)
    publisher = threading.Timer(0.7, publish_manifest, (second, manifest()))
    publisher.start()
    assert read_manifests(first) == {"mine": manifest()}
    publisher.join()
    (warning,) = (record.getMessage() for record in caplog.records if record.name == "swarm.membership.run_manifest")
    assert warning.startswith("1 run manifest is left out because: The swarm holds a run manifest that cannot be read")


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL + 1])
def test_a_swarm_with_only_manifests_of_another_protocol_does_not_count_as_empty(dhts, protocol):
    first, second = dhts
    addresses = visible_addresses(first)
    assert read_manifests(second, addresses, "mine", timeout_seconds=0.1) == {}
    other = rewritten(protocol=protocol)
    assert first.store(RUNS_KEY, subkey=first.owner, value=other, expiration_time=time.time() + 60)
    with pytest.raises(OtherProtocolError, match=f"The run speaks protocol {protocol}, this program {PROTOCOL}: "):
        read_manifests(second, addresses, "mine", timeout_seconds=0.1)


class BrokenDHT:
    """Publishes nothing, counts the attempts, and returns fixed entries for reads."""

    owner = subkey_of("broken")
    acquaintances = ()

    def __init__(self, entries=None):
        self.failures, self.entries, self.twice = 0, entries, threading.Event()

    def run_coroutine(self, *_, **__):
        self.failures += 1
        if self.failures == 2:
            self.twice.set()
        raise BrokenPipeError("the DHT is gone")

    def get(self, *_, **__):
        return self

    def result(self, *_):
        return self.entries


def test_the_keeper_survives_errors_and_logs_them_once(caplog):
    dht = BrokenDHT()
    announcer = Announcer(dht, manifest(), period_seconds=0.05)
    assert dht.twice.wait(10)
    announcer.stop()
    (warning,) = (record.getMessage() for record in caplog.records if record.name == "swarm.membership.announcer")
    assert "BrokenPipeError" in warning


class CallingDHT(BrokenDHT):
    """Publishes nothing either, and notes the addresses of peers that are to be called if they are lost."""

    peer_id = peer_of(BrokenDHT.owner)

    def __init__(self, entries):
        super().__init__(entries)
        self.called = queue.Queue()

    def run_coroutine(self, coroutine, *_, **__):
        if not isinstance(coroutine, CallLost):
            return super().run_coroutine(coroutine)
        self.called.put(coroutine.addresses)
        return self


def addresses_of(subkey: bytes) -> list[str]:
    return [f"/ip4/203.0.113.5/tcp/{port}/p2p/{peer_of(subkey)}" for port in range(1, 5)]


def test_a_peer_that_the_dht_has_lost_stays_among_many_known_ones_and_is_called(tmp_path):
    entry, owners = dataclasses.make_dataclass("Entry", ["value"]), [subkey_of(f"{number}") for number in range(12)]
    dht = CallingDHT(entry({owner: entry(msgpack.packb(addresses_of(owner))) for owner in owners}))
    book = tmp_path / "peers.json"
    write_book(book, FRIEND)
    announcer = Announcer(dht, manifest(), book=book, period_seconds=0.05)
    called = [dht.called.get(timeout=10) for _ in range(2)]
    announcer.stop()
    for addresses in (*called, read_book(book)):
        peers = set(map(peer_of_address, addresses))
        assert peers == {peer_of_address(*FRIEND), *(str(peer_of(owner)) for owner in owners)}
    assert len(read_book(book)) == MAX_REMEMBERED


def test_both_parts_of_a_divided_swarm_stay_in_the_book():
    owners = [subkey_of(f"{number}") for number in range(24)]
    whole, part = ([address for owner in owners[:size] for address in addresses_of(owner)] for size in (24, 12))
    book = to_remember(whole, [])
    for _ in range(3):
        book = to_remember(part, book)
        assert set(map(peer_of_address, book)) == set(map(peer_of_address, whole))
        assert len(book) == MAX_REMEMBERED
    for crowd in range(2):
        names = [subkey_of(f"stranger {crowd} {number}") for number in range(100)]
        book = to_remember([address for name in names for address in addresses_of(name)], book)
        assert len(book) == MAX_REMEMBERED
        left = len(set(book) & set(whole))
        # The first strangers are missing then, too. A lot of 16 of both has none of these once in 10^8.
        assert left == MAX_REMEMBERED // 2 if crowd == 0 else left > 0


def test_hostile_answers_to_a_read_are_no_manifests():
    entry = dataclasses.make_dataclass("Entry", ["value"])
    own, good = subkey_of("mine"), entry(manifest().to_bytes())
    for value in (None, b"regular value", 7, {own: "no entry"}, {own: entry(7)}, {7: good}, {b"mine": good}):
        assert read_manifests(BrokenDHT(entry(value)), timeout_seconds=0) == {}
    assert read_manifests(BrokenDHT(entry({own: good}))) == {"mine": manifest()}
    crowd = {subkey_of(f"{i}"): entry(manifest(f"run{i}").to_bytes()) for i in range(MAX_MANIFESTS + 20)}
    assert len(read_manifests(BrokenDHT(entry(crowd)))) == MAX_MANIFESTS


def said_by(**manifests: bytes) -> BrokenDHT:
    """Return a DHT in which peers of these names have stored these manifests."""
    entry = dataclasses.make_dataclass("Entry", ["value"])
    return BrokenDHT(entry({subkey_of(name): entry(data) for name, data in manifests.items()}))


FRIEND = [f"/ip4/203.0.113.5/tcp/31337/p2p/{peer_of(subkey_of('friend'))}"]


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL + 1])
def test_a_stranger_keeps_no_peer_from_a_run_by_claiming_that_it_is_of_another_protocol(protocol, caplog):
    other, theirs = rewritten(protocol=protocol), manifest("theirs")
    strangers = said_by(stranger=other, another=other)
    assert read_manifests(strangers, FRIEND, "mine", timeout_seconds=0, may_begin=True) == {}
    assert caplog.messages[-1].startswith("2 run manifests are left out, the first because: The run speaks protocol")
    assert read_manifests(said_by(stranger=other, friend=manifest().to_bytes()), FRIEND, "mine") == {"mine": manifest()}
    assert read_manifests(said_by(stranger=other, peer=manifest().to_bytes()), FRIEND, "mine") == {"mine": manifest()}
    assert read_manifests(said_by(stranger=other, peer=theirs.to_bytes()), FRIEND, "mine") == {"theirs": theirs}
    assert read_manifests(said_by(stranger=other, peer=theirs.to_bytes()), FRIEND) == {"theirs": theirs}


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL + 1])
def test_a_newcomer_that_could_only_join_hears_of_another_protocol_from_any_peer(protocol):
    """Otherwise it would read that there is no run, as where the address is that of a neutral node of the DHT."""
    with pytest.raises(OtherProtocolError, match=f"The run speaks protocol {protocol}, this program {PROTOCOL}: "):
        read_manifests(said_by(peer=rewritten(protocol=protocol)), FRIEND, "mine", timeout_seconds=0)


def test_a_frozen_peer_is_not_taken_for_one_that_knows_of_no_run(dhts):
    first, second = dhts
    addresses = visible_addresses(first)
    frozen = [psutil.Process(first.pid), *descendants(first.pid)]
    for process in frozen:
        process.suspend()
    try:
        with pytest.raises(NoAnswerError, match=r"The peers there do not answer: try again, or ask for another addr"):
            read_manifests(second, addresses, "mine", timeout_seconds=0)
        assert read_manifests(second, addresses, "mine", timeout_seconds=0, may_begin=True) == {}
    finally:
        for process in frozen:
            process.resume()


def test_a_trusted_peers_manifest_ends_a_join_only_where_the_run_cannot_be_joined():
    older, theirs = rewritten(protocol=PROTOCOL - 1), manifest("theirs")
    with pytest.raises(OtherProtocolError):
        read_manifests(said_by(friend=older, peer=theirs.to_bytes()), FRIEND, "mine")
    assert read_manifests(said_by(friend=older, peer=theirs.to_bytes()), FRIEND, "theirs") == {"theirs": theirs}
    assert read_manifests(said_by(friend=older, peer=theirs.to_bytes()), FRIEND) == {"theirs": theirs}
    assert read_manifests(said_by(friend=older, peer=manifest().to_bytes()), FRIEND, "mine") == {"mine": manifest()}
    nameless = rewritten(protocol=PROTOCOL - 1, run_id=None)
    assert read_manifests(said_by(friend=nameless, peer=theirs.to_bytes()), FRIEND) == {"theirs": theirs}


def test_the_inviting_peers_manifest_is_found_behind_any_number_of_others():
    entry = dataclasses.make_dataclass("Entry", ["value"])
    lie = entry(manifest("mine", learning_rate=9.0).to_bytes())
    crowd = {subkey_of(f"liar {number}"): lie for number in range(10_000)}
    crowd[subkey_of("organiser")] = entry(manifest("mine").to_bytes())
    invited = [f"/ip4/203.0.113.5/tcp/31337/p2p/{peer_of(subkey_of('organiser'))}"]
    assert read_manifests(BrokenDHT(entry(crowd)), invited) == {"mine": manifest()}
