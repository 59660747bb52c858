"""The first process of an island and another one, as two threads of this process that talk through torch's gloo."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recipe.errors import InputError
from recipe.presets import preset
from recipe.training.launched import Launched
from swarm.protocol.messages import Ticket
from swarm.protocol.round_report import StepReport
from swarm.training.contribution import Contribution
from swarm.training.coordinator import Coordinator
from swarm.training.gradient_buffer import GradientVector, averaged_tensors
from swarm.training.helper import HelperStrategy
from swarm.training.island import channel as channels
from swarm.training.island.channel import Channel, Word
from swarm.training.island.crew import Crew
from swarm.training.island.lead import Lead
from swarm.training.island.lost import IslandLost
from swarm.training.island.sharded import division
from swarm.training.island.sharded.peer import ShardedVector
from swarm.training.local_steps import LocalCoordinator
from swarm.training.micro_batch.finder import largest_sensible
from swarm.training.strategy import SwarmStrategy
from swarm.training.throughput import Noted

SAMPLES, OTHERS_SAMPLES = 4, 6
LINEAGE = bytes(range(240, 256))
PULSE_SECONDS, CLOSE_SECONDS = 0.01, 0.1
LOST_SECONDS = 20.0
"""Seconds for which a thread waits in gloo, where no timeout of a test ends it."""


def test_a_model_that_torch_refuses_to_divide_without_a_word(monkeypatch):
    def refuse(*_, **__):
        raise NotImplementedError

    monkeypatch.setattr(division, "init_device_mesh", MagicMock())
    monkeypatch.setattr(division, "fully_shard", refuse)
    with pytest.raises(InputError, match=r"cannot be divided \(NotImplementedError\): take inside='ddp'"):
        division.divide(nn.ModuleList([net()]), torch.device("cpu"), 2)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


class Two:
    """Both processes of an island, with their models."""

    def __init__(self, first: Channel, other: Channel, pool: ThreadPoolExecutor):
        self.pool, self.channels = pool, (first, other)
        self.net, self.other_net = net(), net()
        optimizer, other_optimizer = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (self.net, self.other_net))
        self.vector = GradientVector(*averaged_tensors(self.net, optimizer))
        self.lead = Lead(first)
        self.lead.attach(self.net, self.vector)
        self.crew = Crew(other, self.other_net, other_optimizer, 64, 100)
        self.noted: list[Noted] = []
        """What the first process noted."""
        self.x, self.other_x = torch.randn(SAMPLES, 3), torch.randn(OTHERS_SAMPLES, 3)

    def both(self, one, other):
        """Run the first process's part and the other one's at once. Return what both return."""
        waits = self.pool.submit(other)
        return one(), waits.result(10)

    def begin(self, step: int = 0) -> bool:
        return self.both(lambda: self.lead.begin_micro_batch(step, LINEAGE), self.crew.begin_micro_batch)[1]

    def compute(self) -> tuple[int, float]:
        """Compute a micro-batch in both. Return samples and loss as the first process counts them."""

        def first():
            self.vector.receive(SAMPLES)
            loss = self.net(self.x).square().mean()
            loss.backward()
            self.vector.collect()
            return self.lead.add_up(SAMPLES, loss.detach())

        def other():
            self.crew.begin_backward(OTHERS_SAMPLES)
            loss = self.other_net(self.other_x).square().mean()
            loss.backward()
            self.crew.contribute(OTHERS_SAMPLES, loss)

        return self.both(first, other)[0]

    def gather(self) -> float:
        """Gather what was computed. The crew hears of it when it asks what comes next."""

        def first() -> float:
            loss_sum = self.lead.gather(self.vector, self.noted)
            self.lead.begin_micro_batch(0, LINEAGE)
            return loss_sum

        return self.both(first, self._next)[0]

    def _next(self) -> None:
        assert self.crew.begin_micro_batch()


@pytest.fixture
def two(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(channels, "meet", lambda rank, size, seconds: store)
    monkeypatch.setattr(channels, "PULSE_SECONDS", PULSE_SECONDS)
    monkeypatch.setattr(channels, "CLOSE_SECONDS", CLOSE_SECONDS)
    for name in ("WORK_SECONDS", "SILENT_SECONDS"):
        monkeypatch.setattr(channels, name, LOST_SECONDS)
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(Channel, Launched(rank, 2, rank, 2), torch.device("cpu")) for rank in (0, 1)]
        first, other = (one.result(20) for one in made)
        yield Two(first, other, pool)
        first.close()
        other.close()


def test_a_process_that_does_not_listen_yet_can_still_work_with_the_first_process(two):
    """The first process sends a pulse every few seconds.

    It must not wait for its receipt, or both would wait for ever.
    """
    first, other = two.channels
    assert two.both(lambda: first.exchange(1), lambda: other.exchange(2)) == ([1, 2], [1, 2])
    time.sleep(20 * PULSE_SECONDS)
    weights, others = torch.ones(3), torch.zeros(3)
    two.both(lambda: first.spread([weights]), lambda: other.spread([others]))
    assert torch.equal(others, weights)
    assert two.both(lambda: first.tell(Word.GATHER, 1), other.hear) == (None, (Word.GATHER, [1, 0, 0, 0, 0]))


@pytest.mark.parametrize("word", [Word.WAIT, Word.END])
def test_a_process_that_ends_does_not_wait_for_ever_until_its_last_message_is_heard(two, word):
    """The other processes may hang, and a gloo group ends its work first, however long that takes."""
    first, _ = two.channels
    said = first.say(word)
    two.pool.submit(first.close).result(10)
    assert not said.is_completed()


def test_gradients_losses_and_buffers_are_those_of_all_samples(two):
    assert two.begin()
    assert all(
        torch.equal(one, other)
        for one, other in zip(two.net.state_dict().values(), two.other_net.state_dict().values(), strict=True)
    )
    alone = deepcopy(two.net)
    total, loss = two.compute()
    assert total == SAMPLES + OTHERS_SAMPLES
    loss_sum = total * float(loss) + two.gather()
    outputs = [deepcopy(alone), deepcopy(alone)]
    losses = [one(x).square().mean() for one, x in zip(outputs, (two.x, two.other_x), strict=True)]
    for one, x in zip(losses, (two.x, two.other_x), strict=True):
        (one * len(x)).backward()
    expected = torch.cat(
        [(a.grad + b.grad).flatten() for a, b in zip(*(one.parameters() for one in outputs), strict=True)]
    )
    assert loss_sum == pytest.approx(
        sum(float(one.detach()) * len(x) for one, x in zip(losses, (two.x, two.other_x), strict=True))
    )
    torch.testing.assert_close(two.vector.sum_in_units_of(1), expected)


def test_what_a_round_sends_has_the_mean_of_the_buffers_and_then_each_has_its_own(two):
    two.begin()
    two.compute()
    own, others = two.net[1].running_mean.clone(), two.other_net[1].running_mean.clone()
    sent = []

    def first():
        two.lead.gather(two.vector, [])
        sent.append(two.net[1].running_mean.clone())
        two.lead.begin_micro_batch(0, LINEAGE)

    two.both(first, two.crew.begin_micro_batch)
    torch.testing.assert_close(sent[0], (SAMPLES * own + OTHERS_SAMPLES * others) / (SAMPLES + OTHERS_SAMPLES))
    assert torch.equal(two.net[1].running_mean, own)
    assert torch.equal(two.other_net[1].running_mean, others)


def test_samples_that_the_first_process_drops_are_dropped_by_all(two):
    two.begin()
    two.compute()
    two.vector.drop()
    two.begin()
    two.compute()
    alone = two.vector.sum_in_units_of(1).clone()
    two.gather()
    both = two.vector.sum_in_units_of(1)
    two.vector.drop()
    two.begin()
    two.compute()
    two.gather()
    torch.testing.assert_close(two.vector.sum_in_units_of(1), both)
    assert not torch.allclose(both, alone)


def test_samples_that_were_dropped_since_the_last_micro_batch_are_not_gathered(two):
    """This happens while no other peer has confirmed the weights of this peer, and it gives nothing."""
    two.begin()
    two.compute()
    two.vector.drop()
    assert two.lead.gather(two.vector, []) == 0.0
    assert not two.vector.sum_in_units_of(1).any()
    two.begin()
    two.compute()
    two.gather()
    assert two.vector.sum_in_units_of(1).any()


@pytest.mark.parametrize("whose", ["x", "other_x"])
def test_buffers_that_are_not_finite_are_forgotten_with_the_samples(two, whose):
    """Otherwise no sum of this peer would be finite any more, and alone it would never make an update again."""
    two.begin()
    good = getattr(two, whose).clone()
    getattr(two, whose).fill_(math.nan)
    two.compute()

    def drop():
        two.lead.gather(two.vector, [])
        assert not two.vector.is_finite
        two.vector.drop()
        two.lead.begin_micro_batch(0, LINEAGE)

    two.both(drop, two.crew.begin_micro_batch)
    getattr(two, whose).copy_(good)
    two.compute()
    two.gather()
    assert two.vector.is_finite
    assert all(torch.isfinite(buffer).all() for one in (two.net, two.other_net) for buffer in one.buffers())


def test_weights_travel_when_they_have_changed(two):
    two.begin()
    with torch.no_grad():
        two.net[0].weight.add_(1)
    assert not torch.equal(two.net[0].weight, two.other_net[0].weight)
    two.begin(step=7)
    assert torch.equal(two.net[0].weight, two.other_net[0].weight)
    assert two.crew.step == 7


@pytest.mark.parametrize("kind", [Coordinator, LocalCoordinator])
def test_weights_that_a_fused_optimizer_has_changed_travel_too(two, kind):
    """A fused optimizer does not count its changes, as other optimizers do."""
    two.begin()
    before = two.net[0].weight.detach().clone()
    optimizer = torch.optim.SGD(two.net.parameters(), lr=1.0, fused=True)
    contribution = Contribution(two.vector, MagicMock())
    contribution.lead(two.lead, two.net)
    report = StepReport.of(Ticket(0, 4, False, 1.0, bytes(16)), 1.0, 0.0, None)
    coordinator = MagicMock(_contribution=contribution, last_step=report)
    for param in two.net.parameters():
        param.grad = torch.ones_like(param)
    with kind.updating(coordinator):
        optimizer.step()
    assert not torch.equal(two.net[0].weight, before)
    two.begin(step=0)
    assert torch.equal(two.net[0].weight, two.other_net[0].weight)


def test_a_loss_that_is_not_finite_is_left_out(two):
    two.begin()
    two.other_x.fill_(math.nan)
    two.compute()
    assert two.gather() == 0.0


def test_the_others_end_with_the_first(two):
    two.begin()
    two.compute()
    assert two.both(two.lead.end, two.crew.begin_micro_batch)[1] is False


def test_the_others_notice_when_the_first_leaves_in_the_middle_of_a_micro_batch(two):
    two.begin()
    two.lead.end()
    with pytest.raises(IslandLost):
        two.crew.contribute(OTHERS_SAMPLES, 1.0)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_process_that_is_gone_is_noticed_at_once(two, gone):
    two.begin()
    two.channels[gone].close()
    with pytest.raises(IslandLost, match="--max-restarts"):
        two.channels[1 - gone].add_up(1)


def test_pieces_of_an_average_that_was_kept_in_fp16_are_handed_out_as_the_others_expect_them():
    params, handed_out = list(nn.Linear(3, 2).parameters()), []
    lead = SimpleNamespace(hand_out=lambda views, factor, adds: handed_out.extend(view * factor for view in views))
    vector = ShardedVector(params, [], lead, clip=1.0)
    average = torch.linspace(-1, 1, 8).half()
    vector.take(average)
    vector.hand_over()
    numbers = torch.cat([piece.reshape(-1) for piece in handed_out])
    assert numbers.dtype == torch.float32
    torch.testing.assert_close(numbers, average.float() / (average.float().norm() + 1e-6))


def test_the_processes_of_a_peer_share_its_part_of_the_target_batch():
    recipe = preset("digits")
    assert largest_sensible(recipe, 10**6, num_processes=4) == largest_sensible(recipe, 10**6) // 4


def test_what_an_island_cannot_be_is_refused():
    for averaging in ("overlap-fp16", "local-fp16", "auto"):
        with pytest.raises(InputError, match="wait for each average: give --averaging sync"):
            SwarmStrategy(64, "test", inside="fsdp", averaging=averaging)
    with pytest.raises(InputError, match="There is no inside='ring'"):
        SwarmStrategy(64, "test", inside="ring")
    for inside in ("ddp", "fsdp"):
        with pytest.raises(InputError, match="A helper computes nothing"):
            HelperStrategy(64, "test", inside=inside)
