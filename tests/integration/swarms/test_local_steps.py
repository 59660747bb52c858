"""Local steps: what a swarm of one computes, what two peers average, and what stays on top of an average."""

import copy
from dataclasses import replace

import lightning as L
import pytest
import torch
from hivemind.compression import CompressionInfo
from torch import nn

from recipe.errors import InputError
from swarm.averaging.compression.codec import CODECS, Codec
from swarm.averaging.compression.error_feedback import ErrorFeedback
from swarm.protocol import auto_mode
from swarm.runtime.line_use import LineUse
from swarm.state_sync.training_state import SharedState
from swarm.training.averaging_mode import Averaging, LocalSteps
from swarm.training.local_steps import PseudoGradient
from swarm.training.strategy import OUTER, SwarmStrategy
from tests.helpers.strategy_runs import (
    MICRO_BATCH,
    Plan,
    Task,
    learning_rate_factor,
    loader,
    nan_loader,
    patience,
    trainer_for,
)
from tests.helpers.swarm_peers import Peers, running_dht

TAKE_OVER = LocalSteps(steps=1, learning_rate=1.0, momentum=0.0)


def small_model(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def vector_of(model: nn.Module, local: LocalSteps) -> PseudoGradient:
    return PseudoGradient(list(model.parameters()), [], local)


def move(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.add_(by)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def test_the_pseudo_gradient_points_back_to_where_the_step_began():
    model = small_model()
    before, vector = weights(model), vector_of(model, LocalSteps())
    move(model, 0.25)
    vector.to_wire(10)
    torch.testing.assert_close(vector.wire, before - weights(model))


def test_a_step_that_is_not_finite_takes_what_it_did_to_the_buffers_with_it():
    """Buffers of good local steps stay. A forgotten step goes back to the swarm's buffers, not to the first ones."""
    model = nn.BatchNorm1d(1)
    params, mean = list(model.parameters()), model.running_mean
    vector = PseudoGradient(params, [mean, model.running_var], TAKE_OVER)

    def compute(gradient: float, mean_of_samples: float) -> None:
        mean.fill_(mean_of_samples)
        vector.receive(4)
        for param in params:
            param.grad.add_(gradient)
        vector.collect()
        vector.samples += 4

    compute(1.0, 2.0)
    assert vector.drop_own() == 0
    vector.hand_over_own()
    vector.end_own_step()
    compute(torch.nan, torch.nan)
    assert vector.drop_own() == 4
    assert mean.item() == 2.0
    assert vector.is_finite
    vector.to_wire(4)
    vector.from_wire()
    vector.hand_over()
    mean.fill_(5.0)
    vector.drop()
    assert mean.item() == 2.0


def test_an_outer_step_is_nesterovs():
    """v ← 0.9 v + g and w ← w - 0.5 (g + 0.9 v), by hand over two steps whose average is g = -1."""
    model = small_model()
    vector = vector_of(model, LocalSteps(4, 0.5, 0.9))
    before = weights(model)
    for expected in (0.5 * 1.9, 0.5 * 1.9 + 0.5 * (1 + 0.9 * 1.9)):
        move(model, 3.0)  # this peer went three times as far as the swarm on average
        vector.to_wire(10)
        vector.wire.fill_(-1.0)
        vector.from_wire()
        vector.hand_over()
        torch.testing.assert_close(weights(model), before + expected)


def test_an_average_is_used_where_it_is_and_stays_as_it_was():
    """Neither the momentum nor a local step meanwhile writes into memory that a round or a download may hold."""
    model = small_model()
    vector = vector_of(model, LocalSteps(4, 0.5, 0.9))
    for _ in range(2):
        average = torch.full_like(vector.wire, -1.0)
        vector.wire.fill_(3.0)  # a round to which this peer listens is under way
        vector.follow(average)
        for view in vector.views:
            view.fill_(0.5)
        vector.samples = 8
        vector.hand_over_own()
        vector.end_own_step()
        assert (average == -1.0).all()
        assert (vector.wire == 3.0).all()
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in vector.own_tensors)
    assert num_bytes == 3 * 4 * weights(model).numel(), "gradients, anchors, and what was sent"


def test_what_was_computed_meanwhile_stays_on_top_of_the_average():
    model = small_model()
    vector, before = vector_of(model, TAKE_OVER), weights(model)
    move(model, 1.0)
    vector.to_wire(10)
    move(model, 0.125)
    vector.wire.fill_(-2.0)
    vector.from_wire()
    vector.hand_over()
    torch.testing.assert_close(weights(model), before + 2.0 + 0.125)
    vector.to_wire(10)
    torch.testing.assert_close(vector.wire, torch.full_like(before, -0.125), msg="and counts for the next round")


def test_a_round_that_failed_is_sent_again_whole():
    model = small_model()
    vector = vector_of(model, TAKE_OVER)
    move(model, 1.0)
    vector.to_wire(10)
    vector.take_back(10)
    move(model, 1.0)
    vector.to_wire(20)
    torch.testing.assert_close(vector.wire, torch.full_like(weights(model), -2.0))


def test_what_was_dropped_during_a_round_is_not_undone_when_its_average_comes():
    model = small_model()
    vector = vector_of(model, TAKE_OVER)
    move(model, 0.25)
    vector.to_wire(10)
    vector.drop()
    vector.from_wire()
    vector.hand_over()
    torch.testing.assert_close(weights(model), torch.cat([anchor.detach().reshape(-1) for anchor in vector.anchors]))


@pytest.mark.parametrize("codec", ["fp16", "int8", "topk"])
def test_what_rounding_left_out_outlives_a_round_that_failed(codec):
    """What arrives and what waits add up to the movement of the weights and what waited before."""
    model = small_model()
    vector, feedback = vector_of(model, TAKE_OVER), ErrorFeedback(CODECS[codec](), weights(model).numel())
    generator = torch.Generator().manual_seed(0)

    def send(samples: int) -> torch.Tensor:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.01 * torch.randn(param.shape, generator=generator))
        moved_by = torch.cat([anchor.detach().reshape(-1) for anchor in vector.anchors]) - weights(model)
        vector.to_wire(samples)
        feedback.add_to(vector.wire, CompressionInfo.from_tensor(vector.wire), 0, samples)
        return moved_by.double() * samples

    send(10)
    waited = feedback.left_out.double()
    vector.from_wire()
    vector.hand_over()
    for samples in (20, 25):
        send(samples)
        for view in vector.views:
            view.fill_(0.5)
        vector.samples = 8
        vector.hand_over_own()  # a local step meanwhile
        vector.end_own_step()
        vector.take_back(samples)
    moved_by = send(30)
    assert waited.abs().max() > 1e-6
    torch.testing.assert_close(vector.wire.double() * 30 + feedback.left_out, moved_by + waited, rtol=0, atol=3e-7)


def test_what_waits_to_be_sent_is_not_applied_alone_as_well():
    """A round failed after encoding, and no other peer is left: what was left out goes with the next round, once."""
    model = small_model()
    vector, feedback = vector_of(model, TAKE_OVER), ErrorFeedback(CODECS["topk"](), weights(model).numel())
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.01 * torch.randn(param.shape, generator=torch.Generator().manual_seed(0)))
    moved_by = torch.cat([anchor.detach().reshape(-1) for anchor in vector.anchors]) - weights(model)
    vector.to_wire(10)
    feedback.add_to(vector.wire, CompressionInfo.from_tensor(vector.wire), 0, 10)
    assert feedback.left_out.abs().max() > 1e-3
    vector.take_back(10)
    vector.average_alone(10)
    torch.testing.assert_close(vector.average * 10 + feedback.left_out, moved_by * 10, rtol=0, atol=1e-6)


def test_weights_that_are_not_finite_go_back_to_the_swarms():
    model = small_model()
    vector, before = vector_of(model, TAKE_OVER), weights(model)
    assert vector.is_finite
    move(model, float("nan"))
    assert not vector.is_finite
    vector.drop()
    assert torch.equal(weights(model), before)


def test_newcomers_get_the_swarms_weights_and_the_outer_momentum():
    def make(seed: int) -> tuple[PseudoGradient, SharedState]:
        model = small_model(seed)
        vector = vector_of(model, LocalSteps(4, 0.7, 0.9))
        inner = torch.optim.AdamW(model.parameters())
        return vector, SharedState(model, [inner, vector.outer], dict(zip(vector.params, vector.anchors, strict=True)))

    (vector, state), (other, copy) = make(0), make(1)
    for param in vector.params:
        param.grad = torch.ones_like(param)
    state.optimizers[0].step()
    vector.to_wire(8)
    vector.from_wire()
    vector.hand_over()
    anchors = [anchor.detach().clone() for anchor in vector.anchors]
    move(state.model, 5.0)  # local steps of the donor are its own
    exported = state.export(3, bytes(16))
    copy.check(*exported)
    assert copy.take(*exported)[0] == 3
    other.adopt()
    for expected, anchor, param in zip(anchors, other.anchors, other.params, strict=True):
        assert torch.equal(anchor, expected)
        assert torch.equal(param, expected)
    for mine, theirs in zip(vector.anchors, other.anchors, strict=True):
        expected = vector.outer.state[mine]["momentum_buffer"]
        assert torch.equal(other.outer.state[theirs]["momentum_buffer"], expected)


@pytest.mark.parametrize("options", [{"steps": 0}, {"learning_rate": 0.0}, {"momentum": 1.0}])
def test_what_cannot_work_is_refused(options):
    with pytest.raises(InputError, match="cannot work"):
        LocalSteps(**options)


# ---- swarms ---------------------------------------------------------------------------------------------------------


class Anchors(L.Callback):
    """Keeps the swarm's weights after every global update, as a checkpoint would, and counts local steps."""

    def __init__(self):
        self.weights, self.samples, self.peers, self.losses, self.local_steps = {}, {}, {}, {}, 0
        self.own_samples, self._step = {}, 0
        self.plan, self.schedule, self.learning_rate = None, 0, 0.0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.local_steps += 1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        coordinator = trainer.strategy.coordinator
        report = coordinator.last_step
        if report is not None and report.step == coordinator.step != self._step:
            self._step = report.step
            state = trainer.strategy.lightning_module_state_dict()
            self.weights[report.step] = {name: tensor.clone() for name, tensor in state.items()}
            self.samples[report.step], self.peers[report.step] = report.samples, report.num_peers
            self.losses[report.step], self.own_samples[report.step] = report.loss, report.own_samples


class Told(L.Callback):
    """Tells the test about every state that this peer takes over."""

    def __init__(self, line):
        self._line = line

    def on_train_start(self, trainer, pl_module):
        catching_up = trainer.strategy.coordinator.catching_up
        begin = catching_up.begin

        def tell(donor=None, **told):
            has_changed = begin(donor, **told)
            self._line.put("replaced" if donor and has_changed else "caught up")
            return has_changed

        catching_up.begin = tell


def train_locally(name, initial_peers, line, plan, target, steps, local, min_peers, overlap, codec, data=loader):
    with running_dht(initial_peers, line) as dht:
        averaging = Averaging(Codec(codec, rank=2), overlap, local)
        strategy = SwarmStrategy(target, "local", dht=dht, name=name, options=patience(min_peers), averaging=averaging)
        task, anchors = Task(plan), Anchors()
        trainer_for(strategy, [anchors, Told(line)], max_steps=steps, gradient_clip_val=plan.clip).fit(
            task, data(ord(name))
        )
        anchors.final = {name: tensor.clone() for name, tensor in task.state_dict().items()}
        return anchors


def train_plainly(name, initial_peers, line, plan, target, steps):
    task = Task(plan)
    options = {"max_steps": steps, "gradient_clip_val": plan.clip}
    trainer_for(accumulate_grad_batches=target // MICRO_BATCH, **options).fit(task, loader(ord("a")))
    return dict(task.state_dict())


def test_one_local_step_that_is_taken_over_is_a_plain_trainers():
    """One peer makes one local step for each global update. Anchors move by a difference, which rounds once more."""
    plan = Plan(optimizer="sgd")
    with Peers() as peers:
        peers.start("a", train_locally, plan, 32, 10, TAKE_OVER, 1, False, "none")
        peers.start("b", train_plainly, plan, 32, 10)
        found = peers.results()
    torch.testing.assert_close(found["a"].weights[10], found["b"], rtol=0, atol=2e-6)
    torch.testing.assert_close(found["a"].final, found["a"].weights[10], rtol=0, atol=0)


class OuterMomentum(L.Callback):
    """Keeps the outer optimizer's state as a checkpoint at the beginning of training would hold it."""

    def on_train_start(self, trainer, pl_module):
        self.state = copy.deepcopy(trainer.strategy.optimizer_state(trainer.optimizers[0]).get(OUTER))


def train_and_resume(name, initial_peers, line, folder):
    """Make two updates with an outer momentum, then let another peer resume from the checkpoint.

    Returns:
        the outer optimizer's state in the checkpoint, when the first peer began, and when the second did
    """
    plan, averaging = Plan(), Averaging.local(steps=2, learning_rate=0.7, momentum=0.9)
    found = []
    for run, path in (("first", None), ("second", folder / "kept.ckpt")):
        with running_dht(initial_peers, line) as dht:
            options = patience(1)
            strategy = SwarmStrategy(32, run, dht=dht, name=name, options=options, averaging=averaging)
            momentum = OuterMomentum()
            trainer = trainer_for(strategy, [momentum], max_steps=2 if path is None else 3)
            trainer.fit(Task(plan), loader(1), ckpt_path=path)
            if path is None:
                trainer.save_checkpoint(folder / "kept.ckpt")
                found.append(torch.load(folder / "kept.ckpt", weights_only=False)["optimizer_states"][0][OUTER])
        found.append(momentum.state)
    return found


def test_a_run_goes_on_from_a_checkpoint_with_its_outer_momentum(tmp_path):
    with Peers() as peers:
        peers.start("a", train_and_resume, tmp_path)
        kept, at_first, resumed = peers.results()["a"]
    assert not at_first["state"], "there is none yet"
    assert all(one["momentum_buffer"].any() for one in kept["state"].values())
    assert kept["state"]
    torch.testing.assert_close(resumed["state"], kept["state"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("overlap", "codec", "fragments"),
    [(False, "none", 1), (True, "int8", 1), (True, "powersgd", 1), (True, "topk", 1), (True, "fp16", 4)],
)
def test_two_peers_make_local_steps_and_hold_the_same_anchors(overlap, codec, fragments):
    plan = Plan(compute_seconds=0.01)
    with Peers() as peers:
        for name in "ab":
            peers.start(name, train_locally, plan, 256, 8, LocalSteps(4, fragments=fragments), 2, overlap, codec)
        found = peers.results()
    one, other = found["a"], found["b"]
    assert set(one.peers.values()) == {2}
    assert one.weights.keys() == other.weights.keys() == set(range(1, 9))
    for step in one.weights:
        assert one.samples[step] == other.samples[step] >= 256
        for name, tensor in one.weights[step].items():
            assert torch.equal(tensor, other.weights[step][name]), f"{name} after {step}"
    local_steps = one.local_steps + other.local_steps
    assert min(one.local_steps, other.local_steps) > 0
    assert local_steps >= 8 * 8, "eight for each update, more while a round is slow"
    most = 256 / 4 + MICRO_BATCH  # for a peer that has not heard of the other one yet; later half as many
    assert MICRO_BATCH <= sum(one.samples.values()) / local_steps < most
    for anchors in (one, other):
        assert torch.equal(anchors.final["net.0.weight"], anchors.weights[8]["net.0.weight"]), "the swarm's, at the end"
        assert anchors.losses[8] < 0.8 * anchors.losses[1]


class UntilChanged(Anchors):
    """Ends training some updates after the swarm has changed its mode, at the same update on all peers."""

    def on_train_batch_end(self, trainer, *arguments):
        super().on_train_batch_end(trainer, *arguments)
        self.plan = trainer.strategy.coordinator.control.auto.plan
        if self.plan is not None and not self.plan.is_first:
            trainer.should_stop |= self._step >= self.plan.since + 3
        self.schedule = trainer.lr_scheduler_configs[0].scheduler.last_epoch
        self.learning_rate = trainer.optimizers[0].param_groups[0]["lr"]


def train_auto(name, initial_peers, line, plan, target):
    auto_mode.SHORT_SECONDS = 0.0  # the model is tiny
    with running_dht(initial_peers, line) as dht:
        slow = replace(patience(2), line=LineUse(max_upload_mbps=0.03))  # 0.2 s for a round in fp16
        strategy = SwarmStrategy(target, "auto", dht=dht, name=name, options=slow, averaging="auto")
        task, anchors = Task(plan), UntilChanged()
        trainer_for(strategy, [anchors], max_steps=60, gradient_clip_val=plan.clip).fit(task, loader(ord(name)))
        return anchors


def test_two_peers_change_codec_and_local_steps_at_one_step_and_hold_the_same_anchors():
    """Running statistics leave only four local steps in float32."""
    with Peers() as peers:
        for name in "ab":
            peers.start(name, train_auto, Plan(batch_norm=True), 32)
        found = peers.results()
    one, other = found["a"], found["b"]
    assert one.plan == other.plan
    assert (one.plan.before, one.plan.mode) == (0, 2)
    assert one.weights.keys() == other.weights.keys() == set(range(1, one.plan.since + 4))
    for step in one.weights:
        assert one.samples[step] == other.samples[step] >= (32 if step <= one.plan.since else 128)
        for name, tensor in one.weights[step].items():
            if "num_batches_tracked" not in name:  # counts this peer's own micro-batches
                assert torch.equal(tensor, other.weights[step][name]), f"{name} after {step}"
    assert one.schedule == one.plan.since + 3
    assert one.learning_rate == pytest.approx(0.01 * learning_rate_factor(one.plan.since + 12))


def test_local_steps_that_are_not_finite_count_for_nothing():
    """The peer that makes them listens, and takes over the swarm's state after some in a row."""
    plan = Plan(compute_seconds=0.01)
    with Peers() as peers:
        for name, data in (("a", loader), ("b", nan_loader), ("c", loader)):
            peers.start(name, train_locally, plan, 96, 8, LocalSteps(steps=2), 3, True, "none", data)
        peers.until(lambda: "replaced" in peers["b"].messages)
        one, other = peers.results("a", "c").values()
        peers["b"].kill()  # it trains on, and nothing could end a step
    assert 3 in one.peers.values(), "it listened"
    for step in one.samples.keys() & other.samples.keys():
        assert one.samples[step] == other.samples[step] == one.own_samples[step] + other.own_samples[step] >= 96
        for name, tensor in one.weights[step].items():
            assert torch.equal(tensor, other.weights[step][name]), f"{name} after {step}"
    assert all(torch.isfinite(tensor).all() for tensor in one.final.values())
    assert one.losses[8] < one.losses[1]
