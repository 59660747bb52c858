"""Thousands of signed records of strangers in the DHT: the run goes on, and an invited peer finds it."""

import itertools
import time
from dataclasses import replace

import hivemind
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from recipe.presets import digits
from swarm.membership.progress_record import TRAINING, PeerProgress
from swarm.membership.progress_store import ProgressStore
from swarm.membership.run_manifest import PROTOCOL, RunManifest, publish_manifest, read_manifests
from swarm.network.dht_options import NetworkOptions, start_dht, stop_dht, visible_addresses
from swarm.network.dht_process import SwarmDHT
from swarm.network.dht_storage import MAX_MANIFESTS, MAX_RECORDS
from swarm.network.signed_records import RUNS_KEY, Meet, OwnedRecords, records_of

pytestmark = pytest.mark.timeout(120)
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
MANIFEST = RunManifest(PROTOCOL, "run", digits())
MANIFESTS, RECORDS = 1200, 2300


def cheap_keys():
    """Keys that look sound, at no cost: each pair of some primes makes one."""
    pairs = [rsa.generate_private_key(65537, 2048).private_numbers() for _ in range(35)]
    for p, q in itertools.combinations([prime for pair in pairs for prime in (pair.p, pair.q)], 2):
        modulus, d = p * q, pow(65537, -1, (p - 1) * (q - 1))
        numbers = rsa.RSAPrivateNumbers(
            p, q, d, d % (p - 1), d % (q - 1), pow(q, -1, p), rsa.RSAPublicNumbers(65537, modulus)
        )
        key = RSAPrivateKey.__new__(RSAPrivateKey)
        key._private_key = numbers.private_key(unsafe_skip_rsa_key_validation=True)
        yield key


class Flood:
    """Asks a node to store records of many owners under one key; runs in the DHT process.

    Returns:
        how many were stored
    """

    def __init__(self, victim: PeerID, key: str, records: list[tuple[bytes, bytes]], expiration_time: float):
        self.victim, self.key, self.records, self.expiration_time = victim, key, records, expiration_time

    async def __call__(self, _dht, node) -> int:
        key, stored = DHTID.generate(source=self.key), 0
        for begin in range(0, len(self.records), 100):
            subkeys, values = zip(*self.records[begin : begin + 100], strict=True)
            ends = [self.expiration_time] * len(subkeys)
            answer = await node.protocol.call_store(self.victim, [key] * len(subkeys), values, ends, subkeys=subkeys)
            stored += sum(answer or [])
        return stored


class Place:
    """Where a node stands in the DHT."""

    async def __call__(self, _dht, node) -> int:
        return int(node.node_id)


class Forget:
    """Makes a peer a stranger to a node."""

    def __init__(self, peer: PeerID):
        self.peer = peer

    async def __call__(self, _dht, node) -> None:
        records_of(node.protocol).met.drop([self.peer])


def signed(key: str, said: bytes, owners: list[OwnedRecords], expiration_time: float) -> list[tuple[bytes, bytes]]:
    """Return records of the same value, one by each owner."""
    records = []
    for owner in owners:
        subkey, value = MSGPackSerializer.dumps(owner.local_public_key), MSGPackSerializer.dumps(said)
        record = DHTRecord(DHTID.generate(source=key).to_bytes(), subkey, value, expiration_time)
        records.append((owner.local_public_key, owner.sign_value(record)))
    return records


def progress(name: str, step: int) -> PeerProgress:
    now = get_dht_time()
    return PeerProgress(name, step, 0, 0.0, now - 1, now, False, TRAINING)


def test_a_flood_of_records_hides_no_known_peer():
    started = [start_dht(NetworkOptions(host_maddrs=LOOPBACK))]
    try:
        organiser, invited = started[0], tuple(visible_addresses(started[0]))
        attacker = start_dht(NetworkOptions(host_maddrs=LOOPBACK, initial_peers=invited))
        started.append(attacker)
        liars = [OwnedRecords(key) for key in itertools.islice(cheap_keys(), RECORDS)]
        later = time.time() + 110
        false = RunManifest(PROTOCOL, "run", replace(digits(), learning_rate=9.0)).to_bytes()
        manifests = signed(RUNS_KEY, false, liars[:MANIFESTS], later)
        stored = attacker.run_coroutine(
            Flood(organiser.peer_id, RUNS_KEY, manifests, later), return_future=True
        ).result(60)
        assert MAX_MANIFESTS / 2 < stored <= MAX_MANIFESTS

        assert publish_manifest(organiser, MANIFEST) in (True, False)  # true if the attacker's node stores it as well
        newcomer = start_dht(NetworkOptions(host_maddrs=LOOPBACK, initial_peers=invited))
        started.append(newcomer)
        assert read_manifests(newcomer, invited) == {"run": MANIFEST}

        key = f"{MANIFEST.key_prefix}.progress"
        boards = [ProgressStore(dht, key) for dht in (organiser, newcomer)]
        lies = signed(key, progress("liar", 10**6).to_bytes(), liars, later)
        stored = attacker.run_coroutine(Flood(organiser.peer_id, key, lies, later), return_future=True).result(60)
        assert MAX_RECORDS / 2 < stored <= MAX_RECORDS

        organiser.meet([newcomer.peer_id])
        for board, name in zip(boards, ("organiser", "newcomer"), strict=True):
            board.post(progress(name, 7)).result(20)  # all places may be taken
        for board, other in zip(boards, (newcomer, organiser), strict=True):
            seen = board.look(search=True)
            assert seen[other.peer_id].step == 7
            assert next(iter(seen)) == other.peer_id, "it is read first"
    finally:
        for dht in reversed(started):
            stop_dht(dht)


@pytest.mark.parametrize("is_stock", [True, False])
def test_a_node_without_a_run_passes_its_records_on(is_stock):
    """Hivemind's own node stores any record that it is given; that does no harm to its other records."""
    started = []
    try:
        node = (
            hivemind.DHT(host_maddrs=LOOPBACK, start=True)
            if is_stock
            else start_dht(NetworkOptions(host_maddrs=LOOPBACK))
        )
        started.append(node)
        invited = tuple(str(address) for address in node.get_visible_maddrs())
        member = start_dht(NetworkOptions(host_maddrs=LOOPBACK, initial_peers=invited))
        started.append(member)
        key, later = f"{MANIFEST.key_prefix}.progress", time.time() + 100
        assert publish_manifest(member, MANIFEST)
        assert ProgressStore(member, key).post(progress("member", 7)).result(20)
        liar = hivemind.DHT(initial_peers=invited, host_maddrs=LOOPBACK, start=True)
        started.append(liar)
        for where in (RUNS_KEY, key):
            garbage = Flood(node.peer_id, where, [(b"garbage", b"\xc1")], later)
            assert liar.run_coroutine(garbage, return_future=True).result(20) == is_stock
        stop_dht(started.pop(1))
        newcomer = start_dht(NetworkOptions(host_maddrs=LOOPBACK, initial_peers=invited))
        started.append(newcomer)
        assert read_manifests(newcomer, invited) == {"run": MANIFEST}
        (seen,) = ProgressStore(newcomer, key).look(search=True).values()
        assert seen.step == 7
    finally:
        for dht in reversed(started):
            stop_dht(dht) if isinstance(dht, SwarmDHT) else dht.shutdown()


def test_a_search_asks_a_met_peer_however_far_from_the_key_it_stands():
    """The search looks at the nearest node only, as at twenty in a large network: that node answers and has nothing."""
    started = [start_dht(NetworkOptions(host_maddrs=LOOPBACK)) for _ in range(2)]
    try:
        keeper, nearer = started
        far, near = (dht.run_coroutine(Place(), return_future=True).result(20) for dht in started)
        names = map("key {}".format, itertools.count())
        key = next(name for name in names if (to := int(DHTID.generate(source=name))) ^ near < to ^ far)
        assert keeper.store(key, subkey=keeper.owner, value=b"here", expiration_time=get_dht_time() + 100)
        invited = (*visible_addresses(keeper), *visible_addresses(nearer))
        newcomer = start_dht(NetworkOptions(host_maddrs=LOOPBACK, initial_peers=invited))
        started.append(newcomer)
        newcomer.run_coroutine(Forget(keeper.peer_id), return_future=True).result(20)
        assert newcomer.get(key, latest=True, beam_size=1) is None, "or the search looks at both"
        newcomer.run_coroutine(Meet([keeper.peer_id]), return_future=True).result(20)
        found = newcomer.get(key, latest=True, beam_size=1)
        assert found is not None
        assert found.value[keeper.owner].value == b"here"
    finally:
        for dht in reversed(started):
            stop_dht(dht)
