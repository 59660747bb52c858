"""What a lying member cannot do, each time against a training swarm of two.

A benchmark measures what takes time. Here no peer adopts false data and no peer ends, updates go on, and honest peers
name the liar.
"""

import os
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from swarm.membership import backoff
from swarm.membership.global_progress import GlobalProgress
from swarm.training.strategy import SwarmStrategy
from tests.helpers.attacks import members
from tests.helpers.attacks.rounds_under_attack import assert_few_failed
from tests.helpers.strategy_runs import (
    FEATURES,
    Outcome,
    Plan,
    Record,
    Task,
    assert_equal_updates,
    loader,
    patience,
    trainer_for,
)
from tests.helpers.swarm_peers import Peer, Peers, running_dht

pytestmark = pytest.mark.timeout(300)
TARGET = 64
AHEAD = re.compile(r"Somebody was (\d+) updates ahead")
USED = re.compile(r"(Took over|averages).* from mallory")
UPDATES = 14
NEWCOMER_UPDATES = 20
"""Updates of a newcomer, in which weights are compared twice."""
NEWCOMER_GIVES = 10
"""Updates to which it gives samples. It takes over the average of others, more of them on a busy machine."""


class WidePlan(Plan):
    """A model of some parts for each reducer; those of other plans fit into one."""

    def net(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        return nn.Sequential(nn.Linear(FEATURES, 8192), nn.ReLU(), nn.Linear(8192, 4))


class Rounds(Record):
    """Keeps the events of rounds, also of those that fail.

    Args:
        stop: a file that ends the training when it exists
    """

    def __init__(self, line, stop):
        super().__init__(line, lambda _: stop.exists())
        self.events, self.furthest = [], 0
        """`events`: of its rounds. `furthest`: by how many updates another peer claimed to be ahead of it."""

    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        trainer.strategy.coordinator.on_round = self.events.append

    def on_train_batch_end(self, trainer, *args):
        super().on_train_batch_end(trainer, *args)
        coordinator = trainer.strategy.coordinator
        claimed = [record.step - coordinator.step for record in coordinator.tracker.others.values()]
        self.furthest = max([self.furthest, *claimed])


def ask_first(name: str) -> None:
    """Make this peer ask the donor of this name before all other donors."""
    honest = GlobalProgress.donors

    def donors(self, min_step):
        return sorted(honest(self, min_step), key=lambda peer: self.records[peer].name != name)

    GlobalProgress.donors = donors


def member(
    name, initial_peers, line, folder, plan, min_peers, max_steps=UPDATES, lie=None, asks=None, wait_seconds=3.0
):
    """Run a peer of the tiny model that prints to a file. With a lie it is the liar, and may end in any way.

    Args:
        wait_seconds: how long it waits for missing peers at the end of a step
    """
    if asks is not None:
        ask_first(asks)
    output = os.open(folder / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    if lie is not None:
        members.LIES[lie]()
    backoff.BACKOFF_SECONDS = (
        60.0  # of a leader that hung: after 10 s it could come back before the end, which is not tested here
    )
    with running_dht(initial_peers, line) as dht:
        rounds = Rounds(line, folder / "stop")
        strategy = SwarmStrategy(TARGET, "test", dht=dht, name=name, options=patience(min_peers, wait_seconds))
        task = Task(plan)
        trainer = trainer_for(strategy, [rounds], max_steps=max_steps, gradient_clip_val=plan.clip)
        try:
            trainer.fit(task, loader(ord(name[0])))
        except Exception:
            if lie is None:
                raise
            line.get()  # until the test is over
        print(f"Somebody was {rounds.furthest} updates ahead", flush=True)
        state = {key: value.clone() for key, value in task.net.state_dict().items()}
        outcome = Outcome(str(dht.peer_id), rounds.updates, rounds.joined_at, state, {})
        return outcome, [event.outcome for event in rounds.events]


def assert_made_each_update(outcome: Outcome) -> None:
    assert [update.step for update in outcome.updates] == list(range(1, UPDATES + 1)), "it has made all updates"


def assert_their_work_counts(*outcomes: Outcome) -> None:
    """Check that honest work is in most updates. A peer that is held up takes over averages, mostly of honest peers."""
    given = {update.step for outcome in outcomes for update in outcome.updates if update.own_samples > 0}
    assert len(given) > UPDATES / 2, "updates are not the liar's alone"


def has_step(peers: Peers, name: str, step: int) -> bool:
    return any(made >= step for made, *_ in peers[name].messages)


def updates_given(peer: Peer) -> int:
    """Return the number of its updates that hold samples of its own."""
    return sum(own_samples > 0 for *_, own_samples in peer.messages)


@pytest.mark.parametrize(
    "lie", ["nan", "overflow", "bad-average", "slow", pytest.param("stuck", marks=pytest.mark.long)]
)
def test_a_member_that_spoils_rounds_is_left_out(tmp_path, lie):
    plan = (WidePlan if lie == "slow" else Plan)(compute_seconds=0.03)
    with Peers(timeout_seconds=120) as peers:
        for name in ("a", "b"):
            peers.start(name, member, tmp_path, plan, 3)
        peers.start("mallory", partial(member, lie=lie, max_steps=10**6), tmp_path, plan, 3)
        found = peers.results("a", "b")
    (a, a_rounds), (b, b_rounds) = found["a"], found["b"]
    said = "".join((tmp_path / f"{name}.log").read_text() for name in "ab")
    for outcome, rounds in ((a, a_rounds), (b, b_rounds)):
        assert_few_failed(rounds)
        assert_made_each_update(outcome)
        assert all(torch.isfinite(weight).all() for weight in outcome.state.values())
        assert all(update.peer_ids == {a.peer_id, b.peer_id} for update in outcome.updates[-5:])
    assert_equal_updates(a, b)
    assert "mallory" in said, "the liar is named"


@pytest.mark.parametrize("lie", [pytest.param("ahead", marks=pytest.mark.long), "made-up-state"])
def test_a_trained_peer_is_not_misled_by_a_member_that_claims_to_be_ahead(tmp_path, lie):
    """It has been in a group, so its claim counts for more than a stranger's; its state would be slow or useless.

    Updates are slow enough that all read each other's records meanwhile."""
    plan = Plan(compute_seconds=0.3)
    with Peers(timeout_seconds=120) as peers:
        for name in ("a", "b"):
            peers.start(name, member, tmp_path, plan, 3)
        peers.start("mallory", partial(member, lie=lie, max_steps=10**6), tmp_path, plan, 3)
        found = peers.results("a", "b")
    (a, a_rounds), (b, b_rounds) = found["a"], found["b"]
    for outcome, rounds in ((a, a_rounds), (b, b_rounds)):
        assert_few_failed(rounds)
        assert_made_each_update(outcome)
    assert_their_work_counts(a, b)
    said = [(tmp_path / f"{name}.log").read_text() for name in "ab"]
    assert not any(map(USED.search, said)), "its state and averages are not used"
    furthest = [int(AHEAD.search(one)[1]) for one in said]
    assert min(furthest) >= members.AHEAD - 5, "both have read the lie"
    assert_equal_updates(a, b)


@pytest.mark.parametrize("lie", ["goes-on-alone", "other-history"])
def test_a_leader_that_goes_another_way_is_left_behind(tmp_path, lie):
    """It tells the others that the swarm has gone on without them, and offers averages or weights of its own.

    But they come in time and hold the same weights as each other, and no other peer claims that others exist."""
    plan = Plan(compute_seconds=0.1)
    # While one of the two finds out about the lie, the other waits. If its wait is short, it goes on alone.
    honest = partial(member, wait_seconds=8.0)
    with Peers(timeout_seconds=120) as peers:
        for name in ("a", "b"):
            peers.start(name, honest, tmp_path, plan, 3)
        peers.start("mallory", partial(member, lie=lie, max_steps=10**6), tmp_path, plan, 3)
        found = peers.results("a", "b")
    (a, _), (b, _) = found["a"], found["b"]
    for outcome in (a, b):
        assert_made_each_update(outcome)
        assert all(update.peer_ids == {a.peer_id, b.peer_id} for update in outcome.updates[-5:])
    assert_their_work_counts(a, b)
    assert_equal_updates(a, b)
    for name in "ab":
        said = (tmp_path / f"{name}.log").read_text()
        assert not USED.search(said), "its state and averages are not used"
        assert "mallory claims a later step" in said, "the liar is named"


@pytest.mark.parametrize("lie", ["flip", "false-statistics"])
def test_a_false_donor_spoils_no_newcomer(tmp_path, lie):
    """It is asked first, and refused before the newcomer has given anything to the swarm."""
    plan, endless = Plan(compute_seconds=0.03), 10**6
    with Peers(timeout_seconds=120) as peers:
        for name in ("a", "b"):
            peers.start(name, partial(member, max_steps=endless), tmp_path, plan, 3)
        peers.start("mallory", partial(member, lie=lie, max_steps=endless), tmp_path, plan, 3)
        peers.until(lambda: has_step(peers, "a", 3))
        c = peers.start("c", partial(member, max_steps=endless, asks="mallory"), tmp_path, plan, 1)
        peers.until(lambda: len(c.messages) >= NEWCOMER_UPDATES and updates_given(c) >= NEWCOMER_GIVES)
        (tmp_path / "stop").touch()
        found = peers.results("a", "b", "c")
    (a, a_rounds), (b, b_rounds), (c, _) = (found[name] for name in "abc")
    for rounds in (a_rounds, b_rounds):
        assert_few_failed(rounds)
    assert_equal_updates(a, b)
    given = [update for update in c.updates if update.own_samples > 0]
    assert_equal_updates(a, replace(c, updates=given)), "it has given nothing that was computed on other weights"
    assert_equal_updates(a, replace(c, updates=c.updates[-8:]))
    for name in "ab":
        said = (tmp_path / f"{name}.log").read_text()
        assert "from mallory" not in said, "an honest peer has taken over its state"
    said = (tmp_path / "c.log").read_text()
    assert said.count("from mallory:") <= 1, "it is not asked again"
    dropped = [
        line.split(" differ from those of ")[0] for line in said.splitlines() if " differ from those of " in line
    ]
    assert "No state from mallory: " in said or any("mallory" in whose for whose in dropped)
