"""A swarm computes what one process would compute on the same samples, and counts as Lightning does."""

import math
import time
from contextlib import contextmanager
from functools import partial

import lightning as L
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from recipe.errors import InputError
from swarm.membership.run_manifest import PROTOCOL
from swarm.runtime.processes import descendants
from swarm.training.averaging_mode import Averaging
from swarm.training.limits import Limit
from swarm.training.strategy import SwarmStrategy
from tests.helpers.strategy_runs import (
    MICRO_BATCH,
    Outcome,
    Plan,
    Record,
    Task,
    assert_equal_updates,
    assert_same_bits,
    learning_rate_factor,
    loader,
    replay,
    train,
    trainer_for,
)
from tests.helpers.swarm_peers import Peers, running_dht

pytestmark = pytest.mark.timeout(180)
TOLERANCE = 2e-6  # absolute, of losses around 1 and weights below 1: about ten times what was seen


class TimeIsUp(Limit):
    """Ends training from the beginning on."""

    def look(self, trainer):
        trainer.should_stop = True


def train_without_time(name, initial_peers, line):
    """Return what it has computed before it left."""
    with running_dht(initial_peers, line) as dht:
        task = Task(Plan())
        trainer_for(SwarmStrategy(16, "test", dht=dht), [TimeIsUp()], max_steps=3).fit(task, loader(1))
        return task.indices


def test_a_peer_whose_time_is_up_when_it_has_joined_computes_nothing():
    with Peers() as peers:
        peers.start("a", train_without_time)
        assert peers.results()["a"] == []


HOUR = 3600.0


class WaitsForAnHour(L.Callback):
    """Lets a peer that is alone expect others, and wait for their records for an hour when none has come."""

    def __init__(self):
        self.compute_seconds: list[float] = []
        self._num_waits = 0

    def on_train_start(self, trainer, pl_module):
        coordinator, clock = trainer.strategy.coordinator, time.perf_counter
        coordinator.averager.signals.expect_company(math.inf)
        coordinator.tracker.exchange.wait_refreshed = self._wait
        time.perf_counter = lambda: clock() + HOUR * self._num_waits

    def _wait(self, timeout_seconds):
        self._num_waits += 1
        return True

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (last := trainer.strategy.coordinator.last_step) is not None:
            self.compute_seconds.append(last.compute_seconds)


def train_expecting_others(name, initial_peers, line):
    with running_dht(initial_peers, line) as dht:
        waits = WaitsForAnHour()
        trainer_for(SwarmStrategy(16, "test", dht=dht), [waits], max_steps=2).fit(Task(Plan()), loader(1))
        return waits.compute_seconds


def test_waiting_for_news_of_other_peers_does_not_count_as_computing():
    with Peers() as peers:
        peers.start("a", train_expecting_others)
        found = peers.results()["a"]
    assert found
    assert max(found) < HOUR


# ---- one peer against a plain Trainer ------------------------------------------------------------------------------


class MicroBatchLosses(L.Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())


def train_alone_twice(name, initial_peers, line, plan, micro_batches, steps):
    """Make the same 20 updates by a plain Trainer and by a swarm of one. Returns (losses, weights) of each."""
    losses = MicroBatchLosses()
    task = Task(plan)
    options = {"max_steps": steps, "gradient_clip_val": plan.clip}
    trainer = trainer_for(callbacks=[losses], accumulate_grad_batches=micro_batches, **options)
    trainer.fit(task, loader(1))
    # Lightning reports a micro-batch's loss divided by their number
    plain = [sum(losses.losses[i : i + micro_batches]) for i in range(0, len(losses.losses), micro_batches)]
    with running_dht(initial_peers, line) as dht:
        swarm_task, record = Task(plan), Record()
        strategy = SwarmStrategy(micro_batches * MICRO_BATCH, "test", dht=dht)
        trainer_for(strategy, [record], **options).fit(swarm_task, loader(1))
    swarm = [update.loss for update in record.updates]
    return plain, swarm, dict(task.net.state_dict()), dict(swarm_task.net.state_dict())


@pytest.mark.parametrize("batch_norm", [False, True], ids=["layer-norm", "batch-norm"])
def test_a_swarm_of_one_equals_a_plain_trainer(batch_norm):
    """The sums differ in their last bit only: a mean of means there, a sum divided by the samples here.

    With a power of two of micro-batches nothing would differ. Seen: 1.2e-7 in losses, 6e-8 in weights. float32 resolves
    6e-8 of 1."""
    with Peers() as peers:
        peers.start("a", train_alone_twice, Plan(batch_norm=batch_norm), 3, 20)
        plain, swarm, plain_weights, swarm_weights = peers.results()["a"]
    assert len(plain) == len(swarm) == 20
    assert swarm[-1] < swarm[0]
    report_difference("one peer, losses", swarm, plain)
    report_difference("one peer, weights", swarm_weights, plain_weights)
    torch.testing.assert_close(swarm, plain, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(swarm_weights, plain_weights, rtol=0, atol=TOLERANCE)


def report_difference(what: str, one, other) -> None:
    """Print how much of a tolerance is needed; `pytest -s` shows it."""
    values = zip(one.values(), other.values(), strict=True) if isinstance(one, dict) else zip(one, other, strict=True)
    print(
        f"{what}: {max((torch.as_tensor(a).double() - torch.as_tensor(b).double()).abs().max() for a, b in values):.1e}"
    )


# ---- two peers against one process ---------------------------------------------------------------------------------


def train_two(plan: Plan, steps: int, target: int = 64) -> dict[str, Outcome]:
    with Peers() as peers:
        for name in "ab":
            peers.start(name, partial(train, min_peers=2, max_steps=steps, matchmaking_seconds=15.0), plan, target)
        found = peers.results()
    for outcome in found.values():
        assert [update.step for update in outcome.updates] == list(range(1, steps + 1))
        for update in outcome.updates:
            assert update.num_peers == 2
            assert update.complete
            assert update.own_samples == sum(map(len, update.indices)) > 0
            assert target <= update.samples
            assert update.global_step == update.scheduler_step == update.step
    assert_equal_updates(found["a"], found["b"])
    assert_same_bits(found["a"].state, found["b"].state)
    return found


def contributions(found: dict[str, Outcome]) -> list:
    return [list(step) for step in zip(*([u.indices for u in found[name].updates] for name in found), strict=True)]


def without_counters(weights: dict) -> dict:
    return {name: tensor for name, tensor in weights.items() if "num_batches_tracked" not in name}


def compare_with_replay(found: dict[str, Outcome], plan: Plan, together: bool) -> None:
    updates = found["a"].updates
    expected = list(replay(plan, contributions(found), together))
    losses, expected_losses = [u.loss for u in updates], [loss for loss, *_ in expected]
    report_difference("two peers, losses", losses, expected_losses)
    torch.testing.assert_close(losses, expected_losses, rtol=0, atol=TOLERANCE)
    for update, (_, weights, _) in zip(updates, expected, strict=True):
        torch.testing.assert_close(without_counters(update.weights), without_counters(weights), rtol=0, atol=TOLERANCE)
    report_difference("two peers, weights", without_counters(updates[-1].weights), without_counters(expected[-1][1]))


def test_two_peers_equal_one_process_on_the_union_of_their_samples():
    """The union goes through the model at once here, in micro-batches there, so sums differ in their last bits.

    Seen after 20 steps: 1.2e-7 in losses and weights."""
    plan = Plan()
    found = train_two(plan, steps=20)
    assert all(update.own_samples < update.samples for update in found["a"].updates)
    compare_with_replay(found, plan, together=True)


def test_batch_norm_statistics_are_the_mean_over_samples():
    """After every step both peers hold the mean of their statistics, weighted by their samples. Tolerance as above."""
    plan = Plan(batch_norm=True)
    found = train_two(plan, steps=10)
    compare_with_replay(found, plan, together=False)
    first = found["a"].updates[0].weights
    assert not torch.equal(first["1.running_mean"], plan.net()[1].running_mean)


def test_clipping_follows_averaging():
    """With plain SGD at rate 1 the update *is* the clipped gradient: its norm tells when it was clipped."""
    plan = Plan(optimizer="sgd", clip=1e-2)
    found = train_two(plan, steps=5)
    compare_with_replay(found, plan, together=True)
    weights = [plan.net().state_dict()] + [update.weights for update in found["a"].updates]
    for before, after, (*_, norm) in zip(weights, weights[1:], replay(plan, contributions(found), True), strict=False):
        assert norm > 5 * plan.clip
        moved = torch.cat([(after[name] - before[name]).flatten() for name in after]).norm().item()
        # the mean of clipped gradients that point in different directions would be shorter
        assert moved == pytest.approx(plan.clip, rel=1e-4)


# ---- Lightning's counters ------------------------------------------------------------------------------------------


def train_with_checkpoints(name, initial_peers, line, folder):
    """Make six updates with checkpoints, then resume in a new trainer from the last one. Returns the record of both."""
    with running_dht(initial_peers, line) as dht:
        seen = []
        for max_steps, checkpoint in ((6, None), (9, folder / "step=6.ckpt")):
            record = Record()
            saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
            strategy = SwarmStrategy(32, "test", dht=dht)
            trainer = trainer_for(strategy, [record, saves], max_steps=max_steps)
            trainer.fit(Task(Plan()), loader(1), ckpt_path=checkpoint)
            seen.append((record.joined_at, record.updates, trainer.global_step))
        return seen


def test_lightning_counts_global_updates(tmp_path):
    with Peers() as peers:
        peers.start("a", train_with_checkpoints, tmp_path)
        (joined, updates, steps), (joined_again, updates_again, steps_again) = peers.results()["a"]
    assert (joined[0], steps) == (0, 6)
    assert (joined_again[0], steps_again) == (6, 9)
    assert [update.step for update in updates + updates_again] == list(range(1, 10))
    for update in updates + updates_again:
        assert len(update.indices) == 4  # micro-batches
        assert update.global_step == update.scheduler_step == update.step
        assert update.learning_rate == pytest.approx(0.01 * learning_rate_factor(update.step))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step={n}.ckpt" for n in (2, 4, 6, 8)]
    for step in (2, 4, 6, 8):
        checkpoint = torch.load(tmp_path / f"step={step}.ckpt", weights_only=False)
        assert checkpoint["global_step"] == step
        weights = (updates + updates_again)[step - 1].weights
        torch.testing.assert_close({k[4:]: v for k, v in checkpoint["state_dict"].items()}, weights, rtol=0, atol=0)


# ---- what cannot work ----------------------------------------------------------------------------------------------


class TwoOptimizers(Task):
    def training_step(self, batch, batch_idx):
        raise NotImplementedError

    def __init__(self, plan: Plan):
        super().__init__(plan)
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[0].parameters(), lr=0.1), torch.optim.SGD(self.net[3].parameters(), lr=0.1)]


class Manual(Task):
    def __init__(self, plan: Plan):
        super().__init__(plan)
        self.automatic_optimization = False


class Plateau(Task):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}


class Statistics(Task):
    def __init__(self, plan: Plan):
        super().__init__(plan)
        self.norm = torch.nn.BatchNorm1d(4)


class Masked(Task):
    def __init__(self, plan: Plan):
        super().__init__(plan)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(4), persistent=False)


class Tabled(Task):
    def __init__(self, plan: Plan):
        super().__init__(plan)
        self.register_buffer("table", torch.tensor([1e6]), persistent=False)


class Unfreezes(Task):
    def __init__(self, plan: Plan):
        super().__init__(plan)
        self.net[0].requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        self.net[0].requires_grad_(batch_idx > 1)


def mixed_precision() -> dict:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}


REFUSED = {
    "two optimizers": (TwoOptimizers, "none", dict, "one optimizer"),
    "manual optimization": (Manual, "none", dict, "automatic optimization"),
    "accumulation": (Task, "none", partial(dict, accumulate_grad_batches=2), "accumulate_grad_batches"),
    "plateau": (Plateau, "none", dict, "ReduceLROnPlateau"),
    "half precision": (Task, "none", mixed_precision, "bf16-mixed"),
    "coarse statistics": (Statistics, "int8", dict, "running statistics"),
    "a mask of infinities": (Masked, "none", dict, "buffer mask holds numbers that are not finite"),
    "a table that is cut off": (Tabled, "fp16", dict, "buffer table holds numbers beyond ±65,504"),
    "the same while the swarm chooses": (Tabled, "auto", dict, "use 'none' with another averaging than auto"),
    "what is unfrozen on the way": (Unfreezes, "none", dict, "BackboneFinetuning"),
}


@contextmanager
def refusal(found: list):
    try:
        yield
    except (InputError, MisconfigurationException) as error:
        found.append((type(error), str(error)))
    else:
        found.append((None, ""))


def try_what_cannot_work(name, initial_peers, line):
    """Return one (type, message) for each of `REFUSED`, and the names of processes that are left."""
    found = []
    for module, codec, options, _ in REFUSED.values():
        with refusal(found):
            averaging = Averaging.choosing() if codec == "auto" else Averaging.sync(codec)
            strategy = SwarmStrategy(32, "test", averaging=averaging)
            trainer_for(strategy, max_steps=1, **options()).fit(module(Plan()), loader(1))
    left = [process.name() for process in descendants(psutil.Process().pid)]
    with refusal(found):
        SwarmStrategy(0, "test")
    return found, left


def test_what_cannot_work_is_refused_in_a_sentence():
    with Peers() as peers:
        peers.start("a", try_what_cannot_work)
        found, left = peers.results()["a"]
    for (error, message), (*_, part) in zip(found, [*REFUSED.values(), ("target batch size",)], strict=True):
        assert error is InputError, message
        assert part in message
        assert "\n" not in message
    assert left == []


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("sync", Averaging.sync()),
        ("overlap-int8", Averaging.overlap("int8")),
        ("local-fp16", Averaging.local(codec="fp16")),
    ],
)
def test_an_averaging_has_a_name(name, made):
    assert SwarmStrategy(32, "test", averaging=name).averaging == made


def test_peers_of_two_versions_have_two_namespaces(monkeypatch):
    """So they never meet: a Trainer with this strategy reads no manifest by which it could be refused."""
    ours = SwarmStrategy(32, "test.1").namespace
    assert ours == SwarmStrategy(32, "test.1").namespace
    assert "." not in ours, "it has a meaning to hivemind"
    monkeypatch.setattr("swarm.training.strategy.PROTOCOL", PROTOCOL - 1)
    assert SwarmStrategy(32, "test.1").namespace != ours


@pytest.mark.parametrize("name", ["nothing", "sync-zip", ""])
def test_a_name_of_no_averaging_is_refused(name):
    with pytest.raises(InputError, match="There is no"):
        SwarmStrategy(32, "test", averaging=name)
