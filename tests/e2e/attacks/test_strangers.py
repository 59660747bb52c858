"""What a stranger cannot do any more: a run of two trains on while somebody attacks it who has only the address.

The attacks are those of `tests/helpers/attacks`. What takes time is measured by a benchmark; here nobody adopts what is
false, nobody ends, no process dies, updates go on.
"""

import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

from recipe.errors import InputError
from recipe.run_folder import read_metrics
from swarm.membership.run_manifest import read_manifests
from swarm.network.reachability import measure_reachability
from tests.helpers.attacks import outsiders
from tests.helpers.attacks.rounds_under_attack import assert_few_failed
from tests.helpers.attacks.tools import NAME, check_address
from tests.helpers.cli import PACED, TINY, PeerProgram, reaping, wait_until
from tests.helpers.swarm_peers import Peers, running_dht

pytestmark = pytest.mark.timeout(300)
LOOPBACK = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0")
FEW_FILES = ("bash", "-c", 'ulimit -Sn 1024; exec "$@"', "few")
"""Runs a peer with as many open files as a system usually allows."""
SMALL = [*TINY[:-1], "1024"]
"""The model that makes a few updates a second, with half the samples for each."""
TOGETHER = 10
"""Updates of both honest peers that a swarm has to make under attack."""
ATTACK_SECONDS = 120.0
"""At most; it ends when the honest peers have made their updates."""


@dataclass
class Seen:
    """What a peer was like before an attack."""

    lines: int
    output: int
    processes: set[int]
    files: int
    bytes: int

    @classmethod
    def of(cls, peer: PeerProgram) -> "Seen":
        alive = peer.alive()
        files, rss = max(process.num_fds() for process in alive), sum(process.memory_info().rss for process in alive)
        return cls(len(rounds_of(peer)), len(peer.output), {process.pid for process in alive}, files, rss)


def rounds_of(peer: PeerProgram) -> list[dict]:
    return read_metrics(peer.folder.rounds) if peer.folder.rounds.exists() else []


class Attacked:
    """A run of two peers that train on and on; a new one if an earlier attack has ended or divided it."""

    def __init__(self, folder: Path, programs: list):
        self._folder, self._programs, self._runs = folder, programs, 0
        self.peers: list[PeerProgram] = []
        self.healthy = False

    def begin(self) -> "Attacked":
        """Both are there and make updates with each other."""
        if not self.healthy:
            for program in self._programs:
                program.reap()
            self._runs += 1
            folder = self._folder / str(self._runs)
            folder.mkdir()
            options = ["--run-id", "live", "--total-steps", "100000", "--validate-every-steps", "100000", *SMALL]
            first = PeerProgram(folder, "live", "first", *options, *LOOPBACK, prefix=FEW_FILES, **PACED)
            self._programs.append(first)
            second = PeerProgram(
                folder, "live", "second", "--initial-peers", first.address, *LOOPBACK, prefix=FEW_FILES, **PACED
            )
            self._programs.append(second)
            self.peers = [first, second]
            for peer in self.peers:
                peer.wait_until(lambda peer=peer: len(self._together(peer, 0)) >= 3, "updates with the other peer")
        self.healthy = False  # until an attack has done no harm
        self.before = [Seen.of(peer) for peer in self.peers]
        return self

    @property
    def address(self) -> str:
        return self.peers[0].address

    @staticmethod
    def _together(peer: PeerProgram, since: int) -> list[dict]:
        return [line for line in rounds_of(peer)[since:] if line["outcome"] == "averaged" and line["group_size"] == 2]

    def trains_on(self, updates: int = TOGETHER) -> None:
        """Both make so many further updates together, and nothing of what should not happen has happened."""
        begin = [len(rounds_of(peer)) for peer in self.peers]
        for peer, since in zip(self.peers, begin, strict=True):
            peer.wait_until(lambda p=peer, s=since: len(self._together(p, s)) >= updates, "updates under attack", 60)
        for peer, before in zip(self.peers, self.before, strict=True):
            lines = rounds_of(peer)[before.lines :]
            assert_few_failed(line["outcome"] for line in lines)
            assert max(line["step"] for line in lines) < outsiders.FALSE_STEP / 10
            assert before.processes <= {process.pid for process in peer.alive()}, peer.output
            assert not peer.status.ended, peer.output
            said = peer.output[before.output :]
            assert "Took over step" not in said, said
        self.healthy = True

    def said(self) -> str:
        """What both have said since the attack began."""
        return "".join(peer.output[seen.output :] for peer, seen in zip(self.peers, self.before, strict=True))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with reaping() as programs:
        yield Attacked(tmp_path_factory.mktemp("attacked"), programs)


def stranger(_name, _initial_peers, line, kind, address, sizes):
    outsiders.attack(kind, [address], ATTACK_SECONDS, line.put, **sizes)


def felt(peers: Peers, kind: str, word: str) -> list[str]:
    """Wait until the attack has said so; what it has said by then."""
    mallory = peers[kind]
    peers.until(lambda: any(word in message for message in mallory.messages))
    return mallory.messages


LIARS = ("claim", "silent-claim", "drip", "false-state", "near-state", "next-state")
"""Whose lie is a step; what the others do has no author."""


@pytest.mark.parametrize(
    ("kind", "word", "sizes"),
    [
        *[(kind, "says that it is at step", {}) for kind in LIARS],
        ("waiting", "identities were stored", {}),
        ("knock", "knocked 50 times", {}),
        ("streams", "are open", {}),
        ("sound-records", "records were stored", {}),
        ("records", "records were stored", {"count": 2500}),
        ("nested-store", "asked 5 times", {}),
        ("unknown-types", "asked 5 times", {}),
        ("nested-answers", "stood in 1 places, 5 times", {}),
        ("places", "stood in 20 places, 5 times", {}),
        ("many-keys", "asked 5 times", {}),
    ],
)
def test_a_stranger_harms_nobody(run, kind, word, sizes):
    run.begin()
    with Peers(timeout_seconds=60) as peers:
        peers.start(kind, stranger, kind, run.address, sizes)
        felt(peers, kind, word)
        run.trains_on(3 * TOGETHER if "records" in kind else TOGETHER)  # they are searched each five seconds only
        if kind in LIARS:
            wait_until(lambda: f"{NAME} {kind}" in run.said(), 30, "the liar is named")
            run.trains_on(3)
        assert len(run.said()) < 100_000, "no flood of lines"
        if kind == "streams":
            for peer, before in zip(run.peers, run.before, strict=True):
                assert Seen.of(peer).files < before.files + 300


def test_what_a_stranger_sends_is_bounded(run):
    """60 messages of 7.9 MB, none of which ever ends: 474 MB."""
    run.begin()
    with Peers(timeout_seconds=90) as peers:
        peers.start("buffers", stranger, "buffers", run.address, {"count": 60})
        felt(peers, "buffers", "are open")
        run.trains_on()
        assert Seen.of(run.peers[0]).bytes < run.before[0].bytes + 200 * 2**20


def newcomer(_name, _initial_peers, line, address):
    with running_dht((address,), line) as dht:
        return {run_id: manifest.key_prefix for run_id, manifest in read_manifests(dht, [address]).items()}


def test_a_newcomer_gets_the_run_manifest_of_the_peer_that_it_was_sent_to(run):
    run.begin()
    with Peers(timeout_seconds=60) as peers:
        before = peers.start("before", newcomer, run.address)
        peers.until(lambda: before.finished)
        peers.start("manifests", stranger, "manifests", run.address, {})
        felt(peers, "manifests", "run manifests were stored")
        after = peers.start("after", newcomer, run.address)
        peers.until(lambda: after.finished)
        run.trains_on(3)
    assert list(before.result) == ["live"]
    assert after.result == before.result


def test_a_newcomer_is_called_back_although_a_stranger_is_called_all_the_time(run):
    run.begin()
    with socket.socket() as free:
        free.bind(("0.0.0.0", 0))
        port = free.getsockname()[1]
    with Peers(timeout_seconds=60) as peers:
        peers.start("callbacks", stranger, "callbacks", run.address, {})
        felt(peers, "callbacks", "called back")
        assert measure_reachability([run.address], port).mode == "full"
        run.trains_on(3)


def test_no_peer_is_a_relay_for_strangers(run):
    run.begin()
    with Peers(timeout_seconds=60) as peers:
        peers.start("relay", stranger, "relay", run.address, {})
        messages = felt(peers, "relay", "relay")
        run.trains_on(3)
    assert not any("reserved" in message for message in messages)


@pytest.mark.parametrize("host", ["8.8.8.8", "192.168.1.7", "10.77.0.1", "example"])
def test_nobody_else_is_attacked(host):
    with pytest.raises(InputError):
        check_address(f"/ip4/{host}/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N")
