"""Peers as people meet them: real processes that join, leave, die and come back, and what is refused."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipe.presets import preset
from recipe.run_folder import RunFolder, read_metrics
from swarm.address_book import write_book
from swarm.owners import prepare_identity
from swarm.start_clock import STARTED
from tests.cli import PACED, START_SECONDS, TINY, PeerProgram, Program, reaping, wait_until

pytestmark = pytest.mark.timeout(300)

SUMMARY = {"run_id", "recipe", "outcome", "steps", "samples", "seconds", "val_accuracy", "train_loss", "max_num_peers"}
UPDATE_TAGS = {
    *("train/loss", "train/top1", "train/top5", "train/lr", "perf/samples_per_second", "perf/step_seconds"),
    *("swarm/peers", "swarm/samples", "swarm/own_samples", "swarm/loss", "perf/swarm_samples_per_second"),
    *("round/compute_seconds", "round/blocked_seconds", "round/meeting_seconds", "round/exchange_seconds"),
    "round/parts_received_fraction",
}
LONG = ["--run-id", "long", "--total-steps", "100000", "--validate-every-steps", "100000", *TINY]
VALIDATED = [*TINY, "--validate-every-steps", "10"]
VALIDATION_TAGS = {"val/loss", "val/top1", "val/top5", "val/macro_f1", "val/precision", "val/recall"}


def summary_of(folder: RunFolder) -> dict:
    return json.loads(folder.summary.read_text())


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


# ---- a whole run ---------------------------------------------------------------------------------------------------


@dataclass
class FinishedRun:
    program: Program
    status: int
    output_dir: Path

    @property
    def folders(self) -> list[RunFolder]:
        return [RunFolder(self.output_dir / "whole" / f"peer-{i}") for i in (1, 2, 3)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Iterator[FinishedRun]:
    """``python -m swarm.local --peers 3 --max-steps 20``, run to its end."""
    output_dir = tmp_path_factory.mktemp("finished")
    with reaping() as programs:
        arguments = ["--peers", "3", "--output-dir", str(output_dir), "--run-id", "whole", "--max-steps", "20"]
        program = Program("swarm.local", [*arguments, *VALIDATED], output_dir / "local.log")
        programs.append(program)
        yield FinishedRun(program, program.wait(2 * START_SECONDS), output_dir)


def test_a_local_swarm_shows_its_result(finished):
    assert finished.status == 0, finished.program.output
    output = finished.program.output
    assert "Completed: validation accuracy" in output
    assert "tensorboard --logdir" in output
    assert str(finished.output_dir / "whole") in output
    result = output[output.index("Completed") :]
    assert all(f"peer-{i}" in result for i in (1, 2, 3))


def test_every_peer_writes_a_summary(finished):
    for folder in finished.folders:
        summary = summary_of(folder)
        assert summary.keys() >= SUMMARY
        assert (summary["run_id"], summary["recipe"], summary["outcome"]) == ("whole", "digits", "completed")
        assert (summary["steps"], summary["max_num_peers"]) == (20, 3)
        assert summary["samples"] > 0
        assert summary["seconds"] > 0
        assert 0 < summary["val_accuracy"] <= 1
        assert summary["train_loss"] > 0


def test_all_peers_end_with_the_same_bits(finished):
    first, *others = (
        torch.load(folder.checkpoints / "last.ckpt", weights_only=False)["state_dict"] for folder in finished.folders
    )
    weights = [name for name in first if name.startswith("model.")]
    assert weights
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in weights)


def test_every_update_is_logged_once_and_was_complete(finished):
    for folder in finished.folders:
        lines = read_metrics(folder.metrics)
        for tag in UPDATE_TAGS:
            assert [line["step"] for line in lines if tag in line] == list(range(1, 21)), tag
        assert all(line["round/parts_received_fraction"] == 1.0 for line in lines if "swarm/peers" in line)
        for tag in VALIDATION_TAGS:
            assert [line["step"] for line in lines if tag in line] == [10, 20], tag


def test_every_round_is_accounted_for(finished):
    rounds = [read_metrics(folder.rounds) for folder in finished.folders]
    for folder, lines in zip(finished.folders, rounds, strict=True):
        averaged = [line for line in lines if line["outcome"] == "averaged"]
        assert [line["step"] for line in averaged] == list(range(1, 21))
        for line in averaged:
            assert len(set(line["members"])) == 3
            assert line["received_fraction"] == 1.0
            assert min(line["bytes_sent"], line["bytes_received"], line["compute_seconds"]) > 0
            assert min(line["waiting_seconds"], line["exchange_seconds"]) > 0  # of two processes: they differ a little
        spent = sum(line["compute_seconds"] + line["waiting_seconds"] for line in averaged)
        assert spent < summary_of(folder)["seconds"], "neither the wait for company nor a validation is computing"
    for same_step in zip(*([line for line in lines if line["outcome"] == "averaged"] for lines in rounds), strict=True):
        assert sum(line["own_samples"] for line in same_step) == same_step[0]["samples"]
        assert sum(line["bytes_sent"] for line in same_step) == sum(line["bytes_received"] for line in same_step)
        assert same_step[0]["members"] == same_step[1]["members"] == same_step[2]["members"]


def test_tensorboard_has_the_same_tags(finished):
    for folder in finished.folders:
        lines = read_metrics(folder.metrics)
        events = EventAccumulator(str(folder.tensorboard)).Reload()
        assert set(events.Tags()["scalars"]) == set().union(*lines) - {"time", "step"}
        assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 21))


def test_a_volunteer_sees_no_noise(finished):
    """Nothing that only a developer of a library understands."""
    for folder in finished.folders:
        log = (folder.path / "peer.log").read_text()
        for noise in ("Warning", "weights_only", "[INFO]", "Restor", "Traceback", "GPU available"):
            assert noise not in log, log


def test_alone_it_goes_on_from_its_checkpoint(finished, tmp_path):
    """All have stopped; one comes back with the same name and run id."""
    shutil.copytree(finished.output_dir, tmp_path / "runs")
    with reaping() as programs:
        options = ["--run-id", "whole", "--max-steps", "30", *VALIDATED]
        again = PeerProgram(tmp_path / "runs", "whole", "peer-1", *options)
        programs.append(again)
        assert again.wait(START_SECONDS) == 0, again.output
    assert "Going on from step 20" in again.output
    assert "Warning" not in again.output
    assert summary_of(again.folder)["steps"] == 30
    steps = [line["step"] for line in read_metrics(again.folder.metrics) if "train/loss" in line]
    assert steps == list(range(1, 31))


def test_all_go_on_at_the_newest_step_that_anyone_has(finished, tmp_path):
    """All have stopped; the second one tries to come back until the first one is there, with an empty folder."""
    shutil.copytree(finished.output_dir, tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "whole" / "peer-1")
    peer_id = prepare_identity(tmp_path / "runs" / "identities" / "peer-1.key")
    port = free_port()
    with reaping() as programs:
        to_the_end = ["--max-steps", "25", "--min-peers", "2"]
        joins = ["--initial-peers", f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_id}", *to_the_end]
        second = PeerProgram(tmp_path / "runs", "whole", "peer-2", *joins, **{STARTED: str(time.time())})
        programs.append(second)
        second.wait_until(lambda: "Trying again, 10 minutes at most." in second.output, "nobody answers")
        first = PeerProgram(
            tmp_path / "runs", "whole", "peer-1", "--run-id", "whole", "--port", port, *to_the_end, *VALIDATED
        )
        programs.append(first)
        for program in (first, second):
            assert program.wait(START_SECONDS) == 0, program.output
    assert second.output.count("Trying again") == 1
    assert "Loop" not in second.output
    assert "Took over step 20 from peer-2" in first.output
    assert "Going on from step 20" in second.output
    steps = [line["step"] for line in read_metrics(first.folder.metrics) if "train/loss" in line]
    assert (min(steps), max(steps)) == (21, 25)


def test_without_its_founder_a_run_goes_on(finished, tmp_path):
    """Nobody comes back whom the others were told of: one goes on alone, and who has met it before joins it there."""
    shutil.copytree(finished.output_dir, tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "whole" / "peer-1")
    port = free_port()
    peer_id = prepare_identity(tmp_path / "runs" / "identities" / "peer-2.key")
    write_book(RunFolder(tmp_path / "runs" / "whole" / "peer-3").peers, [f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_id}"])
    founder = prepare_identity(tmp_path / "runs" / "identities" / "peer-1.key")
    options = ["--run-id", "whole", "--initial-peers", f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{founder}"]
    options += ["--max-steps", "25", "--min-peers", "2"]
    with reaping() as programs:
        third = PeerProgram(tmp_path / "runs", "whole", "peer-3", *options)
        programs.append(third)
        third.wait_until(lambda: "Trying again, for " in third.output, "nobody answers")
        second = PeerProgram(
            tmp_path / "runs", "whole", "peer-2", "--port", port, *options, module="tests.impatient_peer"
        )
        programs.append(second)
        for program in (second, third):
            assert program.wait(START_SECONDS) == 0, program.output
    assert "Nobody answers: this peer goes on alone" in second.output
    assert "Joining run whole as peer-3" in third.output
    for program in (second, third):
        assert "Going on from step 20" in program.output
        assert summary_of(program.folder)["steps"] == 25


# ---- coming and going ----------------------------------------------------------------------------------------------


@dataclass
class RunningSwarm:
    output_dir: Path
    programs: list[Program]
    first: PeerProgram
    second: PeerProgram
    third: PeerProgram

    def join(self, name: str, *options: str, prefix: tuple[str, ...] = ()) -> PeerProgram:
        """A newcomer who knows nothing but the second peer's address."""
        options = ("--initial-peers", self.second.address, *options)
        newcomer = PeerProgram(self.output_dir, "long", name, *options, prefix=prefix, **PACED)
        self.programs.append(newcomer)
        return newcomer


@pytest.fixture(scope="module")
def swarm(tmp_path_factory) -> Iterator[RunningSwarm]:
    """Three peers that train on and on; the second one stays to the end."""
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
    assert f"python -m swarm.peer --initial-peers {swarm.first.address}" in output
    for joined in (swarm.second, swarm.third):
        assert f"Joining run long as {joined.name}" in joined.output
        assert RunFolder(joined.folder.path).recipe.read_text() == swarm.first.folder.recipe.read_text()


def test_a_setting_that_contradicts_the_swarm_is_refused(swarm, refused):
    address = swarm.second.address
    error = refused("--initial-peers", address, "--learning-rate", "0.5")
    assert "learning_rate: swarm 0.003, here 0.5" in error
    assert "--initial-peers" in error


def test_peers_that_lose_a_part_start_again_as_the_same(swarm):
    """Two at the same time, each another part; the third one trains on."""
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
        victim.wait_until(lambda: f"{part} has died: this peer starts again." in victim.output, "it is noticed", 20)  # noqa: B023
    for part, victim in lost.items():
        victim.wait_until(lambda: victim.output.count("First contribution") > starts[part], "it contributes again")  # noqa: B023
        assert victim.peer_id == peer_ids[part]
        victim.wait_for_contribution(updates=3)


def test_the_first_peer_may_leave(swarm):
    """Those who stay train on, newcomers still learn what is trained, and so does the first peer when it comes back."""
    noted = swarm.first.folder.peers
    swarm.first.wait_until(lambda: noted.exists() and swarm.second.peer_id in noted.read_text(), "it notes the others")
    swarm.first.interrupt()
    assert swarm.first.wait(10) == 0, swarm.first.output
    summary = summary_of(swarm.first.folder)
    assert summary["outcome"] == "interrupted"
    checkpoint = torch.load(swarm.first.folder.checkpoints / "last.ckpt", weights_only=False)
    assert checkpoint["global_step"] == summary["steps"] > 0
    swarm.second.wait_for_contribution(updates=3)

    newcomer = swarm.join("newcomer")
    assert newcomer.wait_for_contribution().step > summary["steps"]
    newcomer.process.send_signal(signal.SIGTERM)
    assert newcomer.wait(10) == 0, newcomer.output
    assert summary_of(newcomer.folder)["outcome"] == "interrupted"

    back = PeerProgram(swarm.output_dir, "long", "first", *LONG, **PACED)  # the same command as before
    swarm.programs.append(back)
    assert back.wait_for_contribution().step > summary["steps"]
    assert "Joining run long as first" in back.output
    back.process.kill()  # or its machine loses power
    wait_until(lambda: not back.alive(), 10, "nothing is left of it")
    swarm.second.wait_for_contribution(updates=3)


TERMINAL = (
    sys.executable,
    "-c",
    "import pty, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); pty.spawn(sys.argv[1:])",
)
"""A prefix; a terminal is closed when the program behind it dies. The tests themselves may run under nohup."""


def test_a_killed_peer_comes_back_as_the_same_and_leaves_with_its_terminal(swarm):
    peer_id, step = swarm.third.peer_id, swarm.third.status.step
    swarm.third.process.kill()
    wait_until(lambda: not swarm.third.alive(), 10, "the killed peer's processes have ended")
    torch.save({"global_step": 10**6}, swarm.third.folder.checkpoints / "last.ckpt")  # half a checkpoint, the newest

    again = swarm.join("third", prefix=TERMINAL)
    assert again.peer_id == peer_id
    assert step < again.wait_for_contribution().step < 10**6
    swarm.second.wait_for_contribution(updates=3)

    again.process.kill()
    wait_until(lambda: not again.alive(), 15, "the peer has left")
    assert summary_of(again.folder)["outcome"] == "interrupted"


# ---- several peers on this machine ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ended_early(tmp_path_factory) -> Iterator[dict[str, Program]]:
    """Two at the same time: Ctrl-C comes when the second peer of one has just begun, that of the other refuses."""
    output_dir = tmp_path_factory.mktemp("early")
    RunFolder.create(output_dir, "refusing", "peer-2").write_recipe(preset("synthetic"))
    with reaping() as programs:
        for run_id in ("interrupted", "refusing"):
            arguments = ["--peers", "2", "--output-dir", str(output_dir), "--run-id", run_id, *TINY]
            programs.append(Program("swarm.local", arguments, output_dir / f"{run_id}.log"))
        interrupted, refusing = programs
        second_log = output_dir / "interrupted" / "peer-2" / "peer.log"
        interrupted.wait_until(lambda: second_log.exists() and second_log.read_text(), "the second peer starts")
        interrupted.interrupt()
        yield {"interrupted": interrupted, "refusing": refusing}


def test_ctrl_c_ends_a_local_swarm(ended_early):
    program = ended_early["interrupted"]
    assert program.wait(15) == 0, program.output
    assert "Interrupted: validation accuracy" in program.output


def test_a_local_swarm_tells_why_a_peer_failed(ended_early):
    """The others would wait for it, so all end."""
    program = ended_early["refusing"]
    assert program.wait(START_SECONDS) == 2, program.output
    assert "peer-2 failed:" in program.output
    assert "holds a run of another recipe" in program.output
    assert "Traceback" not in program.output
