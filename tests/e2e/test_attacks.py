"""What a stranger and a liar cannot do any more: honest peers train on while they are attacked.

The attacks are those of `attackers.py`. What takes time is measured by a benchmark; here nobody adopts what is false,
nobody ends, no process dies, updates go on, and honest peers say who lied.
"""

import os
import socket
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from recipe.errors import InputError
from recipe.run_folder import read_metrics
from swarm.membership.run_manifest import read_manifests
from swarm.network.reachability import measure_reachability
from swarm.training.strategy import SwarmStrategy
from tests.helpers.attacks import members, outsiders
from tests.helpers.attacks.tools import NAME, check_address
from tests.helpers.cli import PACED, TINY, PeerProgram, reaping, wait_until
from tests.helpers.strategy_runs import (
    FEATURES,
    Outcome,
    Plan,
    Record,
    Task,
    assert_equal_updates,
    loader,
    patience,
    trainer_for,
)
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
MAX_FAILED = 3


# ---- strangers, against a run of two -------------------------------------------------------------------------------


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
            failed = [line["outcome"] for line in lines if not is_fine(line["outcome"])]
            assert len(failed) <= MAX_FAILED, failed
            assert max(line["step"] for line in lines) < outsiders.FALSE_STEP / 10
            assert before.processes <= {process.pid for process in peer.alive()}, peer.output
            assert not peer.status.ended, peer.output
            said = peer.output[before.output :]
            assert "Took over step" not in said, said
        self.healthy = True

    def said(self) -> str:
        """What both have said since the attack began."""
        return "".join(peer.output[seen.output :] for peer, seen in zip(self.peers, self.before, strict=True))


def is_fine(outcome: str) -> bool:
    return outcome in ("averaged", "alone") or "too few" in outcome


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


# ---- members, each against a swarm of two ----------------------------------------------------------------------------


TARGET = 64
UPDATES = 30
NEWCOMER_UPDATES = 20
"""Weights are compared twice meanwhile."""


class WidePlan(Plan):
    """Some parts for each reducer, where the other plans' models fit into one."""

    def net(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        return nn.Sequential(nn.Linear(FEATURES, 8192), nn.ReLU(), nn.Linear(8192, 4))


class Rounds(Record):
    """Also those that fail.

    Args:
        stop: a file that ends the training
    """

    def __init__(self, line, stop):
        super().__init__(line, lambda _: stop.exists())
        self.events = []

    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        trainer.strategy.coordinator.on_round = self.events.append


def member(name, initial_peers, line, folder, plan, min_peers, max_steps=UPDATES, lie=None):
    """A peer of the tiny model, what it prints goes to a file; with a lie it is the liar, and may end as it likes."""
    output = os.open(folder / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    if lie is not None:
        members.LIES[lie]()
    with running_dht(initial_peers, line) as dht:
        rounds = Rounds(line, folder / "stop")
        strategy = SwarmStrategy(TARGET, "test", dht=dht, name=name, options=patience(min_peers))
        task = Task(plan)
        trainer = trainer_for(strategy, [rounds], max_steps=max_steps, gradient_clip_val=plan.clip)
        try:
            trainer.fit(task, loader(ord(name[0])))
        except Exception:
            if lie is None:
                raise
            line.get()  # until the test is over
        state = {key: value.clone() for key, value in task.net.state_dict().items()}
        outcome = Outcome(str(dht.peer_id), rounds.updates, rounds.joined_at, state, {})
        return outcome, [event.outcome for event in rounds.events]


def has_step(peers: Peers, name: str, step: int) -> bool:
    return any(made >= step for made, *_ in peers[name].messages)


@pytest.mark.parametrize("lie", ["nan", "overflow", "bad-average", "slow", "stuck"])
def test_a_member_that_spoils_rounds_is_left_out(tmp_path, lie):
    plan = (WidePlan if lie == "slow" else Plan)(compute_seconds=0.03)
    with Peers(timeout_seconds=75) as peers:
        for name in ("a", "b"):
            peers.start(name, member, tmp_path, plan, 3)
        peers.start("mallory", partial(member, lie=lie, max_steps=10**6), tmp_path, plan, 3)
        found = peers.results("a", "b")
    (a, a_rounds), (b, b_rounds) = found["a"], found["b"]
    said = "".join((tmp_path / f"{name}.log").read_text() for name in "ab")
    for outcome, rounds in ((a, a_rounds), (b, b_rounds)):
        failed = [reason for reason in rounds if not is_fine(reason)]
        assert len(failed) <= MAX_FAILED, failed
        assert [update.step for update in outcome.updates] == list(range(1, UPDATES + 1)), "it has made all updates"
        assert all(torch.isfinite(weight).all() for weight in outcome.state.values())
        assert all(update.peer_ids == {a.peer_id, b.peer_id} for update in outcome.updates[-5:])
    assert_equal_updates(a, b)
    assert "mallory" in said, "the liar is named"


def test_who_has_trained_is_not_held_up_by_a_member_that_says_it_is_ahead(tmp_path):
    """It has been in a group, so its word counts for more than a stranger's; its state would come slowly."""
    plan = Plan(compute_seconds=0.03)
    with Peers(timeout_seconds=75) as peers:
        for name in ("a", "b"):
            peers.start(name, member, tmp_path, plan, 3)
        peers.start("mallory", partial(member, lie="ahead", max_steps=10**6), tmp_path, plan, 3)
        found = peers.results("a", "b")
    (a, a_rounds), (b, b_rounds) = found["a"], found["b"]
    for outcome, rounds in ((a, a_rounds), (b, b_rounds)):
        failed = [reason for reason in rounds if not is_fine(reason)]
        assert len(failed) <= MAX_FAILED, failed
        assert [update.step for update in outcome.updates] == list(range(1, UPDATES + 1)), "it has made all updates"
        assert all(update.own_samples > 0 for update in outcome.updates), "it has computed for each of them"
    assert_equal_updates(a, b)


@pytest.mark.parametrize("lie", ["flip", "false-statistics"])
def test_a_false_donor_spoils_no_newcomer(tmp_path, lie):
    """It says that it was here before everybody, so it is asked first."""
    plan, endless = Plan(compute_seconds=0.03), 10**6
    with Peers(timeout_seconds=75) as peers:
        for name in ("a", "b"):
            peers.start(name, partial(member, max_steps=endless), tmp_path, plan, 3)
        peers.start("mallory", partial(member, lie=lie, max_steps=endless), tmp_path, plan, 3)
        peers.until(lambda: has_step(peers, "a", 3))
        c = peers.start("c", partial(member, max_steps=endless), tmp_path, plan, 1)
        peers.until(lambda: len(c.messages) >= NEWCOMER_UPDATES)
        (tmp_path / "stop").touch()
        found = peers.results("a", "b", "c")
    (a, a_rounds), (b, b_rounds), (c, _) = (found[name] for name in "abc")
    for rounds in (a_rounds, b_rounds):
        failed = [reason for reason in rounds if not is_fine(reason)]
        assert len(failed) <= MAX_FAILED, failed
    assert_equal_updates(a, b)
    assert sum(update.own_samples > 0 for update in c.updates) >= NEWCOMER_UPDATES / 2
    assert_equal_updates(a, replace(c, updates=c.updates[-8:]))
    for name in "ab":
        said = (tmp_path / f"{name}.log").read_text()
        assert "from mallory" not in said, "an honest peer has taken over its state"
    said = (tmp_path / "c.log").read_text()
    assert said.count("from mallory:") <= 1, "it is not asked again"
