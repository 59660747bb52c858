"""A member that computes half of what it claims, in a swarm whose members compute each other's work again."""

import os
import re
from dataclasses import replace

import lightning as L
import pytest
from lightning.pytorch import seed_everything

from recipe.presets import preset
from recipe.registry import build_data, build_task
from recipe.training.replay import Replay
from swarm.training.audit import work_log
from swarm.training.strategy import SwarmStrategy
from tests.helpers.attacks import members
from tests.helpers.strategy_runs import patience, trainer_for
from tests.helpers.swarm_peers import Peers, running_dht

pytestmark = pytest.mark.timeout(120)
HONEST, UPDATES, MICRO_BATCH, TARGET = "abc", 32, 8, 96
CHANCE = 1.0
"""With which each looks at another one in an update: a lie is found sooner than at one in a hundred micro-batches."""
RECIPE = replace(
    preset("digits"),
    **{"embed_dim": 32, "depth": 2, "num_heads": 2, "drop_path": 0.2, "augmentation": "light"},
    target_batch_size=TARGET,
)


def train(name, initial_peers, line, folder, lie=None):
    """A peer; what it prints goes to a file."""
    output = os.open(folder / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    seed_everything(ord(name[0]), verbose=False)  # no two draw alike, but for what micro-batches seed
    work_log.chance_of_an_audit = lambda num_micro_batches: CHANCE
    if lie is not None:
        members.LIES[lie]()
    with running_dht(initial_peers, line) as dht:
        data = build_data(RECIPE, batch_size=MICRO_BATCH, identity=dht.peer_id.to_base58())
        task = build_task(RECIPE)
        options = patience(len(HONEST) + 1)
        strategy = SwarmStrategy(TARGET, "test", dht=dht, name=name, options=options, replay=Replay(task, data))
        record = Members()
        trainer_for(strategy, [record], max_steps=UPDATES, limit_val_batches=0).fit(task, data)
        return str(dht.peer_id), record.groups


class Members(L.Callback):
    """Who was in the group of each update."""

    def __init__(self):
        self.groups: dict[int, frozenset[str]] = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        last = trainer.strategy.coordinator.last_step
        if last is not None and last.round is not None:
            self.groups[last.step] = frozenset(map(str, last.round.group.peer_ids))


def test_who_computes_half_of_what_it_claims_is_left_out_by_all_and_nobody_else_is(tmp_path):
    with Peers(timeout_seconds=60) as peers:
        for name in HONEST:
            peers.start(name, train, tmp_path)
        peers.start("mallory", train, tmp_path, "half")
        found = peers.results(*HONEST)
    ids = {peer_id for peer_id, _ in found.values()}
    for name, (_, groups) in found.items():
        said = (tmp_path / f"{name}.log").read_text()
        assert "mallory gave gradients that its samples do not give when they are computed again" in said
        assert not re.search(r"\b[abc] (gave gradients|does not show)", said), "nobody else"
        assert groups[max(groups)] == ids, "without the liar, and all others are together"
        assert any(len(group) == 4 for group in groups.values())
