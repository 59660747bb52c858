"""A plain Trainer on a recipe: what it logs and when, and that it learns digits."""

import warnings
from dataclasses import replace

import lightning as L
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipe.errors import InputError
from recipe.presets import preset
from recipe.registry import build_data, build_task
from recipe.run_folder import RunFolder, read_metrics
from recipe.training import callbacks as recipe_callbacks
from recipe.training.trainer import build_trainer

TRAIN_TAGS = {"train/loss", "train/top1", "train/top5", "train/lr", "perf/samples_per_second", "perf/step_seconds"}
VAL_TAGS = {"val/loss", "val/top1", "val/top5", "val/macro_f1", "val/precision", "val/recall"}


def small_recipe(**changes):
    recipe = replace(preset("digits"), embed_dim=16, depth=1, num_heads=2, warmup_steps=1, target_batch_size=32)
    return replace(recipe, **changes)


def train(recipe, tmp_path, batch_size=8, **options):
    folder = RunFolder.create(tmp_path, "run", "peer")
    trainer = build_trainer(recipe, folder, accelerator="cpu", **options)
    task = build_task(recipe)
    trainer.fit(task, build_data(recipe, batch_size=batch_size))
    return trainer, task, folder


class Validations(L.Callback):
    """Notes validations. As a clock it stands still except within micro-batches, validations and what follows these."""

    def __init__(self):
        self.steps, self.seconds = [], 0.0

    def perf_counter(self) -> float:
        return self.seconds

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seconds += 1

    def on_validation_end(self, trainer, pl_module):
        self.steps.append(trainer.global_step)
        self.seconds += 1000

    def on_validation_epoch_end(self, trainer, pl_module):
        self.seconds += 100


def test_logged_lines_and_validations_under_accumulation(tmp_path, monkeypatch):
    recipe = small_recipe(validate_every_steps=3, total_steps=10)
    validations = Validations()
    monkeypatch.setattr(recipe_callbacks, "time", validations)
    trainer, _, folder = train(recipe, tmp_path, accumulate_grad_batches=4, callbacks=[validations])
    lines = read_metrics(folder.metrics)
    train_lines = [line for line in lines if "train/loss" in line]
    val_lines = [line for line in lines if "val/loss" in line]
    assert validations.steps == [3, 6, 9, 10]
    assert [line["step"] for line in train_lines] == list(range(1, 11))
    assert [line["step"] for line in val_lines] == [3, 6, 9, 10]
    assert all(line.keys() == TRAIN_TAGS | {"time", "step"} for line in train_lines)
    assert all(line.keys() == VAL_TAGS | {"time", "step"} for line in val_lines)
    assert trainer.callback_metrics.keys() >= VAL_TAGS
    assert trainer.datamodule.state_dict() == {"position": 10 * 4 * 8}
    assert [line["train/lr"] for line in train_lines[:2]] == pytest.approx([recipe.learning_rate] * 2)
    assert train_lines[-1]["train/lr"] < recipe.learning_rate / 10
    assert {line["perf/step_seconds"] for line in train_lines} == {4}, "validations are not counted"
    assert {line["perf/samples_per_second"] for line in train_lines} == {4 * 8 / 4}
    events = EventAccumulator(str(folder.tensorboard)).Reload()
    assert set(events.Tags()["scalars"]) >= TRAIN_TAGS | VAL_TAGS
    assert [event.step for event in events.Scalars("val/top1")] == [3, 6, 9, 10]


def test_train_loss_is_the_mean_over_the_update(tmp_path):
    recipe = small_recipe(total_steps=2, validate_every_steps=10)
    *_, folder = train(recipe, tmp_path, accumulate_grad_batches=4)
    data, task = build_data(recipe, batch_size=32), build_task(recipe)
    images, labels = next(iter(data.train_dataloader()))
    expected = torch.nn.functional.cross_entropy(task(images), labels)
    assert read_metrics(folder.metrics)[0]["train/loss"] == pytest.approx(expected.item(), abs=1e-5)


class StepsFromElsewhere(L.Callback):
    """A strategy that counts updates itself, like a swarm: one per three micro-batches, with a jump at the start."""

    def __init__(self, monkeypatch):
        self.batches = 0
        monkeypatch.setattr(L.Trainer, "global_step", property(lambda _: 40 + self.batches // 3 if self.batches else 0))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches += 1


def test_steps_counted_elsewhere(tmp_path, monkeypatch):
    recipe = small_recipe(validate_every_steps=2, total_steps=100)
    validations = Validations()
    callbacks = [StepsFromElsewhere(monkeypatch), validations]
    *_, folder = train(recipe, tmp_path, callbacks=callbacks, max_steps=14)
    steps = [line["step"] for line in read_metrics(folder.metrics) if "train/loss" in line]
    assert steps == [40, 41, 42, 43, 44]
    assert validations.steps[0] == 40
    assert {42, 44} <= set(validations.steps)


def test_stops_at_the_accuracy(tmp_path):
    recipe = small_recipe(validate_every_steps=2, total_steps=50)
    trainer, *_ = train(recipe, tmp_path, target_accuracy=0.01)
    assert trainer.global_step == 2


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    recipe = small_recipe(total_steps=6, validate_every_steps=3, augmentation="light")
    _, whole, _ = train(recipe, tmp_path / "whole", accumulate_grad_batches=2)
    half, *_ = train(recipe, tmp_path / "half", accumulate_grad_batches=2, max_steps=3)
    half.save_checkpoint(tmp_path / "half.ckpt")
    folder = RunFolder.create(tmp_path, "run", "rest")
    trainer = build_trainer(recipe, folder, accelerator="cpu", accumulate_grad_batches=2)
    task = build_task(recipe)
    trainer.fit(task, build_data(recipe, batch_size=8), ckpt_path=tmp_path / "half.ckpt")
    assert [line["step"] for line in read_metrics(folder.metrics) if "train/loss" in line] == [4, 5, 6]
    for one, other in zip(whole.model.parameters(), task.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("options", "part_of_message"),
    [
        ({"max_steps": 0}, "--max-steps"),
        ({"target_accuracy": 95.0}, "--target-accuracy"),
    ],
)
def test_limits_that_cannot_work(tmp_path, options, part_of_message):
    with pytest.raises(InputError, match=part_of_message):
        build_trainer(preset("digits"), RunFolder.create(tmp_path, "run", "peer"), **options)


def test_an_option_of_lightning_that_is_none_leaves_the_recipe_s_own(tmp_path):
    recipe, folder = small_recipe(precision="bf16-mixed", clip_norm=0.5), RunFolder.create(tmp_path, "run", "peer")
    trainer = build_trainer(recipe, folder, accelerator="cpu", precision=None, gradient_clip_val=None)
    assert (trainer.precision, trainer.gradient_clip_val) == ("bf16-mixed", 0.5)


def test_a_run_without_problems_prints_nothing(tmp_path, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(small_recipe(total_steps=2), tmp_path)
    assert capfd.readouterr() == ("", "")


def test_digits_are_learnt(tmp_path):
    recipe = preset("digits")
    options = {"accumulate_grad_batches": recipe.target_batch_size // 128, "target_accuracy": 0.95}
    trainer, *_ = train(recipe, tmp_path, batch_size=128, **options)
    assert trainer.callback_metrics["val/top1"] >= 0.95
    assert trainer.global_step <= 25
