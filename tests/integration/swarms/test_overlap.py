"""Averaging in the background: nothing is counted twice or lost, and the result is that of one late process."""

from dataclasses import dataclass

import lightning as L
import pytest
import torch
from torch.nn import functional as F

from swarm.training.averaging_mode import Averaging
from swarm.training.strategy import SwarmStrategy
from tests.helpers.strategy_runs import Plan, Samples, Task, assert_same_bits, loader, patience, trainer_for
from tests.helpers.swarm_peers import Peers, running_dht

STEPS = 12
TARGET = 64


@dataclass
class LateUpdate:
    """One update of one peer: its micro-batches, each with the version of the weights that it was computed on."""

    step: int
    samples: int
    num_peers: int
    complete: bool
    micro_batches: list[tuple[int, list[int]]]
    blocked_seconds: float
    weights: dict


class LateTask(Task):
    """Notes the version of the weights with which it computes each micro-batch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.versions.append(self.trainer.strategy.coordinator.step)
        return loss


class LateRecord(L.Callback):
    """Divides the micro-batches among the updates by the number of samples that went into each."""

    def __init__(self):
        self.updates: list[LateUpdate] = []
        self.contributed = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        coordinator, self.contributed = trainer.strategy.coordinator, self.contributed + len(batch[2])
        report = coordinator.last_step
        if report is None or (self.updates and self.updates[-1].step == report.step):
            return
        brought, samples = [], 0
        while samples < report.own_samples:
            indices = pl_module.indices.pop(0)
            brought.append((pl_module.versions.pop(0), indices))
            samples += len(indices)
        assert samples == report.own_samples, "a micro-batch was divided"
        weights = {name: tensor.clone() for name, tensor in pl_module.net.state_dict().items()}
        self.updates.append(
            LateUpdate(
                report.step,
                report.samples,
                report.num_peers,
                report.round is not None and report.round.complete,
                brought,
                report.blocked_seconds,
                weights,
            )
        )


def train_late(name, initial_peers, line, plan, target, steps, codec):
    with running_dht(initial_peers, line) as dht:
        averaging = Averaging.overlap(codec)
        strategy = SwarmStrategy(target, "late", dht=dht, name=name, options=patience(2), averaging=averaging)
        task, record = LateTask(plan), LateRecord()
        task.versions = []
        trainer_for(strategy, [record], max_steps=steps, gradient_clip_val=plan.clip).fit(task, loader(ord(name)))
        left = sum(map(len, task.indices))
        return record.updates, record.contributed - left


def replayed(plan: Plan, updates: list[list[LateUpdate]]):
    """Return the weights after each update in one process that computes each gradient on the peer's version of them."""
    samples, net = Samples(), plan.net()
    optimizer, scheduler = plan.update(net)
    versions = [{name: tensor.clone() for name, tensor in net.state_dict().items()}]
    for peers in updates:
        total = sum(len(indices) for update in peers for _, indices in update.micro_batches)
        gradients = [torch.zeros_like(param) for param in net.parameters()]
        for version, indices in (one for update in peers for one in update.micro_batches):
            net.load_state_dict(versions[version])
            loss = F.cross_entropy(net(samples.x[indices]), samples.y[indices])
            for gradient, own in zip(gradients, torch.autograd.grad(loss, list(net.parameters())), strict=True):
                gradient.add_(own, alpha=len(indices) / total)
        net.load_state_dict(versions[-1])
        for param, gradient in zip(net.parameters(), gradients, strict=True):
            param.grad = gradient
        torch.nn.utils.clip_grad_norm_(net.parameters(), plan.clip)
        optimizer.step()
        scheduler.step()
        versions.append({name: tensor.clone() for name, tensor in net.state_dict().items()})
    return versions[1:]


@pytest.mark.parametrize(("codec", "tolerance"), [("none", 2e-6), ("int8", 2e-2)])
def test_two_overlapped_peers_equal_one_process_that_is_late(codec, tolerance):
    """Sums differ in their last bits; 8-bit numbers round gradients to 7. Seen after 12 updates: 6e-8, 4e-3."""
    plan = Plan(compute_seconds=0.02)
    with Peers() as peers:
        for name in "ab":
            peers.start(name, train_late, plan, TARGET, STEPS, codec)
        found = peers.results()
    both = list(zip(found["a"][0], found["b"][0], strict=True))
    assert [one.step for one, _ in both] == list(range(1, STEPS + 1))
    for one, other in both:
        assert one.complete
        assert other.complete
        assert one.num_peers == other.num_peers == 2
        brought = [len(indices) for update in (one, other) for _, indices in update.micro_batches]
        assert sum(brought) == one.samples == other.samples >= TARGET
        assert_same_bits(one.weights, other.weights)
    late = [update.step - 1 - version for pair in both for update in pair for version, _ in update.micro_batches]
    assert set(late) == {0, 1}, "it computes on while the average is on its way, on weights that are one update old"
    for updates, contributed in found.values():
        assert contributed == sum(len(indices) for update in updates for _, indices in update.micro_batches)
    for (one, _), expected in zip(both, replayed(plan, both), strict=True):
        torch.testing.assert_close(one.weights, expected, rtol=0, atol=tolerance)
    last, expected = both[-1][0].weights, replayed(plan, both)[-1]
    print(codec, "largest difference", max((last[name] - expected[name]).abs().max().item() for name in last))
