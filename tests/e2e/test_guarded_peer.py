"""A peer starts again when a part of it has died, and for no other reason."""

import signal
import time

import psutil
import pytest

from swarm.peer.startup_timer import STARTED
from tests.helpers.cli import START_SECONDS, TINY, PeerProgram, Program, reaping, summary_of

pytestmark = pytest.mark.timeout(300)


@pytest.mark.long
def test_parts_are_looked_after_while_a_peer_waits_for_company(tmp_path):
    """The parts die one after the other; the second one dies in a peer that has started again."""
    with reaping() as programs:
        peer = PeerProgram(tmp_path, "lonely", "me", "--run-id", "lonely", "--min-peers", "2", *TINY)
        programs.append(peer)
        peer.wait_until(lambda: "waiting" in peer.status.phase, "it waits for company")
        peer_id = peer.peer_id
        for starts, part in enumerate(("p2pd", "The DHT process"), 2):
            children = psutil.Process(peer.process.pid).children(recursive=True)
            (p2pd,) = (child for child in children if "p2pd" in child.name())
            (p2pd if part == "p2pd" else p2pd.parent()).kill()
            peer.wait_until(lambda: f"{part} has died: this peer starts again." in peer.output, "it is noticed")  # noqa: B023
            peer.wait_until(lambda: peer.output.count("Run folder:") == starts, "it is there again")  # noqa: B023
            peer.folder.status.unlink(missing_ok=True)  # of the time before its restart
            peer.wait_until(lambda: "waiting" in peer.status.phase, "it waits again")
            assert peer.peer_id == peer_id
        peer.interrupt()
        assert peer.wait(60) == 0, peer.output
    assert summary_of(peer.folder)["outcome"] == "interrupted"


@pytest.mark.long
def test_a_peer_that_is_asked_to_leave_does_not_start_again(tmp_path):
    with reaping() as programs:
        peer = PeerProgram(tmp_path, "lonely", "me", "--run-id", "lonely", "--min-peers", "2", *TINY)
        programs.append(peer)
        peer.wait_until(lambda: "waiting" in peer.status.phase, "it waits for company")
        next(child for child in psutil.Process(peer.process.pid).children(True) if "p2pd" in child.name()).kill()
        peer.wait_until(lambda: "p2pd has died: this peer starts again." in peer.output, "it is noticed")
        peer.interrupt()
        assert peer.wait(60) == 128 + signal.SIGINT, peer.output
        assert peer.output.count("Run folder:") == 1, peer.output
    assert (peer.folder.checkpoints / "last.ckpt").exists()


def test_an_error_ends_the_training_with_its_reason(tmp_path):
    with reaping() as programs:
        arguments = ["--output-dir", str(tmp_path), "--run-id", "fails", *TINY]
        again = {STARTED: str(time.time())}  # as a peer that has started again by itself, and tries again to join
        peer = Program("tests.helpers.programs.failing_peer", arguments, tmp_path / "log", forks=True, **again)
        programs.append(peer)
        assert peer.wait(START_SECONDS) == 2
    assert peer.output.splitlines()[-1] == "error: The third update cannot work: leave it out."
    assert "starts again" not in peer.output
    assert "Trying again" not in peer.output
