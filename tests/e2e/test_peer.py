"""Peers as people meet them: real processes that join, leave, die and come back, and input that is refused."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from baseline_ddp.evaluate import evaluate
from recipe.presets import preset
from recipe.registry import build_task
from recipe.run_folder import RunFolder, read_metrics
from swarm.network.known_peers import write_book
from swarm.network.signed_records import prepare_identity
from swarm.peer.startup_timer import STARTED
from tests.helpers.cli import START_SECONDS, TINY, PeerProgram, Program, reaping, summary_of
from tests.helpers.clusters import rude_listener
from tests.helpers.programs.ports import free_port

pytestmark = pytest.mark.timeout(300)

SUMMARY = {"run_id", "recipe", "outcome", "steps", "samples", "seconds", "val_accuracy", "train_loss", "max_num_peers"}
UPDATE_TAGS = {
    *("train/loss", "train/top1", "train/top5", "train/lr", "perf/samples_per_second", "perf/step_seconds"),
    *("swarm/peers", "swarm/samples", "swarm/own_samples", "swarm/loss", "perf/swarm_samples_per_second"),
    *("round/compute_seconds", "round/blocked_seconds", "round/meeting_seconds", "round/exchange_seconds"),
    "round/parts_received_fraction",
}
VALIDATED = [*TINY, "--validate-every-steps", "10"]
VALIDATION_TAGS = {"val/loss", "val/top1", "val/top5", "val/macro_f1", "val/precision", "val/recall"}
BEGUN_DEMO = "tests.helpers.programs.begun_demo"
IMPATIENT = "tests.helpers.programs.impatient_peer"


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
    """`swarm demo --peers 3 --max-steps 20`, run to its end; the peers test the weights, and upload them.

    The program and its peers are forked from a process with all imports.
    """
    output_dir = tmp_path_factory.mktemp("finished")
    results = ["--evaluate-every-steps", "15", "--upload-to", f"file://{output_dir}/far"]
    with reaping() as programs:
        arguments = ["--peers", "3", "--output-dir", str(output_dir), "--run-id", "whole", "--max-steps", "20"]
        program = Program(BEGUN_DEMO, [*arguments, *VALIDATED, *results], output_dir / "local.log", forks=True)
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
        averaged = sum(line["bytes_sent"] + line["bytes_received"] for line in read_metrics(folder.rounds))
        assert summary["traffic_bytes"] >= averaged > 0, "and the state"


def test_all_peers_end_with_the_same_bits(finished):
    first, *others = (
        torch.load(folder.checkpoints / "last.ckpt", weights_only=False)["state_dict"] for folder in finished.folders
    )
    weights = [name for name in first if name.startswith("model.")]
    assert weights
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in weights)


def test_the_weights_were_tested_and_uploaded(finished):
    result = evaluate(finished.folders[0].checkpoints / "last.ckpt", finished.output_dir, 64, torch.device("cpu"))
    for folder in finished.folders:
        (tested,) = read_metrics(folder.evaluations)  # 15 updates are over at the validation of step 20
        assert (tested["step"], tested["images"], tested["top1"]) == (20, 270, pytest.approx(result.top1))
        assert tested["loss"] == pytest.approx(result.loss, rel=1e-4)
        summary = summary_of(folder)
        assert summary["tested"]["top1"] == tested["top1"]
        assert summary["tested"]["val_top1"] == pytest.approx(summary["val_accuracy"])
        far = finished.output_dir / "far" / "whole" / folder.path.name
        assert summary["upload_to"] == f"file://{far}"
        for name in ("best.ckpt", "last.ckpt"):
            assert (far / name).read_bytes() == (folder.checkpoints / name).read_bytes(), name
        assert (far / "summary.json").read_bytes() == folder.summary.read_bytes()


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
        assert sorted(same_step[0]["member_samples"]) == sorted(line["own_samples"] for line in same_step)
        assert min(same_step[0]["member_losses"]) > 0


def test_tensorboard_has_the_same_tags(finished):
    for folder in finished.folders:
        lines = read_metrics(folder.metrics)
        events = EventAccumulator(str(folder.tensorboard)).Reload()
        assert set(events.Tags()["scalars"]) == set().union(*lines) - {"time", "step"}
        assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 21))


def test_a_volunteer_sees_no_noise(finished):
    """The output contains nothing that only a developer of a library understands."""
    for folder in finished.folders:
        log = (folder.path / "peer.log").read_text()
        for noise in ("Warning", "weights_only", "[INFO]", "Restor", "Traceback", "GPU available"):
            assert noise not in log, log


@pytest.mark.parametrize(
    "options",
    [["--run-id", "whole", *VALIDATED], ["--run-id", "whole", "--resume"]],
    ids=["by its names", "by --resume"],
)
def test_alone_it_goes_on_from_its_checkpoint(finished, tmp_path, options):
    """All have stopped; one peer comes back with the same name and run id."""
    shutil.copytree(finished.output_dir, tmp_path / "runs")
    with reaping() as programs:
        options = [*options, "--max-steps", "30"]
        again = PeerProgram(tmp_path / "runs", "whole", "peer-1", *options)
        programs.append(again)
        assert again.wait(START_SECONDS) == 0, again.output
    assert "Going on from step 20" in again.output
    assert "Warning" not in again.output
    assert summary_of(again.folder)["steps"] == 30
    steps = [line["step"] for line in read_metrics(again.folder.metrics) if "train/loss" in line]
    assert steps == list(range(1, 31))


def test_all_go_on_at_the_newest_step_that_anyone_has(finished, tmp_path):
    """All have stopped; the second peer, with an empty folder, retries until the first one is there.

    The first peer remembers an address where another program listens by now.
    """
    shutil.copytree(finished.output_dir, tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "whole" / "peer-1")
    peer_id = prepare_identity(tmp_path / "runs" / "identities" / "peer-1.key")
    port = free_port()
    with reaping() as programs, rude_listener() as (_, other_port):
        gone = prepare_identity(tmp_path / "runs" / "identities" / "peer-9.key")
        book = RunFolder.create(tmp_path / "runs", "whole", "peer-9").peers
        write_book(book, [f"/ip4/127.0.0.1/tcp/{other_port}/p2p/{gone}"])
        to_the_end = ["--max-steps", "25", "--min-peers", "2"]
        joins = ["--initial-peers", f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_id}", *to_the_end]
        second = PeerProgram(tmp_path / "runs", "whole", "peer-2", *joins, **{STARTED: str(time.time())})
        programs.append(second)
        second.wait_until(lambda: "Trying again, 10 minutes at most." in second.output, "nobody answers")
        first = PeerProgram(
            tmp_path / "runs", "whole", "peer-1", "--run-id", "whole", "--port", str(port), *to_the_end, *VALIDATED
        )
        programs.append(first)
        for program in (first, second):
            assert program.wait(START_SECONDS) == 0, program.output
    assert second.output.count("Trying again") == 1
    assert "Loop" not in second.output
    assert "answers: it starts alone." in first.output
    assert "Took over step 20 from peer-2" in first.output, first.output
    assert "Going on from step 20" in second.output
    steps = [line["step"] for line in read_metrics(first.folder.metrics) if "train/loss" in line]
    assert (min(steps), max(steps)) == (21, 25)


def test_without_its_founder_a_run_goes_on(finished, tmp_path):
    """The founder does not come back: one peer goes on alone, and a peer that has met it before joins it there."""
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
            tmp_path / "runs",
            "whole",
            "peer-2",
            "--port",
            str(port),
            *options,
            module=IMPATIENT,
        )
        programs.append(second)
        for program in (second, third):
            assert program.wait(START_SECONDS) == 0, program.output
    assert "No peer answers: this peer goes on alone" in second.output
    assert "Joining run whole as peer-3" in third.output
    for program in (second, third):
        assert "Going on from step 20" in program.output
        assert summary_of(program.folder)["steps"] == 25


# ---- several peers on this machine ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ended_early(tmp_path_factory) -> Iterator[dict[str, Program]]:
    """Two demos at the same time: Ctrl-C comes when the second peer of one has just begun; a peer of the other refuses.

    The first demo and its peers are started as users start them.
    """
    output_dir = tmp_path_factory.mktemp("early")
    RunFolder.create(output_dir, "refusing", "peer-2").write_recipe(preset("synthetic"))
    with reaping() as programs:
        arguments = ["--peers", "2", "--output-dir", str(output_dir), *TINY, "--run-id"]
        interrupted = Program("swarm", ["demo", *arguments, "interrupted"], output_dir / "interrupted.log")
        programs.append(interrupted)
        refusing = Program(BEGUN_DEMO, [*arguments, "refusing"], output_dir / "refusing.log", forks=True)
        programs.append(refusing)
        second_log = output_dir / "interrupted" / "peer-2" / "peer.log"
        interrupted.wait_until(lambda: second_log.exists() and second_log.read_text(), "the second peer starts")
        interrupted.interrupt()
        yield {"interrupted": interrupted, "refusing": refusing}


def test_ctrl_c_ends_a_local_swarm(ended_early):
    program = ended_early["interrupted"]
    assert program.wait(START_SECONDS) == 0, program.output
    assert "Interrupted: validation accuracy" in program.output


def test_a_local_swarm_tells_why_a_peer_failed(ended_early):
    """The other peers would wait for it, so all end."""
    program = ended_early["refusing"]
    assert program.wait(START_SECONDS) == 2, program.output
    assert "peer-2 failed:" in program.output
    assert "holds a run of another recipe" in program.output
    assert "Traceback" not in program.output


# ---- its own images, and weights of an earlier run ----------------------------------------------------------------


def test_a_new_swarm_starts_from_given_weights_and_reads_images_in_processes(tmp_path):
    (tmp_path / "runs").mkdir()
    for part, label in ((part, label) for part in ("train", "val") for label in ("cat", "dog")):
        (tmp_path / "images" / part / label).mkdir(parents=True)
        for number in range(8):
            Image.new("RGB", (20, 20), (16 * number, 0, 0)).save(tmp_path / "images" / part / label / f"{number}.png")
    shape = {"num_classes": 2, "image_size": 16, "patch_size": 4, "depth": 1, "embed_dim": 32, "num_heads": 2}
    fresh = build_task(replace(preset("imagefolder-vit-small"), **shape)).state_dict()
    earlier = {name: tensor + 0.1 for name, tensor in fresh.items()}  # every peer of a recipe has the same fresh ones
    torch.save({"state_dict": earlier, "global_step": 40}, tmp_path / "best.ckpt")
    options = [word for name, value in shape.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    options += ["--recipe", "imagefolder-vit-small", "--data-dir", str(tmp_path / "images"), "--target-batch-size", "8"]
    options += ["--batch-size", "4", "--num-workers", "2", "--max-steps", "2", "--run-id", "again"]
    with reaping() as programs:
        peer = PeerProgram(tmp_path / "runs", "again", "ada", *options, "--start-from", str(tmp_path / "best.ckpt"))
        programs.append(peer)
        assert peer.wait(START_SECONDS) == 0, peer.output
    assert f"Weights to start from: {tmp_path / 'best.ckpt'}." in peer.output
    last = torch.load(peer.folder.checkpoints / "last.ckpt", weights_only=False)
    assert last["global_step"] == 2
    for name, tensor in earlier.items():  # while the learning rate rises, two updates change next to nothing
        torch.testing.assert_close(last["state_dict"][name], tensor, rtol=0, atol=1e-5)
