"""A run that is killed at a random update and resumed equals a run that was never killed."""

import json
import os
import random
import resource
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from baseline_ddp.checkpoints.snapshots import (
    SnapshotIO,
    check_resumable,
    forget_after,
    random_state,
    set_random_state,
)
from baseline_ddp.processes import RunFailed
from recipe.errors import InputError
from recipe.presets import preset
from recipe.run_folder import read_metrics
from recipe.training.checkpoint_io import read_checkpoint
from tests.helpers.clusters import Cluster, run_cluster, train

RECIPE = replace(
    preset("digits"),
    embed_dim=16,
    depth=1,
    num_heads=2,
    drop_path=0.2,  # draws from torch's generator at every step
    augmentation="light",
    warmup_steps=2,
    total_steps=16,
    target_batch_size=32,
    validate_every_steps=4,
)
PROCESSES = {"single": 1, "ddp": 2, "fsdp": 2}


def arguments(folder: Path, strategy: str, *more: object) -> list[str]:
    recipe = folder / "recipe.json"
    recipe.write_text(RECIPE.to_json())
    options = ["--recipe", recipe, "--output-dir", folder, "--run-id", "run", "--batch-size", 8, "--snapshot-every", 3]
    return [str(option) for option in [*options, "--strategy", strategy, *more]]


def losses(folder: Path, strategy: str) -> list[tuple[int, float, float]]:
    """Return (step, loss, learning rate) of every update, and of every validation, exactly as they were logged."""
    lines = read_metrics(folder / "run" / f"{strategy}-{PROCESSES[strategy]}" / "metrics.jsonl")
    train_lines = [(line["step"], line["train/loss"], line["train/lr"]) for line in lines if "train/loss" in line]
    return train_lines + [(line["step"], line["val/loss"], line["val/top1"]) for line in lines if "val/loss" in line]


def train_and_die(options: list[str], rank: int, step: int, micro_batch: int) -> int:
    """Like `train`, but the given process is killed in the middle of an update."""
    from baseline_ddp.measuring.timing import StepSplit

    def die(self, trainer, pl_module, batch, batch_idx):
        is_there = trainer.global_step == step and batch_idx % trainer.accumulate_grad_batches == micro_batch
        if trainer.global_rank == rank and is_there:
            os.kill(os.getpid(), signal.SIGKILL)

    StepSplit.on_train_batch_start = die
    return train(options)


@pytest.mark.parametrize("strategy", ["single", pytest.param("ddp", marks=pytest.mark.long), "fsdp"])
def test_killed_and_resumed_bit_by_bit(tmp_path, strategy):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    size = PROCESSES[strategy]
    assert run_cluster(size, arguments(whole, strategy), log=tmp_path / "log") == [0] * size
    rank, step = random.randrange(size), random.randint(4, 14)
    print(f"rank {rank} is killed at step {step}")
    options = arguments(killed, strategy)
    with Cluster(size, train_and_die, options, rank, step, random.randrange(2), log=tmp_path / "log") as cluster:
        cluster.processes[rank].join(100)
        assert cluster.processes[rank].exitcode == -signal.SIGKILL
        if size > 1:
            other = cluster.processes[1 - rank]
            other.join(60)
            assert other.exitcode == 0, "it has to notice by itself; `train` returned a status"
    if size > 1:
        assert "lost another process of this run" in (tmp_path / "log").read_text()
    assert run_cluster(size, [*options, "--resume"], log=tmp_path / "log") == [0] * size
    assert sorted(losses(killed, strategy)) == sorted(losses(whole, strategy))
    name = f"{strategy}-{size}"
    for file in ("last.ckpt", "best.ckpt"):
        weights = [
            torch.load(folder / "run" / name / "checkpoints" / file, weights_only=True)["state_dict"]
            for folder in (whole, killed)
        ]
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0]), file


def test_a_finished_run_goes_on(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    assert run_cluster(1, arguments(whole, "single"), log=tmp_path / "log") == [0]
    assert run_cluster(1, arguments(parts, "single", "--max-steps", 7), log=tmp_path / "log") == [0]
    assert run_cluster(1, arguments(parts, "single"), log=tmp_path / "log") == [2]
    assert "holds a run already: add --resume" in (tmp_path / "log").read_text()
    assert run_cluster(1, arguments(parts, "single", "--resume"), log=tmp_path / "log") == [0]
    summary, logbook = (parts / "run" / "single-1" / name for name in ("summary.json", "logbook.md"))
    found = json.loads(summary.read_text())
    assert (found["steps"], found["samples"], found["resumed_step"]) == (16, 16 * 32, 7)
    assert found["samples_per_second"] * sum(found["step_time_seconds"].values()) == pytest.approx(9 * 32)
    assert "Completed after 16 steps, resumed at step 7: 9 of them in " in logbook.read_text()
    assert "| training since step 7 |" in logbook.read_text()
    assert "resumed at step 7" in (tmp_path / "log").read_text()
    again = [line for line in losses(parts, "single") if line[0] != 7 or line in losses(whole, "single")]
    assert sorted(again) == sorted(losses(whole, "single"))  # step 7 was also validated, as the end of the first part


@pytest.mark.parametrize(("before", "after"), [((2, 8), (1, 8)), ((1, 8), (2, 8)), ((1, 4), (1, 16))])
def test_a_run_goes_on_with_other_processes_or_micro_batches(tmp_path, before, after):
    """An update of 32 samples takes 2 to 8 micro-batches of a process."""
    log, metrics = tmp_path / "log", tmp_path / "run" / "any" / "metrics.jsonl"
    for (size, micro_batch), more in ((before, ["--max-steps", 3]), (after, ["--max-steps", 6, "--resume"])):
        options = arguments(tmp_path, "ddp" if size > 1 else "single", "--name", "any", *more)
        options[options.index("--batch-size") + 1] = str(micro_batch)
        assert run_cluster(size, options, log=log) == [0] * size, log.read_text()
    lines = [line for line in read_metrics(metrics) if "train/loss" in line]
    samples = {line["step"]: round(line["perf/samples_per_second"] * line["perf/step_seconds"]) for line in lines}
    assert samples == dict.fromkeys(range(1, 7), 32)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_complete_run_has_nothing_to_resume(tmp_path, strategy):
    size, log = PROCESSES[strategy], tmp_path / "log"
    options = arguments(tmp_path, strategy, "--max-steps", 2)
    folder = tmp_path / "run" / f"{strategy}-{size}"
    assert run_cluster(size, options, log=log) == [0] * size
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    log.write_text("")
    assert run_cluster(size, [*options, "--resume"], log=log) == [0] * size
    assert f"Run run is complete at step 2 of 2: its results are in {folder / 'logbook.md'}." in log.read_text()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_results_that_a_kill_has_cost_are_made_again(tmp_path):
    options, folder = arguments(tmp_path, "single", "--max-steps", 2), tmp_path / "run" / "single-1"
    assert run_cluster(1, options, log=tmp_path / "log") == [0]
    (folder / "summary.json").unlink()
    assert run_cluster(1, [*options, "--resume"], log=tmp_path / "log") == [0], (tmp_path / "log").read_text()
    assert json.loads((folder / "summary.json").read_text())["outcome"] == "completed"
    assert "| training samples per second | - |" in (folder / "logbook.md").read_text()


@pytest.mark.parametrize(("killed_at", "said"), [(2, "the run begins anew"), (5, "best.ckpt holds as much")])
def test_killed_before_its_first_snapshot(tmp_path, killed_at, said):
    """A validation, and with it best.ckpt, comes after update 4."""
    whole, killed, log = tmp_path / "whole", tmp_path / "killed", tmp_path / "log"
    whole.mkdir()
    killed.mkdir()
    late = ["--snapshot-every", 100]
    assert run_cluster(1, arguments(whole, "single", *late), log=log) == [0]
    with Cluster(1, train_and_die, arguments(killed, "single", *late), 0, killed_at, 1, log=log) as cluster:
        cluster.processes[0].join(100)
    assert not (killed / "run" / "single-1" / "checkpoints" / "last.ckpt").exists()
    assert run_cluster(1, arguments(killed, "single", *late, "--resume"), log=log) == [0], log.read_text()
    assert said in log.read_text()
    assert sorted(losses(killed, "single")) == sorted(losses(whole, "single"))


def test_a_run_that_has_only_its_best_checkpoint_is_not_overwritten(tmp_path):
    log, checkpoints = tmp_path / "log", tmp_path / "run" / "single-1" / "checkpoints"
    options = arguments(tmp_path, "single", "--max-steps", 4)
    assert run_cluster(1, options, log=log) == [0]
    (checkpoints / "last.ckpt").unlink()
    before = (checkpoints / "best.ckpt").read_bytes(), (checkpoints.parent / "metrics.jsonl").read_bytes()
    assert run_cluster(1, options, log=log) == [2]
    assert "holds a run already: add --resume" in log.read_text()
    assert before == ((checkpoints / "best.ckpt").read_bytes(), (checkpoints.parent / "metrics.jsonl").read_bytes())


def test_a_worker_that_torchrun_starts_again_goes_on_with_its_own_run_only(tmp_path):
    log, snapshot = tmp_path / "log", tmp_path / "run" / "single-1" / "checkpoints" / "last.ckpt"
    restarted = {"TORCHELASTIC_RUN_ID": "one", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert run_cluster(1, arguments(tmp_path, "single", "--max-steps", 2), log=log) == [0]
    options, before = arguments(tmp_path, "single", "--max-steps", 4), snapshot.read_bytes()
    long_ago = time.time() - 365 * 24 * 3600
    os.utime(snapshot, (long_ago, long_ago))
    assert run_cluster(1, options, log=log, environment=restarted) == [2]
    assert "holds a run already: add --resume" in log.read_text()
    assert snapshot.read_bytes() == before
    os.utime(snapshot)  # newer than the start of torchrun, which here is the tests' fork server
    assert run_cluster(1, options, log=log, environment=restarted) == [0], log.read_text()
    assert "Going on from the snapshot of step 2" in log.read_text()


def test_a_run_that_never_was_cannot_be_resumed(tmp_path):
    assert run_cluster(1, arguments(tmp_path, "single", "--resume"), log=tmp_path / "log") == [2]
    assert "--resume finds no run in" in (tmp_path / "log").read_text()


def test_another_recipe_or_strategy_is_refused(tmp_path):
    assert run_cluster(1, arguments(tmp_path, "single", "--max-steps", 2), log=tmp_path / "log") == [0]
    path = tmp_path / "run" / "single-1" / "checkpoints" / "last.ckpt"
    before = path.read_bytes()
    assert check_resumable(path, RECIPE, "ddp") == 2
    with pytest.raises(InputError, match=r"another recipe .*learning_rate: there 0.003, now 0.1"):
        check_resumable(path, replace(RECIPE, learning_rate=0.1), "single")
    with pytest.raises(InputError, match="--strategy single"):
        check_resumable(path, RECIPE, "fsdp")
    options = arguments(tmp_path, "single", "--resume", "--learning-rate", 0.1)
    assert run_cluster(1, options, log=tmp_path / "log") == [2]
    assert path.read_bytes() == before
    assert read_metrics(path.parent.parent / "metrics.jsonl")


def test_what_is_no_checkpoint(tmp_path):
    path = tmp_path / "last.ckpt"
    with pytest.raises(InputError, match="cannot be read"):
        read_checkpoint(path)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(InputError, match="is no checkpoint, or is damaged"):
        read_checkpoint(path)
    torch.save({"weights": torch.zeros(2)}, path)
    with pytest.raises(InputError, match="no checkpoint of a training"):
        read_checkpoint(path)
    torch.save({"state_dict": os.system, "global_step": 1}, path)  # code instead of weights
    with pytest.raises(InputError, match="is no checkpoint, or is damaged"):
        read_checkpoint(path)


def test_a_full_disk_leaves_the_last_good_snapshot(tmp_path):
    """The kernel refuses to write more than 64 KiB to a file, as it does when a disk is full."""
    path = tmp_path / "last.ckpt"
    SnapshotIO().save_checkpoint({"global_step": 1, "state_dict": {}}, path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        with pytest.raises(RunFailed, match=r"could not be written .*The one before it is still there"):
            SnapshotIO().save_checkpoint({"weights": torch.zeros(2**16)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def train_on_a_full_disk(options: list[str], step: int) -> int:
    """Like `train`, but from the given step on, files in this process cannot grow beyond 64 KiB."""
    from baseline_ddp.measuring.timing import StepSplit

    def fill(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))

    StepSplit.on_train_batch_start = fill
    return train(options)


def test_a_run_on_a_full_disk_ends_with_a_sentence(tmp_path):
    options = arguments(tmp_path, "ddp", "--embed-dim", 64)
    log = tmp_path / "log"
    with Cluster(2, train_on_a_full_disk, options, 4, log=log) as cluster:
        assert cluster.results(60) == [1, 1]
    assert "error: The snapshot" in log.read_text()
    assert "Traceback" not in log.read_text()
    recipe = replace(RECIPE, embed_dim=64)
    assert check_resumable(tmp_path / "run" / "ddp-2" / "checkpoints" / "last.ckpt", recipe, "ddp") == 3


def test_random_states_come_back():
    state = random_state()
    drawn = torch.rand(3), np.random.rand(3), random.random()
    set_random_state(state)
    again = torch.rand(3), np.random.rand(3), random.random()
    assert torch.equal(drawn[0], again[0])
    assert (drawn[1] == again[1]).all()
    assert drawn[2] == again[2]


def test_lines_of_later_steps_are_forgotten(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "a": 0.1}\n{"step": 2}\n{"step": 3}\n{"ste')
    forget_after(metrics, 2)
    assert metrics.read_text() == '{"step": 1, "a": 0.1}\n{"step": 2}\n'
