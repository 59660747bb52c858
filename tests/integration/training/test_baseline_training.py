"""The same 20 updates by one process, DDP, FSDP and a one-peer swarm; and the contents of a run's folder."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from baseline_ddp.evaluate import evaluate
from recipe.config import Recipe
from recipe.errors import InputError
from recipe.presets import preset
from recipe.run_folder import RunFolder, read_metrics
from tests.helpers.clusters import run_cluster, run_processes

RECIPE = replace(
    preset("digits"),
    embed_dim=32,
    depth=2,
    num_heads=2,
    augmentation="light",
    warmup_steps=2,
    total_steps=20,
    target_batch_size=64,
    validate_every_steps=8,
)
STEPS = list(range(1, 21))


def curve(folder: Path, tag: str) -> list[float]:
    return [line[tag] for line in read_metrics(folder / "metrics.jsonl") if tag in line]


def train_in_a_swarm(output_dir: str) -> None:
    """Train one peer alone, on the baseline's order of samples."""
    from recipe.registry import build_data, build_task
    from recipe.training.trainer import build_trainer
    from swarm.network.dht_options import NetworkOptions, start_dht, stop_dht
    from swarm.training.strategy import SwarmStrategy

    dht = start_dht(NetworkOptions(host_maddrs=("/ip4/127.0.0.1/tcp/0",)))
    try:
        strategy = SwarmStrategy(RECIPE.target_batch_size, "parity", dht=dht)
        folder = RunFolder.create(output_dir, "parity", "swarm-1")
        trainer = build_trainer(RECIPE, folder, accelerator="cpu", strategy=strategy)
        trainer.fit(build_task(RECIPE), build_data(RECIPE, batch_size=8))
        trainer.save_checkpoint(folder.checkpoints / "last.ckpt")
    finally:
        stop_dht(dht)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folder of the finished runs single-1, ddp-2, fsdp-2 and swarm-1, and of their output."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = folder / "recipe.json"
    recipe.write_text(RECIPE.to_json())
    common = ["--recipe", recipe, "--output-dir", folder, "--run-id", "parity", "--batch-size", 8]
    for name, processes in (("single", 1), ("ddp", 2), ("fsdp", 2)):
        log = folder / f"{name}.log"
        codes = run_cluster(processes, [*common, "--strategy", name, "--snapshot-every", 10], log=log)
        assert codes == [0] * processes, log.read_text()
    run_processes(1, train_in_a_swarm, str(folder))
    return folder / "parity"


@pytest.mark.parametrize(("name", "tolerance"), [("ddp-2", 1e-5), ("fsdp-2", 1e-5), ("swarm-1", 1e-5)])
def test_equal_loss_curves(runs, name, tolerance):
    """Sums in another order round differently; the losses are about 2.3, and float32 has seven digits."""
    expected, found = curve(runs / "single-1", "train/loss"), curve(runs / name, "train/loss")
    assert len(expected) == 20
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=tolerance, rtol=0)
    torch.testing.assert_close(curve(runs / name, "train/lr"), curve(runs / "single-1", "train/lr"))


def test_a_swarm_of_one_ends_with_the_same_weights(runs):
    one, other = (weights_of(runs / name / "checkpoints" / "last.ckpt") for name in ("single-1", "swarm-1"))
    torch.testing.assert_close(other, one, rtol=0, atol=2e-6)


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the weights without the keys' biases.

    Softmax ignores what all keys have in common, so the gradient of their bias is rounding noise, which AdamW
    amplifies to full size (4e-4 after 20 steps)."""
    weights = torch.load(checkpoint, weights_only=False)["state_dict"]
    return {n: torch.cat(w.chunk(3)[::2]) if n.endswith("qkv.bias") else w for n, w in weights.items()}


@pytest.mark.parametrize("name", ["ddp-2", "fsdp-2", "swarm-1"])
def test_a_divided_validation_counts_every_sample_once(runs, name):
    """270 samples in shards of 135 and micro-batches of 8: a sample more or less would change the fractions."""
    for tag in ("val/top1", "val/top5", "val/macro_f1", "val/precision", "val/recall"):
        assert curve(runs / name, tag) == pytest.approx(curve(runs / "single-1", tag), abs=1e-6), tag
    assert curve(runs / name, "val/loss") == pytest.approx(curve(runs / "single-1", "val/loss"), abs=1e-5)


def test_fsdp_really_shards(tmp_path):
    assert run_processes(2, shard_sizes) == [(True, True)] * 2


def shard_sizes() -> tuple[bool, bool]:
    """Whether this process holds about half of the parameters, and sends no gradients while it accumulates."""
    from datetime import timedelta

    import lightning as L
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from baseline_ddp.measuring.timing import Stopwatch
    from baseline_ddp.options import ComputeOptions
    from baseline_ddp.processes import Processes
    from baseline_ddp.strategies import ShardedStrategy, cluster_environment, prepare_task
    from recipe.registry import build_data

    sent = []
    reduce_scatter = dist.reduce_scatter_tensor

    def counted(*arguments, **options):
        sent.append(1)
        return reduce_scatter(*arguments, **options)

    dist.reduce_scatter_tensor = counted
    with Processes.from_environment().connected(torch.device("cpu"), 30, 30):
        task = prepare_task("fsdp", RECIPE, ComputeOptions(), Stopwatch(), torch.device("cpu"))
        whole = task.num_parameters
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=ShardedStrategy(2, timedelta(seconds=30)),
            plugins=[cluster_environment("fsdp")],
            accumulate_grad_batches=4,
            max_steps=3,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(task, build_data(RECIPE, batch_size=8))
        own = sum(p.to_local().numel() for p in task.parameters() if isinstance(p, DTensor))
        modules = RECIPE.depth + 1
    return abs(own / whole - 0.5) < 0.1, len(sent) == 3 * modules


def test_ddp_sends_gradients_once_per_update(tmp_path):
    recipe = tmp_path / "recipe.json"
    recipe.write_text(RECIPE.to_json())
    arguments = ["--recipe", recipe, "--output-dir", tmp_path, "--run-id", "r", "--batch-size", 8, "--max-steps", 3]
    assert run_processes(2, count_hook_calls, [str(argument) for argument in arguments]) == [3, 3]


def count_hook_calls(arguments: list[str]) -> int:
    """Return the number of updates at which DDP averaged gradients; the small model is one bucket."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    from baseline_ddp.train import main

    last_buckets = []
    hook = default_hooks.allreduce_hook

    def counted(state, bucket):
        if bucket.is_last():
            last_buckets.append(1)
        return hook(state, bucket)

    default_hooks.allreduce_hook = counted
    assert main(arguments) == 0
    return len(last_buckets)


def test_all_metrics_of_a_validation_are_summed_in_one_call(tmp_path):
    """Each call is a round trip or two over the line between the processes."""
    recipe = tmp_path / "recipe.json"
    recipe.write_text(replace(RECIPE, validate_every_steps=1).to_json())
    arguments = ["--recipe", recipe, "--output-dir", tmp_path, "--run-id", "r", "--batch-size", 8, "--max-steps", 2]
    assert run_processes(2, count_calls_of_validations, [str(argument) for argument in arguments]) == [[1, 1]] * 2


def count_calls_of_validations(arguments: list[str]) -> list[int]:
    """Return the number of collective calls that the metrics of each validation make."""
    import torch.distributed as dist

    from baseline_ddp.train import main
    from recipe.training.task import ClassificationTask

    calls, found = [], []
    for name in ("all_reduce", "all_gather", "all_gather_object", "barrier", "broadcast"):
        setattr(dist, name, counted_in(calls, getattr(dist, name)))
    log = ClassificationTask.on_validation_epoch_end

    def logged(task):
        before = len(calls)
        log(task)
        found.append(len(calls) - before)

    ClassificationTask.on_validation_epoch_end = logged
    assert main(arguments) == 0
    return found


def counted_in(calls: list[int], function):
    def counted(*arguments, **options):
        calls.append(1)
        return function(*arguments, **options)

    return counted


@pytest.mark.parametrize("name", ["single-1", "ddp-2", "fsdp-2"])
def test_what_is_measured_at_every_step(runs, name):
    lines = read_metrics(runs / name / "metrics.jsonl")
    by_step = {step: {} for step in STEPS}
    for line in lines:
        by_step[line["step"]] |= line
    tags = {"train/loss", "train/top1", "train/top5", "train/lr", "perf/samples_per_second", "perf/step_seconds"}
    parts = {"perf/data_seconds", "perf/compute_seconds", "perf/communication_seconds"}
    resources = {
        f"resources/rank{rank}/{what}" for rank in range(int(name[-1])) for what in ("cpu_percent", "memory_gib")
    }
    for step, values in by_step.items():
        assert values.keys() >= tags | parts | resources, step
        assert sum(values[part] for part in parts) == pytest.approx(values["perf/step_seconds"], rel=0.1, abs=0.01)
        assert values["perf/samples_per_second"] * values["perf/step_seconds"] == pytest.approx(64)
    assert [line["step"] for line in lines if "val/loss" in line] == [8, 16, 20]
    communication = [values["perf/communication_seconds"] for values in by_step.values()]
    assert (max(communication) == 0) if name == "single-1" else (min(communication) > 0)
    events = EventAccumulator(str(runs / name / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) >= tags | parts | resources | {"val/top1", "val/top5", "val/loss"}


@pytest.mark.parametrize("name", ["single-1", "ddp-2", "fsdp-2"])
def test_the_run_folder_is_complete(runs, name):
    folder = runs / name
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["outcome"] == "completed"
    assert (summary["steps"], summary["samples"], summary["global_batch"]) == (20, 20 * 64, 64)
    assert summary["micro_batch"] * summary["accumulation"] * summary["processes"] == 64
    assert Recipe.from_json((folder / "recipe.json").read_text()) == RECIPE
    for picture in ("curves.png", "confusion.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
    logbook = (folder / "logbook.md").read_text()
    sections = re.findall(r"^## (.*)$", logbook, re.MULTILINE)
    assert sections[:5] == ["Command", "Code and machine", "Recipe", "Batch", "Results"]
    assert f"| test (best.ckpt of step {json.loads((folder / 'test.json').read_text())['step']}" in logbook
    assert "None" not in logbook


def test_test_result_against_counting_by_hand(runs):
    from recipe.registry import build_data, build_task

    result = json.loads((runs / "ddp-2" / "test.json").read_text())
    task = build_task(RECIPE)
    checkpoint = torch.load(runs / "ddp-2" / "checkpoints" / "best.ckpt", weights_only=True)
    task.load_state_dict(checkpoint["state_dict"])
    task.eval()
    images, labels = next(iter(build_data(RECIPE, batch_size=1000).test_dataloader()))
    with torch.no_grad():
        guesses = task(images).argsort(descending=True)
    hits = guesses[:, 0] == labels
    assert result["samples"] == len(labels) == 270
    assert result["top1"] == pytest.approx(hits.float().mean().item())
    assert result["top5"] == pytest.approx((guesses[:, :5] == labels[:, None]).any(1).float().mean().item())
    for index in range(10):
        assert result["per_class_accuracy"][index] == pytest.approx(hits[labels == index].float().mean().item())
        assert result["confusion"][index][3] == ((labels == index) & (guesses[:, 0] == 3)).sum()


def test_a_checkpoint_of_a_swarm_is_tested_as_well(runs):
    checkpoint = runs / "swarm-1" / "checkpoints" / "last.ckpt"
    found = evaluate(checkpoint, Path("data"), 64, torch.device("cpu"))
    expected = evaluate(runs / "single-1" / "checkpoints" / "last.ckpt", Path("data"), 64, torch.device("cpu"))
    assert found.step == 20
    assert (found.top1, found.confusion) == (expected.top1, expected.confusion)


def test_a_pretrained_checkpoint_is_tested_without_the_weights_that_it_replaces(tmp_path, monkeypatch):
    recipe, asked = replace(preset("cifar10-vit-base"), model="vit_tiny_patch16_224", image_size=32), []

    def build(recipe: Recipe):
        asked.append(recipe.pretrained)
        raise InputError("no need to build it here")

    monkeypatch.setattr("baseline_ddp.evaluate.build_task", build)
    torch.save({"state_dict": {}, "global_step": 1, "recipe": recipe.to_json()}, tmp_path / "moved.ckpt")
    with pytest.raises(InputError, match="no need"):
        evaluate(tmp_path / "moved.ckpt", Path("data"), 64, torch.device("cpu"))
    assert (recipe.pretrained, asked) == (True, [False]), "else it asks the network for them"
