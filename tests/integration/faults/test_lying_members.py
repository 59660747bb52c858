"""Members that lie: as senders, where averages are clipped and where they are not, and as reducers."""

import os
import re
from functools import partial

import pytest
import torch

from swarm.training.averaging_mode import Averaging
from swarm.training.strategy import SwarmStrategy
from swarm.training.undo import breaker, sound_states
from tests.helpers import strategy_runs
from tests.helpers.attacks import members
from tests.helpers.strategy_runs import (
    Outcome,
    Plan,
    Record,
    Samples,
    Task,
    Update,
    assert_equal_updates,
    assert_same_bits,
    loader,
    patience,
    trainer_for,
)
from tests.helpers.swarm_peers import Peers, running_dht

pytestmark = pytest.mark.timeout(180)
UPDATES, TARGET, HONEST = 24, 128, "abc"
KEEP_EVERY = 4
"""Steps between kept states. Some kept states are from before the lie, and some from after it."""
PLAN = Plan(compute_seconds=0.02)


def were_four(updates: list[Update]) -> bool:
    """Whether all updates are made, half of them and the last one by all four, so that all stop at the same one."""
    sizes = [update.num_peers for update in updates]
    return updates[-1].step >= UPDATES and sizes[-1] == 4 and sizes.count(4) >= UPDATES / 2


def member(name, initial_peers, line, folder, averaging, lie=None, updates=-1):
    """Run a peer of the tiny model that prints to a file; with a lie it is the liar."""
    sound_states.KEEP_EVERY = KEEP_EVERY
    output = os.open(folder / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    if lie is not None:
        members.LIES[lie]()
    with running_dht(initial_peers, line) as dht:
        strategy = SwarmStrategy(
            TARGET, "test", dht=dht, name=name, options=patience(len(HONEST) + 1), averaging=averaging
        )
        record, task = Record(line, were_four), Task(PLAN)
        trainer_for(strategy, [record], max_steps=updates, gradient_clip_val=PLAN.clip).fit(task, loader(ord(name[0])))
        state = {key: value.clone() for key, value in task.net.state_dict().items()}
        return Outcome(str(dht.peer_id), record.updates, record.joined_at, state, {})


def train(folder, averaging: Averaging, lie: str | None, start=member) -> tuple[dict[str, Outcome], str]:
    """Train three honest peers and one more, which may lie; returns what the honest ones have, and what they print."""
    with Peers(timeout_seconds=90) as peers:
        for name in HONEST:
            peers.start(name, start, folder, averaging)
        peers.start("mallory", partial(start, lie=lie), folder, averaging)
        found = peers.results(*HONEST)
    return found, "".join((folder / f"{name}.log").read_text() for name in HONEST)


def accuracy(outcome: Outcome, step: int = UPDATES) -> float:
    """Return the accuracy on all samples of the first weights after so many updates; 0 if they are not finite."""
    net, samples = PLAN.net(), Samples()
    net.load_state_dict(next(update.weights for update in outcome.updates if update.step >= step))
    with torch.no_grad():
        return float((net(samples.x).argmax(1) == samples.y).float().mean())


def assert_all_alike(found: dict[str, Outcome]) -> None:
    one, *others = found.values()
    for other in others:
        assert_equal_updates(one, other)
        assert_same_bits(one.state, other.state)
    assert [update.step for update in one.updates] == list(range(1, len(one.updates) + 1)), "all updates are made"


@pytest.mark.parametrize(("lie", "is_named"), [("reverse", True), ("idle", False)])
def test_a_liar_does_not_carry_clipped_averages_off(tmp_path, lie, is_named):
    found, said = train(tmp_path, Averaging.sync(), lie)
    assert_all_alike(found)
    assert accuracy(found["a"]) > 0.6, "a single process has 0.70 to 0.75 by then"
    assert ("its gradients were far from those of the other members" in said) == is_named
    assert not is_named or "mallory: its gradients" in said
    assert said.count("its gradients were far") <= len(HONEST), "at most once by each peer"


def test_the_same_liar_carries_off_averages_that_are_not_clipped(tmp_path):
    found, said = train(tmp_path, Averaging.sync(robust="off"), "reverse")
    assert_all_alike(found)
    assert accuracy(found["a"]) < 0.4
    assert "its gradients were far" not in said


def test_honest_peers_are_not_named_where_the_codec_leaves_out_most(tmp_path):
    """What the codec leaves out of a mean is not the gift of one member."""
    found, said = train(tmp_path, Averaging.local(1, "topk"), None)
    assert_same_bits(found["a"].state, found["b"].state)
    assert_same_bits(found["a"].state, found["c"].state)
    assert accuracy(found["a"]) > 0.4, "it has learnt something"
    assert "its gradients were far" not in said


SPIKE = (16, 17)
"""Updates with a learning rate so high that no gradient brings the weights back."""
MANY_UPDATES = 40


def spiking(name, *arguments, **options):
    strategy_runs.learning_rate_factor = lambda step: 3000.0 if step in SPIKE else 4.0
    breaker.WINDOW = 4
    return member(name, *arguments, updates=MANY_UPDATES, **options)


def went_back(said: str) -> list[tuple[int, int, str]]:
    """Return for each time that a peer went back: its step, the step of the state, and the reason."""
    found = re.findall(r"Step (\d+): the group went back to step (\d+): (.*)", said)
    return [(int(at), int(to), why) for at, to, why in found]


def differ(one: dict, other: dict, step: int) -> bool:
    """Whether two peers held different weights after this update."""
    return any(not torch.equal(one[step][name], other[step][name]) for name in one[step])


def test_a_swarm_goes_back_when_a_reducer_has_lied_and_when_its_loss_has_risen_for_good(tmp_path):
    """First a lie is found, named and undone: one member was given another average. Later the loss rises for good."""
    found, said = train(tmp_path, Averaging.sync(), "equivocate", start=spiking)
    held = {name: {update.step: update.weights for update in outcome.updates} for name, outcome in found.items()}
    apart = {step for step in held["a"] for name in "bc" if step in held[name] and differ(held["a"], held[name], step)}
    assert apart, "it has told them different things"
    honest = {outcome.peer_id for outcome in found.values()}
    for name, outcome in found.items():
        own = (tmp_path / f"{name}.log").read_text()
        assert "mallory signed different averages for different members, which is proven: it is left" in own
        (at, to, why), (at_later, to_later, why_later) = went_back(own)
        assert (to, why) == (0, "averages of mallory were proven false")
        assert max(apart) < at <= min(apart) + 3, "together again soon, and for good"
        met = set().union(*(update.peer_ids for update in outcome.updates if update.step > at))
        assert met <= honest, "the liar is not met any more"
        assert to_later <= SPIKE[0] < at_later
        assert why_later.startswith("the loss has risen and stays high")
        losses = {update.step: update.loss for update in outcome.updates}
        assert losses[at_later - 1] > 100 > 1 > losses[at_later + 1]
        assert {at, at_later}.isdisjoint(losses), "those were no averages"
        last = outcome.updates[-1]
        assert (last.step, last.global_step, last.scheduler_step) == (MANY_UPDATES,) * 3, "steps only grow"
        assert_same_bits(found["a"].state, outcome.state)
    assert not re.search(r"(?<!mallory) (signed|does not show)", said), "no other peer is named"
    assert accuracy(found["a"], MANY_UPDATES) > 0.8
