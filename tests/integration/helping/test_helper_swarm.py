"""A helper, which trains nothing, and the peers for which it averages."""

import time
from collections.abc import Callable, Iterator
from functools import partial

import psutil
import pytest
import torch
from torch.nn import functional as F

from swarm.averaging.robust_mean import weighted_mean
from swarm.training.averaging_mode import Averaging
from swarm.training.gradient_buffer import GradientVector, averaged_tensors
from tests.helpers.homes.nat import HOME_IP, INTERNET_IP, enter, home_behind_router, why_not
from tests.helpers.strategy_runs import (
    MICRO_BATCH,
    Outcome,
    Plan,
    Samples,
    Update,
    assert_equal_updates,
    assert_same_bits,
    helper,
    train,
)
from tests.helpers.swarm_peers import Peers

pytestmark = pytest.mark.timeout(180)
STEPS, TARGET = 10, 128
TOGETHER = 5
"""Updates that all five have to make together."""
VOLUNTEERS = "abcd"
EXACT = Averaging.sync(robust="off")
"""A weighted mean in float32: which peer reduces which numbers changes no bit of it."""
WHY_NO_ROUTER = why_not()


def expected(plan: Plan, found: dict[str, Outcome]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights after each update, made in one process of the gradients that its members have sent.

    These are the gradients of their samples at the weights before, but not to the last bit: a failed round has divided
    and multiplied them. A peer that missed an update has dropped what it had computed before.
    """
    samples, net = Samples(), plan.net()
    outcomes = {outcome.peer_id: outcome for outcome in found.values()}
    optimizer, scheduler = plan.update(net)
    vector = GradientVector(*averaged_tensors(net, optimizer))
    for update in found["h"].updates:
        parts, weights = [], []
        for outcome in map(outcomes.get, update.order):
            own = next(own for own in outcome.updates if own.step == update.step)
            if own.own_samples:  # else it is the helper
                parts.append(outcome.sent[update.step - 1])
                weights.append(float(own.own_samples))
                torch.testing.assert_close(gradient(vector, net, samples, own), parts[-1], rtol=1e-4, atol=1e-6)
        assert sum(weights) == update.samples >= TARGET
        vector.take(weighted_mean([part.clone() for part in parts], weights))
        vector.hand_over()
        torch.nn.utils.clip_grad_norm_(net.parameters(), plan.clip)
        optimizer.step()
        scheduler.step()
        vector.reset()
        yield {name: tensor.clone() for name, tensor in net.state_dict().items()}


def gradient(vector: GradientVector, net: torch.nn.Module, samples: Samples, own: Update) -> torch.Tensor:
    """Return the mean gradient over the samples of one peer's part in an update."""
    for batch in own.indices[-own.own_samples // MICRO_BATCH :]:
        vector.receive(len(batch))
        F.cross_entropy(net(samples.x[batch]), samples.y[batch]).backward()
        vector.collect()
    vector.to_wire(own.own_samples)
    return vector.wire.clone()


NO_NEED = pytest.mark.skipif(WHY_NO_ROUTER is None, reason="those behind a router are client-mode as well")


@pytest.mark.parametrize("client_mode", [pytest.param(True, marks=NO_NEED), False], ids=["client-mode", "open"])
def test_a_helper_and_four_volunteers_hold_the_bits_of_one_process(client_mode):
    """The volunteers can be called, or not; both cases are compared with the same arithmetic, bit by bit."""
    compare(helper, partial(train, client_mode=client_mode))


@pytest.mark.skipif(WHY_NO_ROUTER is not None, reason=str(WHY_NO_ROUTER))
def test_a_helper_and_volunteers_behind_a_router_hold_the_bits_of_one_process():
    """The router translates addresses, so no peer on the other side could call the volunteers."""
    with home_behind_router() as home:
        first, volunteer = partial(helper, host=INTERNET_IP), partial(train, client_mode=True, host=HOME_IP)
        compare(partial(at, home.internet, first), partial(at, home.home, volunteer))


def at(place: tuple[str, ...], part: Callable[..., Outcome], *arguments, **options) -> Outcome:
    """Run a peer in another network."""
    enter(place)
    return part(*arguments, **options)


def were_together(updates: list[Update]) -> bool:
    """Whether there were enough common updates; all five have seen these, so they stop at the same one."""
    return sum(update.num_peers == 5 for update in updates) >= TOGETHER


def compare(first: Callable[..., Outcome], volunteer: Callable[..., Outcome]) -> None:
    """Compare a helper and four volunteers with one process that makes the same updates."""
    plan, common = Plan(compute_seconds=0.02), {"averaging": EXACT, "stop": were_together}
    with Peers(timeout_seconds=120) as peers:
        peers.start("h", partial(first, **common), plan, TARGET)
        for name in VOLUNTEERS:
            peers.start(name, partial(volunteer, min_peers=4, **common), plan, TARGET)
        found = peers.results()
    for name in VOLUNTEERS:
        assert_equal_updates(found["h"], found[name])
        assert_same_bits(found["h"].state, found[name].state)
    updates = found["h"].updates
    assert [update.step for update in updates] == list(range(1, len(updates) + 1))
    assert all(update.own_samples == 0 for update in updates)
    for update, weights in zip(updates, expected(plan, found), strict=True):
        assert_same_bits(update.weights, weights)


@pytest.mark.parametrize("averaging", ["sync", "overlap-fp16", "local-fp16"])
def test_a_helper_waits_without_computing_and_hands_over_to_the_next(averaging):
    """The helper waits twice: before the first volunteer comes, and after the only one has left."""
    plan = Plan(compute_seconds=0.02)
    with Peers(timeout_seconds=120) as peers:
        peers.start("h", partial(helper, max_steps=STEPS, averaging=averaging), plan, TARGET)
        peers.until(lambda: peers["h"].address)
        part = partial(train, averaging=averaging, client_mode=True)
        peers.start("a", partial(part, stop=has_made_three), plan, TARGET)
        left_at = peers.results("a")["a"].updates[-1].step
        if averaging == "sync":
            assert cores_used(peers["h"].processes(), seconds=5.0) < 0.2
        peers.start("b", partial(part, max_steps=STEPS), plan, TARGET)
        found = peers.results("h", "b")
    assert 3 <= left_at < STEPS
    assert found["b"].joined_at[0] - left_at in (0, averaging != "sync"), "handed over, with a round that was under way"
    assert [update.step for update in found["h"].updates] == list(range(1, STEPS + 1))
    assert all(update.num_peers == 2 and update.own_samples == 0 for update in found["h"].updates)
    assert_same_bits(found["h"].state, found["b"].state)


def has_made_three(updates: list) -> bool:
    return len(updates) >= 3


def cores_used(processes: list[psutil.Process], seconds: float) -> float:
    """Return the number of cores that all of them together use on average."""
    before = sum(sum(process.cpu_times()[:2]) for process in processes)
    time.sleep(seconds)
    return (sum(sum(process.cpu_times()[:2]) for process in processes) - before) / seconds
