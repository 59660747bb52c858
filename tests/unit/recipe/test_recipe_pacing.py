"""Paced compute: a micro-batch takes the time of a device that is not there, and its gradients have the true size."""

from unittest.mock import Mock

import pytest
import torch

from recipe.errors import InputError
from recipe.presets import preset
from recipe.registry import build_task
from recipe.run_folder import RunFolder
from recipe.training import callbacks, pacing
from recipe.training.callbacks import PacedCompute
from recipe.training.pacing import ALL_SAMPLES, VARIABLE, Pace, paced_samples_per_second
from recipe.training.trainer import build_trainer


class Clock:
    """A clock that goes on by 0.1 s whenever it is read, and by the seconds that are slept."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.1
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(callbacks, "time", clock)
    monkeypatch.setattr(pacing, "time", clock)
    return clock


def test_a_micro_batch_takes_the_time_of_the_device(clock):
    task = build_task(preset("digits"))
    PacedCompute(samples_per_second=50).setup(None, task, "fit")
    began = clock.perf_counter()
    task.training_step((torch.rand(32, 1, 8, 8), torch.randint(10, (32,))), 0).backward()
    forward, overhead = 0.1, 0.1
    assert clock.now - began - overhead == pytest.approx(32 / 50 - 2 * forward), "what is missing is the backward pass"
    assert all(parameter.grad is not None for parameter in task.model.parameters())


@pytest.mark.parametrize(
    ("backward", "averaged", "next_seconds"),
    [(0.2, False, 1.0), (0.5, False, 0.7), (0.1, False, 1.1), (0.5, True, 1.0), (30.0, False, 0.3)],
    ids=[
        "as guessed",
        "slower",
        "faster",
        "with DDP's averaging in it",
        "stopped",
    ],
)
def test_the_next_micro_batch_makes_up_for_a_wrong_guess_of_the_backward_pass(clock, backward, averaged, next_seconds):
    clock.perf_counter = lambda: clock.now
    pace = Pace(samples_per_second=16)

    def micro_batch(backward: float) -> float:
        began = clock.now
        clock.sleep(0.1)
        pace.sleep_before_backward(began, 16)
        clock.sleep(backward)
        pace.end_backward(averaged)
        return clock.now - began

    micro_batch(backward)
    assert micro_batch(0.2) == pytest.approx(next_seconds)


@pytest.mark.parametrize(("synchronises", "corrections"), [(True, 0), (False, 1)])
def test_only_a_backward_pass_without_averaging_corrects_the_next(clock, synchronises, corrections):
    paced, trainer = PacedCompute(samples_per_second=50), Mock(model=Mock(require_backward_grad_sync=synchronises))
    clock.now = 1000.0
    paced.on_after_backward(trainer, None)
    assert (paced.pace.late_seconds > 0) == corrections


def test_few_samples_are_computed_unless_all_are_asked_for(monkeypatch):
    task = build_task(preset("digits"))
    PacedCompute(samples_per_second=1e6).setup(None, task, "fit")
    batch = torch.rand(32, 1, 8, 8), torch.randint(10, (32,))
    seen = []
    task.model.register_forward_pre_hook(lambda _, images: seen.append(len(images[0])))
    task.training_step(batch, 0)
    monkeypatch.setenv(ALL_SAMPLES, "1")
    task.training_step(batch, 1)
    assert seen == [2, 32]


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
