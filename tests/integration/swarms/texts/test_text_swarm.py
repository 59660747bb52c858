"""A swarm that learns texts computes what one process would on the union of its peers' samples."""

from dataclasses import replace

import lightning as L
import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from recipe.presets import preset
from recipe.registry import build_data, build_task
from recipe.run_folder import RunFolder
from recipe.text.tokens import PAD
from recipe.training.trainer import build_trainer
from swarm.training.options import CoordinatorOptions
from swarm.training.strategy import SwarmStrategy
from tests.helpers.swarm_peers import Peers, running_dht
from tests.unit.recipe.test_recipe_text import quiet

TOLERANCE = 1e-6
"""Absolute, of weights that three updates change by about 0.01: about ten times what was seen."""
STEPS = 3
RECIPE = replace(
    preset("docstrings"),
    embed_dim=32,
    depth=1,
    num_heads=2,
    augmentation="none",
    optimizer="sgd",
    momentum=0.0,
    weight_decay=0.0,
    clip_norm=0.0,
    learning_rate=0.1,
    schedule="constant",
    warmup_steps=0,
    total_steps=STEPS,
    target_batch_size=24,
    validate_every_steps=STEPS,
)


class Batches(L.Callback):
    """Keeps what this peer gave to each update, and how many samples the update says it had."""

    def __init__(self):
        self.updates, self._batches, self._step = [], [], 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._batches.append([part.clone() for part in batch])
        coordinator = trainer.strategy.coordinator
        if coordinator.step > self._step:
            report = coordinator.last_step
            self.updates.append((report.num_peers, report.samples, report.own_samples, self._batches))
            self._step, self._batches = coordinator.step, []


def learn(name, initial_peers, line, micro_batch, folder):
    with running_dht(initial_peers, line) as dht:
        task, data = build_task(RECIPE), build_data(RECIPE, batch_size=micro_batch, identity=name)
        quiet(task.model)
        options = CoordinatorOptions(2, matchmaking_seconds=3.0, averaging_timeout_seconds=30.0)
        strategy = SwarmStrategy(RECIPE.target_batch_size, "texts", dht=dht, name=name, options=options)
        trainer = build_trainer(
            RECIPE, RunFolder.create(folder, "texts", name), accelerator="cpu", strategy=strategy, loggers=()
        )
        trainer.limit_val_batches = 0
        trainer.callbacks.append(batches := Batches())
        trainer.fit(task, data)
        return batches.updates, {name: one.detach().clone() for name, one in task.model.named_parameters()}


def union(batches: list) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [row for tokens, _ in batches for row in tokens]
    return pad_sequence(rows, batch_first=True, padding_value=PAD), torch.cat([labels for _, labels in batches])


@pytest.mark.timeout(180)
def test_a_swarm_of_two_is_one_process_on_the_union_whatever_the_lengths(tmp_path):
    with Peers(timeout_seconds=150) as peers:
        peers.start("a", learn, 3, str(tmp_path))
        peers.start("b", learn, 5, str(tmp_path))
        (updates, weights), (others, same) = peers.results().values()
    assert all(torch.equal(weights[name], same[name]) for name in weights), "the peers differ"
    model = quiet(build_task(RECIPE).model)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=RECIPE.learning_rate)
    for mine, theirs in zip(updates, others, strict=True):
        tokens, labels = union(mine[-1] + theirs[-1])
        assert mine[:2] == theirs[:2] == (2, len(labels))
        assert len({batch[0].shape[1] for batch in mine[-1] + theirs[-1]}) > 1, "texts of unequal lengths"
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), labels).backward()
        optimizer.step()
    assert len(updates) == STEPS
    after = dict(model.named_parameters())
    assert max((after[name] - weights[name]).abs().max() for name in weights) < TOLERANCE
    assert max((before[name] - weights[name]).abs().max() for name in weights) > 1000 * TOLERANCE
