"""Options of the baseline that change how a recipe is computed and when it stops, and options that cannot work."""

import io
import json
import math
import os
import re
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from baseline_ddp import scaling
from baseline_ddp.measuring.resources import ResourceMeter
from baseline_ddp.measuring.timing import StepSplit, Stopwatch
from baseline_ddp.options import ComputeOptions
from baseline_ddp.processes import Processes, RunFailed
from baseline_ddp.scaling import ScalingOptions, scaling_table, summarise
from baseline_ddp.strategies import choose_strategy, prepare_task
from baseline_ddp.train import main
from recipe.data.benchmark import DataBenchmarkOptions, DataRates, measure, verdict
from recipe.errors import InputError
from recipe.presets import preset
from recipe.run_folder import RunFolder, read_metrics
from recipe.training.launched import store_of_this_attempt
from tests.helpers.clusters import Cluster, run_processes, silent_listener, train
from tests.helpers.programs.ports import free_port

RECIPE = replace(
    preset("digits"),
    embed_dim=32,
    depth=1,
    num_heads=2,
    warmup_steps=2,
    total_steps=16,
    target_batch_size=32,
    validate_every_steps=8,
)
CPU = torch.device("cpu")


def run(folder: Path, processes: int, *more: object, function=train) -> dict:
    """Train, and return the summary of the finished run."""
    recipe = folder / "recipe.json"
    recipe.write_text(RECIPE.to_json())
    options = ["--recipe", recipe, "--output-dir", folder, "--run-id", "run", "--name", "it", "--batch-size", 8, *more]
    log = folder / "log"
    assert run_processes(processes, function, [str(option) for option in options], log=log) == [0] * processes, (
        log.read_text()
    )
    return json.loads((folder / "run" / "it" / "summary.json").read_text())


def test_communication_hooks_learn_the_same(tmp_path):
    losses = {}
    for hook in ("none", "fp16", "powersgd"):
        (tmp_path / hook).mkdir()
        losses[hook] = run(tmp_path / hook, 2, "--comm-hook", hook)["train_loss"]
    assert losses["fp16"] == pytest.approx(losses["none"], abs=0.01)
    assert losses["fp16"] != losses["none"]
    assert losses["powersgd"] == pytest.approx(losses["none"], abs=0.3)
    assert losses["powersgd"] != losses["none"]


def test_powersgd_on_a_model_of_several_buckets_ends(tmp_path):
    """With several of DDP's usual buckets of 25 MiB, torch's hook hangs on gloo at its first compressed update."""
    large = ["--embed-dim", 768, "--depth", 2, "--num-heads", 2, "--max-steps", 4]
    summary = run(tmp_path, 4, *large, "--comm-hook", "powersgd", "--powersgd-warmup-steps", 2)
    assert summary["steps"] == 4


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "more"), [("ddp", ["--channels-last"]), ("fsdp", [])])
def test_convolutions_in_bfloat16(tmp_path, strategy, more):
    """A ResNet also has BatchNorm statistics, which are neither sharded nor averaged."""
    model = ["--model", "resnet10t", "--image-size", 16, "--max-steps", 2]
    summary = run(tmp_path, 2, *model, "--strategy", strategy, "--precision", "bf16-mixed", *more)
    assert (summary["precision"], summary["steps"]) == ("bf16-mixed", 2)
    weights = torch.load(tmp_path / "run" / "it" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert weights["model.conv1.3.weight"].is_contiguous(memory_format=torch.channels_last) == bool(more)


def train_on_little_memory(arguments: list[str]) -> int:
    """Like `train`, on a device where 20 samples fit and 21 do not."""
    from recipe.training.task import ClassificationTask

    step = ClassificationTask.training_step

    def limited(self, batch, batch_idx):
        if len(batch[1]) > 20:
            raise RuntimeError("CUDA out of memory.")
        return step(self, batch, batch_idx)

    ClassificationTask.training_step = limited
    return train(arguments)


def test_the_largest_batch_is_found_and_recorded(tmp_path):
    options = ["--batch-size", "auto", "--target-batch-size", 64, "--max-steps", 2]
    summary = run(tmp_path, 2, *options, function=train_on_little_memory)
    assert (summary["largest_batch"], summary["micro_batch"], summary["accumulation"]) == (20, 16, 2)
    assert "| largest micro-batch (ddp, 32) | 20 samples |" in (tmp_path / "run" / "it" / "logbook.md").read_text()


def test_where_everything_fits_the_global_batch_is_the_limit(tmp_path):
    summary = run(tmp_path, 1, "--batch-size", "auto", "--max-steps", 1)
    assert (summary["largest_batch"], summary["micro_batch"], summary["accumulation"]) == (32, 32, 1)


def test_all_processes_stop_at_the_same_step(tmp_path):
    (tmp_path / "time").mkdir()
    summary = run(tmp_path / "time", 2, "--max-time", "00:00:02", "--total-steps", 100_000)
    assert summary["outcome"] == "time is up"
    assert 0 < summary["steps"] < 100_000
    assert summary["val_accuracy"] is not None
    summary = run(tmp_path, 2, "--target-accuracy", 0.01)
    assert (summary["outcome"], summary["steps"]) == ("target accuracy reached", 8)


def interrupt_self(arguments: list[str], rank: int, update: int = 4) -> int:
    """Like `train`, but the given process gets Ctrl-C in the middle of this update."""

    def interrupt(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == rank and trainer.global_step == update - 1:
            os.kill(os.getpid(), signal.SIGINT)

    StepSplit.on_train_batch_start = interrupt
    return train(arguments)


@pytest.mark.parametrize(("processes", "rank"), [(1, 0), (2, 1)])
def test_interrupted_and_resumed(tmp_path, processes, rank):
    recipe, log = tmp_path / "recipe.json", tmp_path / "log"
    recipe.write_text(RECIPE.to_json())
    options = ["--recipe", recipe, "--output-dir", tmp_path, "--run-id", "run", "--name", "it", "--batch-size", 8]
    options = [str(option) for option in options]
    statuses = run_processes(processes, interrupt_self, options, rank, log=log)
    assert statuses == [130, 0][:processes], log.read_text()
    folder = tmp_path / "run" / "it"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["outcome"], summary["test_accuracy"]) == ("interrupted", None)
    assert 4 <= summary["steps"] <= 5, "the other process hears of it one update later"
    assert summary["val_accuracy"] is None, "a validation may take longer than is left until torchrun kills them"
    assert "--run-id run --resume" in log.read_text().splitlines()[-1]
    assert run_processes(processes, train, [*options, "--resume"], log=log) == [0] * processes, log.read_text()
    steps = [line["step"] for line in read_metrics(folder / "metrics.jsonl") if "train/loss" in line]
    assert steps == list(range(1, 17))
    assert json.loads((folder / "summary.json").read_text())["outcome"] == "completed"


def test_an_interrupt_in_an_update_with_a_validation_skips_the_validation(tmp_path):
    """Also where another process was interrupted."""
    (recipe := tmp_path / "recipe.json").write_text(RECIPE.to_json())
    options = ["--recipe", recipe, "--output-dir", tmp_path, "--run-id", "run", "--name", "it", "--batch-size", 8]
    log = tmp_path / "log"
    assert run_processes(2, interrupt_self, [str(option) for option in options], 1, 8, log=log) == [130, 0], (
        log.read_text()
    )
    summary = json.loads((tmp_path / "run" / "it" / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"], summary["val_accuracy"]) == ("interrupted", 8, None)


def test_weights_and_biases_without_an_account(tmp_path):
    pytest.importorskip("wandb")
    run(tmp_path, 1, "--logger", "tensorboard,wandb", "--max-steps", 2)
    assert list((tmp_path / "run" / "it" / "wandb").glob("offline-run-*/*.wandb"))


def train_and_compile_here(options: list[str]) -> int:
    """Train with compilation in this process. torch would start processes for that, whose imports can take minutes."""
    torch._inductor.config.compile_threads = 1
    return train(options)


@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPUs")
@pytest.mark.long
def test_a_compiled_model_learns_the_same(tmp_path):
    losses = {}
    for name, more in (("eager", []), ("compiled", ["--compile"])):
        (tmp_path / name).mkdir()
        options = ["--max-steps", 4, "--depth", 2, "--drop-path", 0.5, *more]  # both draw the same random numbers
        losses[name] = run(tmp_path / name, 1, *options, function=train_and_compile_here)["train_loss"]
    assert losses["compiled"] == pytest.approx(losses["eager"], abs=1e-4)
    weights = torch.load(tmp_path / "compiled/run/it/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert (
        weights.keys()
        == prepare_task("single", replace(RECIPE, depth=2), ComputeOptions(), Stopwatch(), CPU).state_dict().keys()
    )


@pytest.mark.parametrize(
    ("options", "processes", "message"),
    [
        ({"strategy": "single"}, 2, "give --strategy ddp or fsdp"),
        ({"comm_hook": "fp16", "strategy": "fsdp"}, 2, "DDP only"),
        ({"comm_hook": "fp16"}, 1, "DDP only"),
        ({"precision": "16-mixed"}, 1, "bf16-mixed"),
        ({"sync_batchnorm": True}, 2, "GPUs only"),
        ({"channels_last": True, "strategy": "fsdp"}, 2, "leave out --channels-last"),
    ],
)
def test_options_that_contradict_each_other(options, processes, message):
    with pytest.raises(InputError, match=message):
        choose_strategy(ComputeOptions(**options), Processes(size=processes, local_size=processes), CPU)


def test_the_strategy_follows_from_the_processes():
    assert choose_strategy(ComputeOptions(), Processes(), CPU) == "single"
    assert choose_strategy(ComputeOptions(), Processes(size=2, local_size=2), CPU) == "ddp"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_gpus_that_are_not_there():
    with pytest.raises(InputError, match="give --device cpu"):
        Processes().device("cuda")


def connect(monkeypatch, rank: int, address: tuple[str, int], seconds: float) -> float:
    monkeypatch.setenv("MASTER_ADDR", address[0])
    monkeypatch.setenv("MASTER_PORT", str(address[1]))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.setenv(name, {"RANK": str(rank), "WORLD_SIZE": "2"}.get(name, "0"))
    began = time.monotonic()
    with (
        pytest.raises(RunFailed, match=r"did not (answer|find each other at)") as failed,
        Processes(rank=rank, size=2).connected(CPU, seconds, 60),
    ):
        pass
    assert f"{address[0]}:{address[1]}" in str(failed.value)
    return time.monotonic() - began


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_process_ends_the_start_in_time(monkeypatch, rank):
    """The first process waits for the other ones, and they wait for the first."""
    assert connect(monkeypatch, rank, ("127.0.0.1", free_port()), 2) < 10


def test_another_program_at_the_address_ends_the_start_in_time(monkeypatch):
    with silent_listener() as address:
        assert connect(monkeypatch, 1, address, 2) < 15


def test_a_restarted_process_is_not_misled_by_what_is_left_in_the_store():
    """The first process comes last: until then the others see the name of an attempt that is over."""
    shared = torch.distributed.HashStore()
    for _ in range(3):
        with ThreadPoolExecutor() as pool:
            others = [pool.submit(store_of_this_attempt, shared, rank, 3) for rank in (1, 2)]
            time.sleep(0.2)
            assert not any(other.done() for other in others)
            first = store_of_this_attempt(shared, 0, 3)
            assert not first.check(["greeting"])
            first.set("greeting", "hello")
            assert all(other.result(10).get("greeting") == b"hello" for other in others)


def count_blocking_collectives(arguments: list[str]) -> list[tuple[int, int]]:
    """Like `train`; returns the global step and the collectives waited for so far, at each micro-batch."""
    seen, calls = [], []

    def counted(function):
        def call(*args, async_op=False, **kwargs):
            calls.extend([function] * (not async_op))
            return function(*args, async_op=async_op, **kwargs)

        return call

    for name in ("broadcast", "all_reduce", "all_gather", "all_gather_into_tensor", "reduce", "gather"):
        setattr(torch.distributed, name, counted(getattr(torch.distributed, name)))
    start = StepSplit.on_train_batch_start

    def noted(self, trainer, pl_module, batch, batch_idx):
        seen.append((trainer.global_step, len(calls)))
        start(self, trainer, pl_module, batch, batch_idx)

    StepSplit.on_train_batch_start = noted
    assert train(arguments) == 0
    return seen


def test_no_process_waits_for_another_within_an_update(tmp_path):
    recipe = tmp_path / "recipe.json"
    recipe.write_text(RECIPE.to_json())
    options = ["--recipe", recipe, "--output-dir", tmp_path, "--run-id", "run", "--batch-size", 4]
    arguments = [str(option) for option in options]
    for seen in run_processes(2, count_blocking_collectives, arguments, log=tmp_path / "log"):
        counts = [calls for step, calls in seen if 2 <= step < 7]  # the first validation comes at step 8
        assert len(counts) == 5 * 4
        assert counts[-1] == counts[0], "over a slow network each of them costs a round trip"


def stop_answering(arguments: list[str]) -> int:
    """Like `train`, but the second process goes to sleep at step 3."""

    def sleep(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 1 and trainer.global_step == 3:
            time.sleep(600)

    StepSplit.on_train_batch_start = sleep
    return train(arguments)


def test_a_process_that_no_longer_answers(tmp_path):
    recipe = tmp_path / "recipe.json"
    recipe.write_text(RECIPE.to_json())
    options = ["--recipe", recipe, "--output-dir", tmp_path, "--run-id", "run", "--collective-timeout", 5]
    with Cluster(2, stop_answering, [str(option) for option in options], log=tmp_path / "log") as cluster:
        cluster.processes[0].join(60)
        assert cluster.processes[0].exitcode == 0, "it ended; `train` returned a status"
    assert "error: Process 0 lost another process of this run" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("arguments", [["--test", "none.ckpt"], ["--recipe", "digit"], ["--batch-size", "33"]])
def test_one_sentence_and_status_2(arguments, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_a_checkpoint_alone(tmp_path, capfd):
    run(tmp_path, 1, "--max-steps", 8)
    checkpoint = tmp_path / "run" / "it" / "checkpoints" / "best.ckpt"
    assert main(["--test", str(checkpoint)]) == 0
    shown = capfd.readouterr().out
    assert "official test split, 270 samples" in shown
    numbers = json.loads(checkpoint.with_suffix(".test.json").read_text())
    after_training = json.loads((tmp_path / "run" / "it" / "test.json").read_text())
    assert numbers["loss"] == pytest.approx(after_training["loss"], abs=1e-5)  # other micro-batches round differently
    assert numbers | {"loss": 0} == after_training | {"loss": 0}
    assert checkpoint.with_suffix(".confusion.png").read_bytes().startswith(b"\x89PNG")


def finished_run(folder: Path, processes: int, rate: float, **numbers: float | None) -> RunFolder:
    made = RunFolder(folder / f"{processes}-{len(list(folder.iterdir()))}")
    made.path.mkdir()
    parts = {"perf/data_seconds": 1.0, "perf/compute_seconds": 8.0}
    lines = [{"step": step, "perf/samples_per_second": rate, "perf/communication_seconds": 1.0} for step in range(1, 6)]
    for line in lines[:2]:  # the warm-up
        line |= {"perf/samples_per_second": 1.0, "perf/communication_seconds": 50.0}
    lines = [line | parts for line in lines]
    made.metrics.write_text("\n".join(map(json.dumps, lines)))
    summary = {"learning_rate": 0.1, "global_batch": 100, "steps_per_epoch": 4.0, "best_val_loss": 1.0}
    made.summary.write_text(json.dumps({**summary, "test_accuracy": 0.5, **numbers}))
    return made


def test_the_scaling_table_against_counting_by_hand(tmp_path):
    one = summarise(1, [finished_run(tmp_path, 1, 200.0)], None)
    two = summarise(2, [finished_run(tmp_path, 2, 300.0)], one)
    assert (one.throughput, one.efficiency, one.epoch_seconds) == (200.0, 1.0, 2.0)
    assert two.efficiency == pytest.approx(300 / 400)
    assert two.communication_share == pytest.approx(0.1)
    table = scaling_table([one, two], ScalingOptions())
    assert [len(list(column.cells)) for column in table.columns] == [10] * 3


def test_the_scaling_table_with_trainings_that_have_diverged(tmp_path):
    diverged = [
        finished_run(tmp_path, processes, 200.0, best_val_loss=None, test_accuracy=None) for processes in (1, 2, 2)
    ]
    one = summarise(1, [diverged[0], finished_run(tmp_path, 1, 200.0)], None)
    two = summarise(2, diverged[1:], one)
    assert (one.best_val_loss, one.test_accuracy) == (1.0, 0.5)
    assert (two.best_val_loss, two.test_accuracy) == (None, None)
    shown = Console(width=200, record=True, file=io.StringIO())
    shown.print(scaling_table([one, two], ScalingOptions()))
    assert re.search(r"best validation loss[ │]+1.0000[ │]+-", shown.export_text())


def test_a_comparison_that_is_interrupted_says_so(monkeypatch, capsys):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(scaling, "compare", interrupt)
    assert scaling.main([]) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_the_data_benchmark(tmp_path):
    rates = measure(RECIPE, DataBenchmarkOptions(seconds=0.2, device="cpu"))
    assert rates.loader_samples > rates.training_samples > 0
    assert rates.tensor_megabytes == pytest.approx(rates.loader_samples * 8 * 8 * 4 / 1e6)
    assert rates.file_megabytes is None
    assert "not the limit" in verdict(rates)
    assert "raise --num-workers" in verdict(DataRates(50.0, 100.0, 1.0, 1.0))


def test_the_gpu_is_read_by_nvml(monkeypatch):
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 75)
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda device: 3 * 2**30)
    values = ResourceMeter(torch.device("cuda", 0)).take(1.0)
    assert (values["resources/gpu_percent"], values["resources/gpu_memory_gib"]) == (75.0, 3.0)


def test_a_gpu_that_nvml_tells_nothing_of_ends_no_training(monkeypatch):
    """Such as a slice of a GPU (MIG)."""

    class NVMLError(Exception):
        """As in pynvml: it is no RuntimeError."""

    def refuse(device):
        raise NVMLError("Not Supported")

    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    with pytest.warns(match=r"utilisation \(Not Supported\): training goes on without it"):
        values = ResourceMeter(torch.device("cuda", 0)).take(1.0)
    assert math.isnan(values["resources/gpu_percent"])
    assert math.isnan(values["resources/gpu_memory_gib"])
    assert values["resources/memory_gib"] > 0
