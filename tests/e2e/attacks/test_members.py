"""What a member that lies cannot do any more, each time against a swarm of two that trains.

What takes time is measured by a benchmark; here nobody adopts what is false, nobody ends, updates go on, and honest
peers say who lied.
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
"""Weights are compared twice meanwhile."""
NEWCOMER_GIVES = 10
"""Updates to which it gives samples; of others it takes the average over, more of them on a busy machine."""


class WidePlan(Plan):
    """Some parts for each reducer, where the other plans' models fit into one."""

    def net(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        return nn.Sequential(nn.Linear(FEATURES, 8192), nn.ReLU(), nn.Linear(8192, 4))


class Rounds(Record):
    """Also those that fail.

    Args:
        stop: a file that ends the training
    """

    def __init__(self, line, stop):
        super().__init__(line, lambda _: stop.exists())
        self.events, self.furthest = [], 0
        """Of its rounds; and how many updates somebody was ahead of it, by the records that it read."""

    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        trainer.strategy.coordinator.on_round = self.events.append

    def on_train_batch_end(self, trainer, *args):
        super().on_train_batch_end(trainer, *args)
        coordinator = trainer.strategy.coordinator
        claimed = [record.step - coordinator.step for record in coordinator.tracker.others.values()]
        self.furthest = max([self.furthest, *claimed])


def ask_first(name: str) -> None:
    """Of all who could hand over the state, this peer asks the one that is called so before the others."""
    honest = GlobalProgress.donors

    def donors(self, min_step):
        return sorted(honest(self, min_step), key=lambda peer: self.records[peer].name != name)

    GlobalProgress.donors = donors


def member(
    name, initial_peers, line, folder, plan, min_peers, max_steps=UPDATES, lie=None, asks=None, wait_seconds=3.0
):
    """A peer of the tiny model, what it prints goes to a file; with a lie it is the liar, and may end as it likes.

    Args:
        wait_seconds: for who is missing at the end of a step
    """
    if asks is not None:
        ask_first(asks)
    output = os.open(folder / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    if lie is not None:
        members.LIES[lie]()
    backoff.BACKOFF_SECONDS = (
        60.0  # of who led and hung: in 10 s it could be back before the end; what comes then is not tried
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
    """Who is held up takes over an average: mostly another honest one gave to it, if not this one."""
    given = {update.step for outcome in outcomes for update in outcome.updates if update.own_samples > 0}
    assert len(given) > UPDATES / 2, "updates are not the liar's alone"


def has_step(peers: Peers, name: str, step: int) -> bool:
    return any(made >= step for made, *_ in peers[name].messages)


def updates_given(peer: Peer) -> int:
    """So many of its updates hold samples of its own."""
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
def test_who_has_trained_is_not_misled_by_a_member_that_says_it_is_ahead(tmp_path, lie):
    """It has been in a group, so its word counts for more than a stranger's; its state would come slowly, or be of no
    use. Updates are slow enough that all read each other's records meanwhile."""
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
    assert not any(map(USED.search, said)), "what it has to give is not used"
    furthest = [int(AHEAD.search(one)[1]) for one in said]
    assert min(furthest) >= members.AHEAD - 5, "both have read the lie"
    assert_equal_updates(a, b)


@pytest.mark.parametrize("lie", ["goes-on-alone", "other-history"])
def test_a_leader_that_goes_another_way_is_left_behind(tmp_path, lie):
    """It tells the others that the swarm has gone on without them, and has averages or weights of its own for them:
    they come in time, hold the same weights as each other, and nobody else says that there are other ones."""
    plan = Plan(compute_seconds=0.1)
    # While one of the two finds out that it was lied to, the other waits: if not for long enough, it goes on alone.
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
        assert not USED.search(said), "what it has to give is not used"
        assert "mallory says that" in said, "the liar is named"


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
    dropped = [line.split(" are not those of ")[0] for line in said.splitlines() if " are not those of " in line]
    assert "No state from mallory: " in said or any("mallory" in whose for whose in dropped)
