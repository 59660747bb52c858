"""What a stranger that has only the address cannot do: a run of two trains on while it is attacked.

The attacks are those of `tests/helpers/attacks`. A benchmark measures what takes time. Here no peer adopts false data,
no peer ends, no process dies, and updates go on.
"""

import pytest

from recipe.errors import InputError
from swarm.membership.run_manifest import read_manifests
from swarm.network.reachability import measure_reachability
from tests.helpers.attacks import outsiders
from tests.helpers.attacks.attacked_run import TOGETHER, Attacked, Seen
from tests.helpers.attacks.tools import NAME, check_address
from tests.helpers.cli import reaping, wait_until
from tests.helpers.programs.ports import free_port
from tests.helpers.swarm_peers import Peers, running_dht

pytestmark = pytest.mark.timeout(300)
ATTACK_SECONDS = 240.0
"""Longest duration; an attack ends when the honest peers have made their updates."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with reaping() as programs:
        yield Attacked(tmp_path_factory.mktemp("attacked"), programs)


def stranger(_name, _initial_peers, line, kind, address, sizes):
    outsiders.attack(kind, [address], ATTACK_SECONDS, line.put, **sizes)


def felt(peers: Peers, kind: str, word: str) -> list[str]:
    """Wait until the attack has reported this word; returns all its reports by then."""
    mallory = peers[kind]
    peers.until(lambda: any(word in message for message in mallory.messages))
    return mallory.messages


LIARS = ("claim", "silent-claim", "drip", "false-state", "near-state", "next-state")
"""Attacks that lie about a step. The other attacks leave no name in the log."""


@pytest.mark.parametrize(
    ("kind", "word", "sizes"),
    [
        *[(kind, "says that it is at step", {}) for kind in LIARS],
        ("waiting", "identities were stored", {}),
        ("knock", "knocked 25 times", {}),
        ("streams", "are open", {}),
        ("records", "records were stored", {"count": 500}),
        ("nested-store", "asked 3 times", {}),
        ("unknown-types", "asked 3 times", {}),
        ("nested-answers", "stood in 1 places, 3 times", {}),
        ("places", "stood in 20 places, 3 times", {}),
        ("many-keys", "asked 3 times", {}),
        ("sound-records", "records were stored", {"count": 400, "life_seconds": 30.0}),
    ],
)
def test_a_stranger_harms_no_peer(run, kind, word, sizes):
    run.begin()
    with Peers(timeout_seconds=150) as peers:
        peers.start(kind, stranger, kind, run.address, sizes)
        said = felt(peers, kind, word)
        if kind == "sound-records":
            assert not any(message.startswith("0 of") for message in said), "its records look like those of peers"
        if kind == "records":
            assert any(message.startswith("0 of") for message in said), "no key of its kind is sound"
        run.trains_on(3 * TOGETHER if kind == "sound-records" else TOGETHER)  # they are searched each five seconds only
        if kind in LIARS:
            wait_until(lambda: f"{NAME} {kind}" in run.said(), 90, "the liar is named")
            run.trains_on(3)
        assert len(run.said()) < 100_000, "no flood of lines"
        if kind == "streams":
            for peer, before in zip(run.peers, run.before, strict=True):
                assert Seen.of(peer).files < before.files + 300


def test_what_a_stranger_sends_is_bounded(run):
    """60 messages of 7.9 MB, none of which ever ends: 474 MB."""
    run.begin()
    with Peers(timeout_seconds=150) as peers:
        peers.start("buffers", stranger, "buffers", run.address, {"count": 60})
        felt(peers, "buffers", "are open")
        run.trains_on()
        assert Seen.of(run.peers[0]).bytes < run.before[0].bytes + 200 * 2**20


def newcomer(_name, _initial_peers, line, address):
    with running_dht((address,), line) as dht:
        return {run_id: manifest.key_prefix for run_id, manifest in read_manifests(dht, [address]).items()}


def test_a_newcomer_gets_the_run_manifest_of_the_peer_that_it_was_sent_to(run):
    run.begin()
    with Peers(timeout_seconds=150) as peers:
        before = peers.start("before", newcomer, run.address)
        peers.until(lambda: before.finished)
        peers.start("manifests", stranger, "manifests", run.address, {})
        felt(peers, "manifests", "run manifests were stored")
        after = peers.start("after", newcomer, run.address)
        peers.until(lambda: after.finished)
        run.trains_on(3)
    assert list(before.result) == ["live"]
    assert after.result == before.result


def test_a_newcomer_finds_the_run_and_the_run_goes_on_although_a_node_names_others_without_end(run):
    run.begin()
    with Peers(timeout_seconds=150) as peers:
        before = peers.start("before", newcomer, run.address)
        peers.until(lambda: before.finished)
        peers.start("nearer-names", stranger, "nearer-names", run.address, {})
        felt(peers, "nearer-names", "stood in 1 places, 5 times")
        after = peers.start("after", newcomer, run.address)
        peers.until(lambda: after.finished)
        run.trains_on(3 * TOGETHER)  # records are searched each five seconds only, and forgotten after fifteen
    assert list(after.result) == list(before.result) == ["live"]


def test_a_newcomer_is_called_back_although_a_stranger_is_called_all_the_time(run):
    run.begin()
    with Peers(timeout_seconds=150) as peers:
        peers.start("callbacks", stranger, "callbacks", run.address, {})
        felt(peers, "callbacks", "called back")
        assert measure_reachability([run.address], free_port()).mode == "server-mode"
        run.trains_on(3)


def test_no_peer_is_a_relay_for_strangers(run):
    run.begin()
    with Peers(timeout_seconds=150) as peers:
        peers.start("relay", stranger, "relay", run.address, {})
        messages = felt(peers, "relay", "relay")
        run.trains_on(3)
    assert not any("reserved" in message for message in messages)


@pytest.mark.parametrize("host", ["8.8.8.8", "192.168.1.7", "10.77.0.1", "example"])
def test_addresses_outside_loopback_and_lab_are_not_attacked(host):
    with pytest.raises(InputError):
        check_address(f"/ip4/{host}/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N")
