"""Paced compute: the time of a device that is not there, with gradients of the true size."""

import time

import pytest
import torch

from recipe.callbacks import PacedCompute
from recipe.errors import InputError
from recipe.pacing import VARIABLE, paced_samples_per_second
from recipe.presets import preset
from recipe.run_folder import RunFolder
from recipe.task import VisionTask
from recipe.trainer import build_trainer


def test_a_micro_batch_takes_the_time_of_the_device():
    task = VisionTask(preset("digits"))
    PacedCompute(samples_per_second=50).setup(None, task, "fit")
    batch = (torch.rand(32, 1, 8, 8), torch.randint(10, (32,)))
    task.training_step(batch, 0).backward()  # the first call prepares what later ones use
    began = time.perf_counter()
    task.training_step(batch, 0).backward()
    assert 0.5 < (time.perf_counter() - began) / (32 / 50) < 3, "within 5 % on an idle machine"
    assert all(parameter.grad is not None for parameter in task.model.parameters())


def test_the_variable_paces_a_trainer_and_nothing_else_does(tmp_path, monkeypatch):
    def is_paced() -> bool:
        trainer = build_trainer(preset("digits"), RunFolder(tmp_path), accelerator="cpu")
        return any(isinstance(callback, PacedCompute) for callback in trainer.callbacks)

    assert not is_paced()
    monkeypatch.setenv(VARIABLE, "40")
    assert is_paced()
    assert paced_samples_per_second() == 40


@pytest.mark.parametrize("text", ["fast", "0", "-3", "nan"])
def test_a_pace_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(InputError, match="set it to samples per second"):
        paced_samples_per_second()
