"""Models of many families of timm train in a swarm of two, however small the images and the last feature maps are."""

from dataclasses import replace

import lightning as L
import pytest
import torch

from recipe.errors import InputError
from recipe.model import build_model
from recipe.overrides import OTHER_MODEL
from recipe.presets import preset
from recipe.registry import build_data, build_task
from recipe.run_folder import RunFolder
from recipe.training.trainer import build_trainer
from swarm.training.micro_batch.finder import measure_for_recipe
from swarm.training.options import CoordinatorOptions
from swarm.training.strategy import SwarmStrategy
from tests.helpers.swarm_peers import Peers, running_dht

FAMILIES = (
    *("resnet18", "regnetx_002", "mobilenetv3_small_050", "efficientnet_b0", "convnext_atto", "levit_128s"),
    "deit_tiny_patch16_224",
)
PIXELS, TARGET, STEPS = 32, 16, 2


def recipe_of(model: str, image_size: int = PIXELS):
    recipe = replace(preset("digits"), **OTHER_MODEL | {"model": model}, image_size=image_size)
    return replace(recipe, target_batch_size=TARGET, total_steps=STEPS, warmup_steps=1, validate_every_steps=STEPS)


class Steps(L.Callback):
    """Notes how many peers were in the last update."""

    num_peers = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (last := trainer.strategy.coordinator.last_step) is not None:
            self.num_peers = last.num_peers


def train_all(name, initial_peers, line, folder) -> dict[str, tuple[int, int, dict]]:
    """Train each model in a run of its own. Returns the micro-batch, the peers in the last update, and the weights."""
    found = {}
    with running_dht(initial_peers, line) as dht:
        for model in FAMILIES:
            recipe = recipe_of(model)
            task, data = build_task(recipe), build_data(recipe, identity=name)
            data.setup()
            micro_batch = measure_for_recipe(task.model, recipe, "cpu", data.num_train_samples).samples
            data.batch_size = micro_batch
            options = CoordinatorOptions(2, matchmaking_seconds=3.0, averaging_timeout_seconds=30.0)
            strategy = SwarmStrategy(TARGET, model, dht=dht, name=name, options=options)
            trainer = build_trainer(
                recipe, RunFolder.create(folder, model, name), accelerator="cpu", strategy=strategy, loggers=()
            )
            trainer.limit_val_batches = 1
            trainer.callbacks.append(steps := Steps())
            trainer.fit(task, data)
            weights = {key: value.clone() for key, value in task.model.named_parameters()}
            found[model] = (micro_batch, steps.num_peers, {key: value.detach() for key, value in weights.items()})
    return found


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_family_in_a_swarm_of_two(tmp_path):
    with Peers(timeout_seconds=270) as peers:
        peers.start("a", train_all, str(tmp_path))
        peers.start("b", train_all, str(tmp_path))
        one, other = peers.results().values()
    for model in FAMILIES:
        micro_batch, num_peers, weights = one[model]
        is_normalised = any("num_batches" in name for name in build_model(recipe_of(model)).state_dict())
        assert micro_batch >= (2 if is_normalised else 1), model
        assert num_peers == other[model][1] == 2, model
        assert all(torch.equal(weights[name], other[model][2][name]) for name in weights), model
        before = dict(build_model(recipe_of(model)).named_parameters())
        assert any(not torch.equal(weights[name], before[name]) for name in weights), model


@pytest.mark.parametrize("model", ["convnext_atto", "deit_tiny_patch16_224", "maxvit_pico_rw_256", "inception_v3"])
def test_images_that_are_too_small_are_refused_in_a_sentence(model):
    with pytest.raises(InputError, match="image-size") as caught:
        build_model(recipe_of(model, image_size=8))
    assert "\n" not in str(caught.value)
