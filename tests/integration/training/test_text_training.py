"""Texts under one process, DDP and FSDP: the same losses, and the same metrics as for images."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipe.presets import preset
from recipe.run_folder import read_metrics
from tests.helpers.clusters import run_processes, train

STEPS = 4
RECIPE = replace(
    preset("docstrings"),
    embed_dim=32,
    depth=2,
    num_heads=2,
    warmup_steps=1,
    total_steps=STEPS,
    target_batch_size=32,
    validate_every_steps=STEPS,
)


def train_without_dropout(arguments: list[str]) -> int:
    """Processes draw other units to drop."""
    from recipe.text import encoder

    encoder.DROPOUT = 0.0
    return train(arguments)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Folder of the finished runs single-1, ddp-2 and fsdp-2."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "recipe.json").write_text(RECIPE.to_json())
    common = ["--recipe", folder / "recipe.json", "--output-dir", folder, "--run-id", "texts", "--batch-size", 8]
    for name, processes in (("single", 1), ("ddp", 2), ("fsdp", 2)):
        arguments = [str(one) for one in [*common, "--strategy", name]]
        log = folder / f"{name}.log"
        assert run_processes(processes, train_without_dropout, arguments, log=log) == [0] * processes, log.read_text()
    return folder / "texts"


@pytest.mark.parametrize("name", ["ddp-2", "fsdp-2"])
def test_equal_loss_curves(runs, name):
    """Losses are about 1.4; sums in another order round differently."""

    def losses(folder: Path) -> torch.Tensor:
        lines = read_metrics(folder / "metrics.jsonl")
        return torch.tensor([line["train/loss"] for line in lines if "train/loss" in line])

    expected, found = losses(runs / "single-1"), losses(runs / name)
    assert len(expected) == STEPS
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["single-1", "ddp-2", "fsdp-2"])
def test_the_metrics_are_those_of_images(runs, name):
    lines = read_metrics(runs / name / "metrics.jsonl")
    tags = set().union(*lines)
    assert {f"val/{metric}" for metric in ("loss", "top1", "macro_f1", "precision", "recall")} <= tags
    assert {"perf/samples_per_second", "perf/step_seconds", "train/lr"} <= tags
    assert json.loads((runs / name / "test.json").read_text())["samples"] == 830
