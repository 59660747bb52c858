"""The measured micro-batch: within its limits, and without a trace in the model or the random state."""

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from recipe.errors import InputError
from recipe.model import build_model
from recipe.overrides import OTHER_MODEL
from recipe.presets import preset
from recipe.registry import build_task
from recipe.training import main_memory
from swarm.training.micro_batch.finder import (
    BUDGET_SECONDS,
    largest_sensible,
    measure_for_recipe,
    measure_micro_batch,
    precision_on,
)
from tests.helpers.virtual_time import Clock

CPU = torch.device("cpu")
CLOCK = Clock()
"""The one clock of all modules. A measured module is copied, and would copy a clock of its own."""


class Slow(nn.Module):
    """Takes a fixed time for each sample, on a clock that no other code moves."""

    def __init__(self, seconds_per_sample: float):
        super().__init__()
        self.seconds_per_sample = seconds_per_sample
        self.linear = nn.Linear(3, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        CLOCK.now += self.seconds_per_sample * len(images)
        return self.linear(images.flatten(1)) + torch.dropout(torch.zeros(2), 0.5, True)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    monkeypatch.setattr(time, "perf_counter", CLOCK)
    return CLOCK


def measure(module: nn.Module, most: int):
    return measure_micro_batch(module, lambda samples: torch.randn(samples, 3, 1, 1), 2, CPU, False, most)


@pytest.mark.parametrize(
    ("target", "samples", "largest"),
    [(512, 1257, 32), (1024, 10**6, 64), (100, 1000, 4), (8, 1000, 1), (10**6, 50, 32)],
)
def test_it_is_a_small_share_of_the_target_and_of_the_data(target, samples, largest):
    recipe = replace(preset("digits"), target_batch_size=target)
    assert largest_sensible(recipe, samples) == largest


def test_local_steps_take_micro_batches_too():
    recipe = replace(preset("digits"), target_batch_size=8192, averaging="local", local_steps=16)
    assert largest_sensible(recipe, 10**6) == 128, "four peers make 16 local steps of 128 samples each"


def test_a_slow_device_gets_what_takes_about_a_second(clock):
    began = clock.now
    found = measure(Slow(0.06), most=1024)
    assert clock.now - began < 2 * BUDGET_SECONDS
    assert (found.samples, found.seconds) == (16, pytest.approx(16 * 0.06))
    assert "the limit is time" in str(found)


def test_a_fast_device_gets_what_the_recipe_allows():
    found = measure(nn.Sequential(nn.Flatten(), nn.Linear(3, 2)), most=64)
    assert found.samples == 64
    assert found.limit.startswith("the target batch")


@pytest.mark.parametrize("is_native", [True, False])
def test_bfloat16_is_not_imitated(monkeypatch, is_native):
    """Only torch's statements about a GPU are made up, since there is none here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: is_native or including_emulation)
    assert precision_on("auto", "bf16-mixed") == ("bf16-mixed" if is_native else "32")
    assert precision_on("cpu", "bf16-mixed") == "bf16-mixed"
    assert precision_on("cuda", "32") == "32"


def test_one_sample_is_the_least(clock):
    assert measure(Slow(1.5), most=64).samples == 1


class Greedy(nn.Module):
    """Fits into memory with one sample only."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        taken = torch.empty(1 if len(images) == 1 else 2**60, dtype=torch.uint8)
        return self.linear(images.flatten(1)) + len(taken)


def test_a_size_for_which_a_cpu_has_too_little_memory_ends_the_search_at_the_one_before():
    found = measure(Greedy(), most=64)
    assert (found.samples, found.limit) == (1, "memory")


def test_it_leaves_a_container_some_of_its_memory(tmp_path, monkeypatch):
    """However much the machine has."""
    (tmp_path / "own").write_text("0::/\n")
    for name, content in {"memory.max": 2**28, "memory.current": 2**20, "memory.stat": "anon 5"}.items():
        (tmp_path / name).write_text(str(content))
    monkeypatch.setattr(main_memory, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(main_memory, "GROUPS", tmp_path)
    found = measure(nn.Sequential(nn.Flatten(), nn.Linear(3, 2)), most=64)
    assert (found.samples, found.limit) == (1, "memory")


class SlowNorm(Slow):
    """Normalises its outputs over the micro-batch, which one sample alone does not allow."""

    def __init__(self, seconds_per_sample: float):
        super().__init__(seconds_per_sample)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(images))


def test_batchnorm_gets_two_samples_at_least(clock):
    assert measure(SlowNorm(0.8), most=64).samples == 2
    assert [measure(SlowNorm(0.0001), most).samples for most in (1, 2, 64)] == [2, 2, 64]


def test_a_resnet_on_tiny_images():
    recipe = replace(preset("digits"), **OTHER_MODEL | {"model": "resnet18"})
    assert measure_for_recipe(build_model(recipe), replace(recipe, target_batch_size=16), "cpu").samples == 2


def test_a_model_that_can_be_built_but_not_trained():
    recipe = replace(preset("digits"), **OTHER_MODEL | {"model": "resnet18"})
    model = nn.Sequential(nn.Conv2d(1, 10, 8), nn.InstanceNorm2d(10), nn.Flatten())
    with pytest.raises(InputError, match=r"resnet18 cannot be trained here on images of 8 px \(Expected more than 1 s"):
        measure_for_recipe(model, recipe, "cpu")


def test_it_leaves_no_trace():
    task = build_task(preset("digits"))
    before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    random_state = torch.random.get_rng_state()
    measure_micro_batch(task.model, lambda samples: torch.randn(samples, 1, 8, 8), 10, CPU, False, 32)
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in task.state_dict().items())
    assert all(parameter.grad is None for parameter in task.parameters())
    assert task.training


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_is_not_filled_to_the_brim():
    task = build_task(preset("cifar10-vit-tiny"))
    device = torch.device("cuda")
    found = measure_micro_batch(task.model, lambda samples: torch.randn(samples, 3, 32, 32), 10, device, True, 2**16)
    free, total = torch.cuda.mem_get_info(device)
    assert found.samples >= 64
    assert free > 0.5 * total, "everything was given back"
