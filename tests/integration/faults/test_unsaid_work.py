"""A member lists no work, or gives other gradients than it lists; all other peers recompute what is listed."""

import os
from dataclasses import dataclass, replace
from functools import partial

import lightning as L
import pytest

from recipe.presets import preset
from recipe.registry import build_data, build_task
from recipe.training.replay import Replay
from swarm.averaging.audit import work_audits
from swarm.protocol.messages import Blame
from swarm.training.audit import work_log
from swarm.training.strategy import SwarmStrategy
from tests.helpers.attacks import members
from tests.helpers.strategy_runs import patience, trainer_for
from tests.helpers.swarm_peers import Peers, running_dht

pytestmark = pytest.mark.timeout(120)
RECIPE = replace(
    preset("digits"), embed_dim=32, depth=2, num_heads=2, drop_path=0.3, augmentation="light", target_batch_size=192
)
HONEST = "abc"
LEFT_OUT_AT, UPDATES = 14, 20
"""Last step of the liar, and of all. Four updates lack a list, eight report that, and two are spare."""
UPDATES_OF_WORK = 12
"""In each, three peers draw a peer to compare wholly. All miss the liar in eight of them once in 10,000 times."""


class Seen(L.Callback):
    """Notes the members of each update, by step."""

    def __init__(self):
        self.groups: dict[int, set[str]] = {}

    def on_train_start(self, trainer, pl_module):
        trainer.strategy.coordinator.on_update = self._note

    def _note(self, report):
        self.groups[report.step] = set(map(str, report.round.group.peer_ids)) if report.round else set()


@dataclass
class Outcome:
    """The result of a peer.

    Args:
        groups: members of its updates, by step; empty for an update that it has made alone
        checked: for each micro-batch of other peers that it has recomputed, whether it was before the last update
    """

    peer_id: str
    groups: dict[int, set[str]]
    checked: list[bool]


def member(name, initial_peers, line, folder, averaging="overlap", lie=None, updates=UPDATES):
    """Run a peer that trains digits and checks another one in each update; it prints to a file."""
    output = os.open(folder / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    work_log.chance_of_an_audit = lambda num_micro_batches: 1.0
    work_audits.COMPARED_SHARE = 1.0
    checked, check = [], work_log.CheckedLog.check

    def note_and_check(self, assignment):
        checked.extend([] if assignment is None else [assignment.is_before])
        check(self, assignment)

    work_log.CheckedLog.check = note_and_check
    if lie is not None:
        members.LIES[lie]()
    with running_dht(initial_peers, line) as dht:
        task, data = build_task(RECIPE), build_data(RECIPE, batch_size=16, identity=str(dht.peer_id))
        strategy = SwarmStrategy(
            *(RECIPE.target_batch_size, "test"),
            **{"dht": dht, "name": name, "averaging": averaging, "replay": Replay(task, data)},
            options=patience(len(HONEST) + 1),
        )
        seen = Seen()
        trainer_for(strategy, [seen], max_steps=updates, limit_val_batches=0).fit(task, data)
        return Outcome(str(dht.peer_id), seen.groups, checked)


def test_only_the_member_that_does_not_list_its_work_is_left_out(tmp_path):
    with Peers(timeout_seconds=90) as peers:
        for name in HONEST:
            peers.start(name, member, tmp_path)
        peers.start("mallory", partial(member, lie="silent"), tmp_path)
        found = peers.results(*HONEST)
    for name, outcome in found.items():
        said = (tmp_path / f"{name}.log").read_text()
        assert f"mallory {Blame.NAMES_NO_WORK}" in said
        assert said.count(Blame.NAMES_NO_WORK) == said.count("is left out"), "no peer is left out for anything else"
        assert max(len(group) for step, group in outcome.groups.items() if step >= LEFT_OUT_AT) == 3
        assert 4 in map(len, outcome.groups.values())
        assert True in outcome.checked
        assert False in outcome.checked


@pytest.mark.parametrize("codec", ["none", "fp16"])
def test_only_the_member_that_gives_another_gradient_is_proven_guilty(tmp_path, codec):
    """The liar turns its gradient around. It stays as long as any other, so no average is clipped by that."""
    averaging, compared = f"sync-{codec}", partial(member, updates=UPDATES_OF_WORK)
    with Peers(timeout_seconds=90) as peers:
        for name in HONEST:
            peers.start(name, compared, tmp_path, averaging)
        peers.start("mallory", partial(compared, lie="reverse-1"), tmp_path, averaging)
        found = peers.results(*HONEST)
    honest = {outcome.peer_id for outcome in found.values()}
    for name, outcome in found.items():
        said = (tmp_path / f"{name}.log").read_text()
        assert f"mallory {Blame.GAVE_OTHER_WORK}: it is left out for good" in said
        assert said.count("is left out") == 1, "no other peer"
        assert 4 in map(len, outcome.groups.values())
        assert [*outcome.groups.values()][-1] <= honest, "the liar is not met any more"
