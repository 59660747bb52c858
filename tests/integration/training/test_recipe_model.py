"""Model, optimizer, schedule and metrics."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, precision_score, recall_score, top_k_accuracy_score

from recipe.errors import InputError
from recipe.model import build_model
from recipe.optimizer import build_optimizer, build_scheduler, lr_factor
from recipe.overrides import RecipeOverrides, apply_overrides
from recipe.presets import PRESETS, preset
from recipe.registry import build_task, kind_of


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_and_tells_its_classes(name):
    if name == "ag-news-distilbert":
        pytest.importorskip("transformers", reason="the extra `text` is not installed")
    recipe = replace(preset(name), pretrained=False)
    model, inputs = build_model(recipe), kind_of(recipe.dataset).random_inputs(recipe, 2)
    with torch.no_grad():
        assert model.eval()(inputs).shape == (2, recipe.num_classes)


def test_synthetic_has_the_stated_size():
    assert build_task(preset("synthetic")).num_parameters == 2_693_578


@pytest.mark.parametrize(("model", "image_size"), [("resnet50", 8), ("vgg19", 32)])
def test_other_architectures(model, image_size):
    recipe = apply_overrides(preset("digits"), RecipeOverrides(model=model, image_size=image_size))
    task = build_task(recipe)
    loss = task.training_step((torch.randn(2, 1, image_size, image_size), torch.tensor([0, 1])), 0)
    assert torch.isfinite(loss)
    assert (task.sizes["buffers"] > 0) == (model == "resnet50")


def test_weights_depend_on_the_seed_alone():
    recipe = preset("digits")
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    one = build_model(recipe).state_dict()
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(2)
    two = build_model(recipe).state_dict()
    other = build_model(replace(recipe, seed=1)).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"]) or not torch.equal(
        one["pos_embed"], other["pos_embed"]
    )


@pytest.mark.parametrize("name", ["digits", "docstrings"])
def test_a_new_model_leaves_the_generators_of_the_gpus_alone(monkeypatch, name):
    """With one seed, all GPUs that train together would draw the same dropout."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("the GPUs were seeded"))
    build_model(preset(name))


@pytest.mark.parametrize(
    ("changes", "part_of_message"),
    [
        ({"model": "resnet50", "depth": 4}, "--depth"),
        ({"model": "resnet50", "initialisation": "balanced"}, "--initialisation timm"),
        ({"model": "vgg19", "image_size": 32, "drop_path": 0.1}, "--drop-path 0"),
        ({"model": "vgg19"}, "--image-size"),
        ({"model": "vit_small_patch16_224"}, "--patch-size"),
        ({"model": "resnet50.nonsense"}, "--model"),
    ],
)
def test_models_that_cannot_be_built(changes, part_of_message):
    recipe = apply_overrides(preset("digits"), RecipeOverrides(**changes))
    with pytest.raises(InputError, match=part_of_message):
        build_model(recipe)


def test_pretrained_weights_without_network(monkeypatch, tmp_path):
    def no_network():
        raise OSError("no route")

    monkeypatch.setattr("recipe.timm_model.get_session", no_network)
    monkeypatch.setattr("recipe.timm_model.try_to_load_from_cache", lambda *_: None)
    with pytest.raises(InputError, match="--pretrained False"):
        build_model(preset("cifar10-vit-base"))


def test_weight_decay_spares_biases_norms_and_tokens():
    recipe = preset("digits")
    model = build_model(recipe)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = {group["weight_decay"]: group["params"] for group in build_optimizer(model, recipe).param_groups}
    spared = {names[parameter] for parameter in groups[0.0]}
    decayed = {names[parameter] for parameter in groups[recipe.weight_decay]}
    assert {"cls_token", "pos_embed", "norm.weight", "blocks.0.attn.qkv.bias"} <= spared
    assert {"patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "head.weight"} <= decayed
    assert all(parameter.ndim > 1 for parameter in groups[recipe.weight_decay])
    assert spared | decayed == set(names.values())


def test_sgd():
    recipe = replace(preset("digits"), optimizer="sgd", learning_rate=0.1, momentum=0.8)
    optimizer = build_optimizer(torch.nn.Linear(2, 2), recipe)
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.defaults["momentum"] == 0.8


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.8875, 0.775, 0.6625, 0.55]),
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, 0.96574577, 0.86819805, 0.72220763, 0.55]),
    ],
)
def test_schedules_by_hand(schedule, expected):
    recipe = replace(preset("digits"), schedule=schedule, warmup_steps=4, total_steps=12, final_lr_fraction=0.1)
    assert [lr_factor(recipe, step) for step in range(9)] == pytest.approx(expected)
    end = 1.0 if schedule == "constant" else 0.1
    assert lr_factor(recipe, 12) == lr_factor(recipe, 500) == pytest.approx(end)


def test_scheduler_advances_per_step():
    recipe = replace(preset("digits"), warmup_steps=4, learning_rate=0.8)
    module = torch.nn.Linear(2, 2)
    optimizer = build_optimizer(module, recipe)
    scheduler = build_scheduler(optimizer, recipe)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])


def test_no_warm_up():
    assert lr_factor(replace(preset("digits"), warmup_steps=0), 0) == 1.0


def test_metrics_agree_with_scikit_learn():
    task = build_task(preset("digits"))
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(60, 10, generator=generator), torch.randint(10, (60,), generator=generator)
    for part in (slice(0, 25), slice(25, 60)):
        task.val_metrics.update(logits[part], labels[part])
    guesses, every_class = logits.argmax(1), np.arange(10)
    expected = {
        "top1": accuracy_score(labels, guesses),
        "top5": top_k_accuracy_score(labels, logits, k=5, labels=every_class),
        "macro_f1": f1_score(labels, guesses, average="macro"),
        "precision": precision_score(labels, guesses, average="macro", zero_division=0),
        "recall": recall_score(labels, guesses, average="macro"),
    }
    computed = {name: value.item() for name, value in task.val_metrics.compute().items()}
    assert computed == pytest.approx(expected, abs=1e-6)


def test_top5_with_three_classes():
    recipe = replace(preset("synthetic"), num_classes=3)
    task = build_task(recipe)
    task.training_step((torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 0])), 0)
    assert task.train_metrics["top5"].compute() == 1.0
