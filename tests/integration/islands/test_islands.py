"""A peer of several processes computes what one process would, and is one member of the swarm."""

from functools import partial
from statistics import mean

import pytest
from lightning.pytorch.callbacks import Callback

from recipe.errors import InputError
from tests.helpers.islands.processes import start_island
from tests.helpers.strategy_runs import Plan, Samples, Update, assert_equal_updates, assert_same_bits, replay, train
from tests.helpers.swarm_peers import Peers

pytestmark = pytest.mark.timeout(120)
TOLERANCE = 2e-6  # absolute, of losses around 1 and weights below 1; as of peers of one process


def train_islands(names: str, plan: Plan, steps: int, target: int, **options):
    """Return the outcome of each first process, and what each process has computed."""
    with Peers() as peers:
        for name in names:
            start_island(peers, name, plan, target, min_peers=len(names), max_steps=steps, **options)
        found = peers.results()
    outcomes = {name: found[f"{name}0"][0] for name in names}
    return outcomes, {name: computed for name, (_, computed) in found.items()}


def assert_one_state(computed: dict, names: str) -> None:
    """Check that the processes of an island have computed each micro-batch on the same bits, and on other samples."""
    for name in names:
        first, second = computed[f"{name}0"], computed[f"{name}1"]
        assert [one.weights for one in first] == [one.weights for one in second]
        assert [one.step for one in first] == [one.step for one in second]
        assert all(not set(one.indices) & set(other.indices) for one, other in zip(first, second, strict=True))
        assert len({one.weights for one in first}) > 1


def test_two_islands_equal_one_process_on_the_union_of_their_samples():
    """Each process has BatchNorm statistics of its own until an average comes, and so has the replay."""
    steps, plan = 50, Plan(batch_norm=True)
    outcomes, computed = train_islands("ab", plan, steps, target=64)
    assert_one_state(computed, "ab")
    assert_equal_updates(outcomes["a"], outcomes["b"])
    assert_same_bits(outcomes["a"].state, outcomes["b"].state)
    updates = outcomes["a"].updates
    assert [(update.step, update.num_peers) for update in updates] == [(step, 2) for step in range(1, steps + 1)]
    contributions = [
        [[one.indices for one in batches if one.step == step] for batches in computed.values()] for step in range(steps)
    ]
    assert [update.samples for update in updates] == [
        sum(len(batch) for batches in step for batch in batches) for step in contributions
    ]
    # The replay starts from the islands' weights: over 50 updates, one ReLU at its edge would amplify rounding.
    expected = replay(plan, contributions, together=False, held=[update.weights for update in updates])
    differences = [difference_between(update, *own) for update, own in zip(updates, expected, strict=True)]
    print(f"losses: {max(loss for loss, _ in differences):.1e}, weights: {max(other for _, other in differences):.1e}")
    assert max(max(both) for both in differences) < TOLERANCE
    losses = [update.loss for update in updates]
    assert mean(losses[-10:]) < 0.9 * mean(losses[:10]), "it has learnt something"


def are_two_again(updates) -> bool:
    """Whether two peers made the last five updates, after an update by one, if this peer knows of such."""
    return len(updates) >= 5 and all(update.num_peers == 2 for update in updates[-5:])


def test_the_others_wait_while_the_first_process_joins_for_long():
    outcomes, computed = train_islands("a", Plan(), 3, target=64, silent_seconds=4.0)
    assert_one_state(computed, "a")
    assert [update.step for update in outcomes["a"].updates] == [1, 2, 3]


def test_processes_that_share_one_model_and_a_plain_peer_hold_the_same_bits(tmp_path):
    """They agree after each of 50 updates, and in the optimizer's statistics after the last.

    Each update is that of one process on the union of their samples, from the same weights: over 50 updates, one ReLU
    at its edge would amplify rounding."""
    steps, plan = 50, Plan(batch_norm=True)
    with Peers() as peers:
        peers.start("b", partial(train, min_peers=2, max_steps=steps), plan, 64)
        start_island(peers, "a", plan, 64, inside="fsdp", min_peers=2, max_steps=steps, folder=tmp_path)
        found = peers.results()
    assert len([*tmp_path.glob("*.ckpt")]) == steps / 5, "the first process writes them, and the other does not try to"
    (island, first), (_, second), plain = found["a0"], found["a1"], found["b"]
    assert_equal_updates(island, plain)
    assert_same_bits(island.state, plain.state)
    for own, others in zip(island.optimizer["state"].values(), plain.optimizer["state"].values(), strict=True):
        assert_same_bits(own, others)
    assert [(update.step, update.num_peers) for update in island.updates] == [(step, 2) for step in range(1, steps + 1)]
    pieces = [{one.weights for one in batches} for batches in (first, second)]
    assert not pieces[0] & pieces[1]
    contributions = [
        [*([one.indices for one in batches if one.step == update.step - 1] for batches in (first, second)), plain_own]
        for update, plain_own in zip(island.updates, (same.indices for same in plain.updates), strict=True)
    ]
    expected = replay(plan, contributions, together=False, held=[update.weights for update in island.updates])
    differences = [difference_between(update, *own) for update, own in zip(island.updates, expected, strict=True)]
    print(f"losses: {max(loss for loss, _ in differences):.1e}, weights: {max(other for _, other in differences):.1e}")
    assert max(max(both) for both in differences) < TOLERANCE


def difference_between(update: Update, loss: float, weights: dict, norm: float) -> tuple[float, float]:
    """Return the difference of the losses, and the largest difference of weights."""
    shared = [name for name in weights if "num_batches_tracked" not in name]
    largest = max(float((update.weights[name] - weights[name]).abs().max()) for name in shared)
    return abs(update.loss - loss), largest


def test_islands_whose_processes_share_a_model_hand_over_its_state_take_it_over_and_make_up_for_updates():
    """The second one downloads a state so slowly that the first one goes on meanwhile."""
    plan = Plan(batch_norm=True, compute_seconds=0.03)
    with Peers(timeout_seconds=90) as peers:
        start_island(peers, "a", plan, 64, inside="fsdp", stop=are_two_again)
        peers.until(lambda: len(peers["a0"].messages) >= 3)
        start_island(peers, "c", plan, 64, inside="fsdp", stop=are_two_again, slow=True)
        found = peers.results()
    first, joiner = found["a0"][0], found["c0"][0]
    assert joiner.joined_at[0] >= 3
    assert joiner.followed >= 1
    assert_equal_updates(first, joiner)
    assert_same_bits(first.state, joiner.state)
    for own, others in zip(joiner.optimizer["state"].values(), first.optimizer["state"].values(), strict=True):
        assert_same_bits(own, others)


@pytest.mark.parametrize("averaging", ["overlap-fp16", "local-topk"])
def test_in_every_mode_the_processes_compute_on_the_same_bits(averaging):
    outcomes, computed = train_islands("a", Plan(), 10, target=64, averaging=averaging)
    assert_one_state(computed, "a")
    assert outcomes["a"].updates[-1].loss < outcomes["a"].updates[0].loss


class EvaluatesAtOnce(Callback):
    """Computes the model in the first process before any micro-batch."""

    def on_train_start(self, trainer, pl_module):
        if trainer.is_global_zero:
            with pytest.raises(InputError, match="only after their first micro-batch"):
                pl_module.net(Samples().x)


def test_a_divided_model_that_is_evaluated_too_early_is_refused_and_the_island_stays():
    plan = Plan()
    with Peers() as peers:
        start_island(peers, "a", plan, 32, inside="fsdp", max_steps=1, callback=EvaluatesAtOnce)
        outcome, _ = peers.results()["a0"]
    assert [update.step for update in outcome.updates] == [1]


def are_two_after_one(updates) -> bool:
    return any(update.num_peers == 1 for update in updates) and are_two_again(updates)


def test_a_process_is_killed_and_its_island_ends_and_comes_back():
    plan = Plan(compute_seconds=0.02)
    with Peers(timeout_seconds=90) as peers:
        peers.start("b", partial(train, min_peers=2, stop=are_two_after_one), plan, 64)
        start_island(peers, "a", plan, 64, min_peers=2)
        peers.until(lambda: len(peers["a0"].messages) >= 3)
        peers["a1"].kill()
        assert peers.results("a0")["a0"][0] is None
        start_island(peers, "c", plan, 64, min_peers=2, stop=are_two_again)
        found = peers.results("b", "c0", "c1")
    assert [update.step for update in found["b"].updates] == list(range(1, len(found["b"].updates) + 1))
    assert_equal_updates(found["b"], found["c0"][0])
    assert_same_bits(found["b"].state, found["c0"][0].state)
    assert_one_state({"c0": found["c0"][1], "c1": found["c1"][1]}, "c")
