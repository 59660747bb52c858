"""Peers come and go while others train: they leave, lose parts, are killed, and come back as the same peers."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from analysis.endurance.ledgers import compare
from recipe.run_folder import RunFolder
from swarm.ledger.audit import CONFIRMED, audit
from swarm.runtime.sockets import TEMPORARY
from tests.helpers.cli import LEAVE_SECONDS, PACED, TINY, PeerProgram, Program, reaping, summary_of, wait_until

pytestmark = pytest.mark.timeout(300)

LONG = ["--run-id", "long", "--total-steps", "100000", "--validate-every-steps", "100000", *TINY]


@dataclass
class RunningSwarm:
    output_dir: Path
    programs: list[Program]
    first: PeerProgram
    second: PeerProgram
    third: PeerProgram
    killed_at: int = 0

    def join(self, name: str, *options: str, prefix: tuple[str, ...] = ()) -> PeerProgram:
        """Start a newcomer that knows nothing but the second peer's address."""
        options = ("--initial-peers", self.second.address, *options)
        newcomer = PeerProgram(self.output_dir, "long", name, *options, prefix=prefix, **PACED)
        self.programs.append(newcomer)
        return newcomer


@pytest.fixture(scope="module")
def swarm(tmp_path_factory) -> Iterator[RunningSwarm]:
    """Three peers that train without end; the second one stays to the end."""
    output_dir = tmp_path_factory.mktemp("long")
    with reaping() as programs:
        first = PeerProgram(output_dir, "long", "first", *LONG, **PACED)
        programs.append(first)
        second = PeerProgram(output_dir, "long", "second", "--initial-peers", first.address, **PACED)
        third = PeerProgram(output_dir, "long", "third", INITIAL_PEERS=first.address, **PACED)
        programs += [second, third]
        for program in (first, second, third):
            program.wait_for_contribution()
        yield RunningSwarm(output_dir, programs, first, second, third)


def test_the_first_peer_says_how_to_join(swarm):
    output = swarm.first.output
    assert "Started run long as first" in output
    line = next(line for line in output.splitlines() if line.startswith("Running a DHT instance."))
    assert "To connect other peers to this one, use --initial_peers /ip4/" in line
    assert f"swarm join {swarm.first.address}" in output
    for joined in (swarm.second, swarm.third):
        assert f"Joining run long as {joined.name}" in joined.output
        assert RunFolder(joined.folder.path).recipe.read_text() == swarm.first.folder.recipe.read_text()


def test_a_setting_that_contradicts_the_swarm_is_refused(swarm, refused):
    address = swarm.second.address
    error = refused("--initial-peers", address, "--learning-rate", "0.5")
    assert "learning_rate: swarm 0.003, here 0.5" in error
    assert "--initial-peers" in error


@pytest.mark.long
def test_peers_that_lose_a_part_start_again_as_the_same(swarm):
    """Two peers lose a part at the same time, each another one; the remaining peer trains on."""
    lost = {"The averaging process": swarm.first, "p2pd": swarm.third}
    peer_ids = {part: victim.peer_id for part, victim in lost.items()}
    starts = {part: victim.output.count("First contribution") for part, victim in lost.items()}
    for part, victim in lost.items():
        program = psutil.Process(victim.process.pid)
        forks = [child for child in program.children() if child.cmdline() == program.cmdline()]
        (dht,) = (child for child in forks if child.children())
        (averaging,) = (child for child in forks if child != dht)
        (p2pd,) = dht.children()
        (p2pd if part == "p2pd" else averaging).kill()
    for part, victim in lost.items():
        victim.wait_until(lambda: f"{part} has died: this peer starts again." in victim.output, "it is noticed")  # noqa: B023
    for part, victim in lost.items():
        victim.wait_until(lambda: victim.output.count("First contribution") > starts[part], "it contributes again")  # noqa: B023
        assert victim.peer_id == peer_ids[part]
        victim.wait_for_contribution(updates=3)


def test_the_first_peer_may_leave(swarm):
    """The remaining peers train on, newcomers still learn the run, and so does the first peer when it comes back."""
    noted = swarm.first.folder.peers
    swarm.first.wait_until(lambda: noted.exists() and swarm.second.peer_id in noted.read_text(), "it notes the others")
    swarm.first.interrupt()
    assert swarm.first.wait(LEAVE_SECONDS) == 0, swarm.first.output
    summary = summary_of(swarm.first.folder)
    assert summary["outcome"] == "interrupted"
    checkpoint = torch.load(swarm.first.folder.checkpoints / "last.ckpt", weights_only=False)
    assert checkpoint["global_step"] == summary["steps"] > 0
    swarm.second.wait_for_contribution(updates=3)

    newcomer = swarm.join("newcomer")
    assert newcomer.wait_for_contribution().step > summary["steps"]
    newcomer.process.send_signal(signal.SIGTERM)
    assert newcomer.wait(LEAVE_SECONDS) == 0, newcomer.output
    assert summary_of(newcomer.folder)["outcome"] == "interrupted"

    back = PeerProgram(swarm.output_dir, "long", "first", *LONG, **PACED)  # the same command as before
    swarm.programs.append(back)
    assert back.wait_for_contribution().step > summary["steps"]
    assert "Joining run long as first" in back.output
    back.process.kill()  # or its machine loses power
    wait_until(lambda: not back.alive(), LEAVE_SECONDS, "nothing is left of it")
    swarm.second.wait_for_contribution(updates=3)


def left(peer: PeerProgram) -> list[Path]:
    return list(TEMPORARY.glob(f"swarm_{peer.process.pid}_*"))


TERMINAL = (
    sys.executable,
    "-c",
    "import pty, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); pty.spawn(sys.argv[1:])",
)
"""A command prefix. A terminal is closed when the program behind it dies. The tests themselves may run under nohup."""


def test_a_killed_peer_comes_back_as_the_same_and_leaves_with_its_terminal(swarm):
    peer_id, step = swarm.third.peer_id, swarm.third.status.step
    swarm.third.process.kill()
    wait_until(lambda: not swarm.third.alive(), LEAVE_SECONDS, "the killed peer's processes have ended")
    swarm.killed_at = swarm.second.status.step
    assert left(swarm.third)
    torch.save({"global_step": 10**6}, swarm.third.folder.checkpoints / "last.ckpt")  # half a checkpoint, the newest

    again = swarm.join("third", prefix=TERMINAL)
    assert again.peer_id == peer_id
    assert step < again.wait_for_contribution().step < 10**6
    assert not left(swarm.third), "its sockets were swept"
    swarm.second.wait_for_contribution(updates=3)

    again.process.kill()
    wait_until(lambda: not again.alive(), LEAVE_SECONDS, "the peer has left")
    assert summary_of(again.folder)["outcome"] == "interrupted"


def test_the_ledgers_say_what_all_rounds_say(swarm):
    """This holds after all that has happened to these peers."""
    swarm.second.interrupt()
    assert swarm.second.wait(LEAVE_SECONDS) == 0, swarm.second.output
    found = compare(swarm.output_dir / "long")
    assert found["problems"] == []
    assert found["samples"] > 0
    rounds = audit([swarm.output_dir / "long"]).rounds.values()
    confirmed = [one.step for one in rounds if one.how == CONFIRMED]
    assert max(confirmed, default=0) > swarm.killed_at, "also after the last kill"
