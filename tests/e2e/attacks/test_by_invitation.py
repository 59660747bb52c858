"""What a stranger or a removed member can do to a run by invitation, and what it gets: nothing."""

import contextlib
import re
import time
from pathlib import Path

import pytest

from swarm.cli.organiser import remove
from swarm.enrolment.removed import EXIT_STATUS
from swarm.peer.membership.credentials import Credentials
from tests.helpers.attacks import outsiders
from tests.helpers.attacks.attacked_run import LARGE_STEPS, LOOPBACK, TOGETHER, Attacked, Seen, rounds_of
from tests.helpers.attacks.rounds_under_attack import failed_of
from tests.helpers.cli import PACED, PeerProgram, reaping
from tests.helpers.swarm_peers import Peers

pytestmark = pytest.mark.timeout(300)
ATTACK_SECONDS = 240.0
"""Longest duration; an attack ends when the honest peers have made their updates."""
STATE = re.compile(r"Took over step \d+ from .*: ([\d.]+) MB in")
NOTHING = re.compile(r"got 0 bytes of the state, 0 answers, and \[('PROTOCOL_VIOLATION')?\] to knocks")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with reaping() as programs:
        yield Attacked(tmp_path_factory.mktemp("attacked"), programs, by_invitation=True)


REMOVED: dict[Path, tuple[Path, bytes]] = {}
"""By the folder of the run: key and certificate of a member that was removed."""


def attacker(_name, _initial_peers, line, kind, address, sizes, identity=None, certificate=b""):
    outsiders.attack(kind, [address], ATTACK_SECONDS, line.put, identity=identity, certificate=certificate, **sizes)


def received_bytes(attacker) -> int:
    """Return the bytes that the attacker's p2pd has read, from the network and from itself, by the kernel's count."""
    daemons = [process for process in attacker.processes() if "p2pd" in process.name()]
    return sum(process.io_counters().read_chars for process in daemons)


def assert_gets_nothing(run, peers, mallory) -> None:
    """Check that the attacker gets nothing while the honest peers make updates, and in some further tries."""
    peers.until(lambda: any("to knocks" in message for message in mallory.messages))
    before, tries = received_bytes(mallory), len(mallory.messages)
    run.trains_on()
    peers.until(lambda: len(mallory.messages) >= tries + 3)
    received, tries = received_bytes(mallory) - before, len(mallory.messages) - tries
    state_bytes = 1e6 * float(STATE.search(run.peers[1].output)[1])
    print(f"its p2pd received {received:,} bytes in {tries} tries; a state has {state_bytes:,.0f}")
    assert received < tries * state_bytes / 4
    assert all(NOTHING.fullmatch(message) for message in mallory.messages[1:]), mallory.messages
    honest = {peer.peer_id for peer in run.peers}
    for peer, seen in zip(run.peers, run.before, strict=True):
        assert {member for line in rounds_of(peer)[seen.lines :] for member in line.get("members", ())} <= honest
    assert str(outsiders.FALSE_STEP) not in run.said(), "its records are not even read"
    assert len(run.said()) < 20_000, "said once, not each time"


def test_an_outsider_gets_nothing(run):
    run.begin()
    with Peers(timeout_seconds=150) as peers:
        assert_gets_nothing(run, peers, peers.start("thief", attacker, "thief", run.address, {}))


def removed_member(run) -> tuple[Path, bytes]:
    """Let a member join, train and be removed. Returns its key and its certificate."""
    if run.folder in REMOVED:
        return REMOVED[run.folder]
    with reaping() as programs:
        options = ["--initial-peers", run.invitation, *LOOPBACK, *LARGE_STEPS]
        member = PeerProgram(run.folder, "live", "mallory", *options, **PACED)
        programs.append(member)
        member.wait_for_contribution()
        peer_id = member.peer_id
        said = ["mallory", "--why", "it sent noise", "--output-dir", str(run.folder), "--run-id", "live"]
        assert remove.main(said) == 0
        removed_at = time.time()
        assert member.wait(90) == EXIT_STATUS, member.output
        assert "The organiser has removed this peer from the run: it sent noise." in member.output
        for peer in run.peers:
            since = [line for line in rounds_of(peer) if line["time"] > removed_at]
            assert sum(peer_id in line.get("members", ()) for line in since) <= 1, "that was under way"
            assert len(failed_of(line["outcome"] for line in since)) <= 1, "that was under way"
        certificate = Credentials.read(member.folder.membership).certificate
    REMOVED[run.folder] = run.folder / "identities" / "mallory.key", certificate
    return REMOVED[run.folder]


def test_a_removed_member_gets_nothing(run):
    """Its machine knows the addresses of all peers."""
    run.begin()
    had = removed_member(run)
    run.begin_again()
    with Peers(timeout_seconds=150) as peers:
        assert_gets_nothing(run, peers, peers.start("thief", attacker, "thief", run.address, {}, *had))


KINDS = {
    "claim": re.compile(r"says that it is at step \d+"),
    "waiting": re.compile(r"0 of 20 identities were stored"),
    "records": re.compile(r"0 of 1000 records were stored"),
    "streams": re.compile(r"opened \d+ streams, \d+ are open"),
}
"""Attacks, and what each reports when it has begun."""


def assert_stops_nothing(run) -> None:
    run.trains_on(TOGETHER)
    for peer, before in zip(run.peers, run.before, strict=True):
        assert Seen.of(peer).bytes < before.bytes + 100 * 2**20
    assert "Ignoring" not in run.said(), "its records are not even read"


def test_outsiders_stop_nothing(run):
    """All attacks run at once."""
    run.begin()
    with contextlib.ExitStack() as stack:
        started = {kind: stack.enter_context(Peers(timeout_seconds=150)) for kind in KINDS}
        for kind, peers in started.items():
            peers.start(kind, attacker, kind, run.address, {"count": 1000} if kind == "records" else {})
        for kind, peers in started.items():
            said = peers[kind].messages
            peers.until(lambda kind=kind, said=said: any(map(KINDS[kind].fullmatch, said)))
        assert_stops_nothing(run)


def test_a_removed_member_stops_nothing(run):
    """It uses its former key and certificate, in all attacks at once."""
    run.begin()
    had = removed_member(run)
    run.begin_again()
    with Peers(timeout_seconds=150) as peers:
        said = peers.start("mallory", attacker, "several", run.address, {}, *had).messages
        for says in KINDS.values():
            peers.until(lambda says=says: any(map(says.fullmatch, said)))
        assert_stops_nothing(run)
