"""Opponents train the recipe that all others train: its loss, and its clipping."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from analysis.opponents import hivemind_optimizer, torchft_diloco
from analysis.opponents.training import Device, changed
from recipe.presets import preset


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_averaged_gradients_are_clipped_before_hivemind_s_optimizer_steps(monkeypatch, kind, clip_norm):
    given = {}
    monkeypatch.setattr(hivemind_optimizer.hivemind, "Optimizer", lambda **options: given.update(options))
    module = nn.Linear(3, 2)
    recipe = replace(preset("digits"), optimizer=kind, clip_norm=clip_norm)
    options = hivemind_optimizer.parse(["--name", "h1", "--peers", "2", "--steps", "1"])
    hivemind_optimizer.collaborative(module, recipe, None, options)
    optimizer = given["optimizer"](given["params"])
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    before = 3.0 * 8**0.5
    optimizer.step()
    norm = torch.stack([parameter.grad.norm() for parameter in module.parameters()]).norm().item()
    assert norm == pytest.approx(clip_norm or before, rel=1e-4)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_the_loss_has_the_recipe_s_label_smoothing(label_smoothing):
    module, inputs, labels = nn.Linear(3, 4), torch.randn(5, 3), torch.tensor([0, 1, 2, 3, 0])
    expected = nn.functional.cross_entropy(module(inputs), labels, label_smoothing=label_smoothing)
    assert Device(label_smoothing).backward(module, inputs, labels) == pytest.approx(expected.item())
    found = module.weight.grad.clone()
    module.zero_grad()
    expected.backward()
    torch.testing.assert_close(found, module.weight.grad)


def test_changes_of_the_recipe_are_read_as_by_the_other_programs():
    recipe = preset("digits")
    read = changed(recipe, ["pretrained=False", "slowest_line_mbps=5", "total_steps=40", "averaging=local"])
    assert read == replace(recipe, pretrained=False, slowest_line_mbps=5.0, total_steps=40, averaging="local")
    assert changed(recipe, []) == recipe


@pytest.mark.parametrize("change", ["no_such_field=1", "total_steps=many", "total_steps"])
def test_a_change_that_cannot_be_read_is_bad_input(change, capsys):
    with pytest.raises(SystemExit, match="2"):
        changed(preset("digits"), [change])
    assert change.split("=")[0].replace("_", "-") in capsys.readouterr().err.replace("_", "-")


def test_peers_of_torchft_meet_whatever_their_names():
    store = HashStore()
    others = [threading.Thread(target=torchft_diloco.meet, args=(store, "ready", 3), daemon=True) for _ in range(2)]
    for other in others:
        other.start()
    torchft_diloco.meet(store, "ready", 3)
    for other in others:
        other.join(20)
        assert not other.is_alive()
