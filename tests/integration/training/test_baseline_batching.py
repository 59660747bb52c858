"""Batches that divide, learning rates that scale, options that contradict, and the lines that nodes run."""

import math
import subprocess
import sys

import pytest

from baseline_ddp.batching import BatchPlan, plan_batches, scaled_learning_rate
from baseline_ddp.launch import launch_lines
from baseline_ddp.options import parse_options
from recipe.errors import InputError
from recipe.presets import PRESETS, preset
from tests.helpers.paths import ROOT


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_divides_by_itself(name, processes):
    target = preset(name).target_batch_size
    plan = plan_batches(target, None, processes)
    assert plan.global_batch == target
    assert plan.micro_batch <= 32


@pytest.mark.parametrize(
    ("target", "micro_batch", "processes", "parts"),
    [
        (512, 48, 2, ["--batch-size 32 or 64", "--target-batch-size 480 or 576"]),
        (512, None, 3, ["--target-batch-size 510 or 513"]),
        (8, 16, 1, ["--batch-size 8,", "--target-batch-size 16"]),
        (100, 100, 2, ["--batch-size 50,", "--target-batch-size 200"]),
    ],
)
def test_what_does_not_divide_is_refused_with_values_that_do(target, micro_batch, processes, parts):
    with pytest.raises(InputError) as refused:
        plan_batches(target, micro_batch, processes)
    assert all(part in str(refused.value) for part in parts)


def test_the_values_of_a_refusal_work():
    for micro_batch in (32, 64):
        assert plan_batches(512, micro_batch, 2).global_batch == 512
    for target in (480, 576):
        assert plan_batches(target, 48, 2) == BatchPlan(48, target // 96, 2)


def test_learning_rates():
    assert scaled_learning_rate(0.1, "none", 1024, 256) == 0.1
    assert scaled_learning_rate(0.1, "linear", 1024, 256) == pytest.approx(0.4)
    assert scaled_learning_rate(0.1, "sqrt", 1024, 256) == pytest.approx(0.1 * math.sqrt(4))


def test_the_recipe_of_a_command_line():
    same = parse_options(["--recipe", "digits"]).build_recipe()
    assert same == preset("digits")
    options = parse_options(["--lr-scaling", "linear", "--target_batch_size", "1024", "--precision", "bf16-mixed"])
    recipe = options.build_recipe()
    assert recipe.learning_rate == pytest.approx(2 * same.learning_rate)  # the preset's is for 512
    assert recipe.precision == "bf16-mixed"
    options = parse_options(["--lr-scaling", "sqrt", "--lr-base-batch", "128"])
    assert options.build_recipe().learning_rate == pytest.approx(2 * same.learning_rate)


def test_a_recipe_of_a_file(tmp_path):
    path = tmp_path / "recipe.json"
    path.write_text(preset("synthetic").to_json())
    assert parse_options(["--recipe", str(path)]).build_recipe() == preset("synthetic")
    with pytest.raises(InputError, match="cannot be read"):
        parse_options(["--recipe", str(tmp_path / "none.json")]).build_recipe()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--target-accuracy 95", "between 0 and 1, such as 0.95"),
        ("--max-time 1h", "HH:MM:SS"),
        ("--max-time 00:00:00", "at least 00:00:01"),
        ("--max-steps 0", "at least 1"),
        ("--batch-size 0", "at least 1"),
        ("--num-workers -1", "at least 0"),
        ("--run-id ../up", "--run-id"),
        ("--resume", "give --run-id"),
        ("--logger aim", "--logger tensorboard, wandb"),
        ("--nnodes 2", "torchrun starts the processes"),
    ],
)
def test_options_that_cannot_work(arguments, message):
    with pytest.raises(InputError, match=message):
        parse_options(arguments.split())


def test_one_line_for_every_node():
    options = "--print-launch --nnodes 4 --nproc_per_node=2 --master-addr 10.0.0.1 --max-restarts 3 --recipe synthetic"
    arguments = options.split()
    lines = launch_lines(parse_options(arguments).launch, arguments)
    assert len(lines) == 4
    for rank, line in enumerate(lines):
        assert line == (
            f"torchrun --nnodes 4 --node-rank {rank} --nproc-per-node 2 --master-addr 10.0.0.1 --master-port 29500 "
            "--rdzv-conf timeout=120 --max-restarts 3 baseline_ddp/train.py --recipe synthetic"
        )
    alone = ["--print-launch", "--nproc-per-node", "8"]
    assert launch_lines(parse_options(alone).launch, alone) == [
        "torchrun --standalone --nproc-per-node 8 baseline_ddp/train.py"
    ]
    with pytest.raises(InputError, match="--master-addr"):
        launch_lines(parse_options(["--print-launch", "--nnodes", "2"]).launch, [])


def test_printing_and_refusing_import_nothing_slow(tmp_path):
    """It also shows that the file works from any folder."""
    script = str(ROOT / "baseline_ddp" / "train.py")
    printed = subprocess.run(
        [sys.executable, "-X", "importtime", script, "--print-launch"], capture_output=True, text=True, cwd=tmp_path
    )
    assert printed.stdout == "torchrun --standalone --nproc-per-node 1 baseline_ddp/train.py\n"
    imported = {line.rpartition("|")[2].strip() for line in printed.stderr.splitlines()}
    assert not imported & {"torch", "lightning", "numpy"}
    refused = subprocess.run(
        [sys.executable, script, "--target-accuracy", "95"], capture_output=True, text=True, cwd=tmp_path
    )
    assert refused.returncode == 2
    assert refused.stderr == "error: --target-accuracy is 95: give a fraction between 0 and 1, such as 0.95.\n"
