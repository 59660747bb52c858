"""What a peer computes for a step: it is added up, given to a round, and taken back if the round ends in vain."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from swarm.averaging.compression.codec import Codec
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.training.contribution import Contribution
from swarm.training.gradient_buffer import GradientVector
from swarm.training.throughput import MAX_DROPPED

SAMPLES = 4


class One:
    """A peer with two weights; each micro-batch of `SAMPLES` has the same gradient in both."""

    def __init__(self):
        self.param = nn.Parameter(torch.zeros(2))
        self.vector = GradientVector([self.param], [])
        self.contribution = Contribution(self.vector, SimpleNamespace(step=0, lineage=bytes(LINEAGE_BYTES)))

    def compute(self, gradient: float, loss: float = 1.0) -> None:
        self.contribution.begin_micro_batch()
        self.contribution.begin_backward(SAMPLES)
        (self.param.sum() * gradient).backward()
        assert self.contribution.add(SAMPLES, torch.tensor(loss)) == SAMPLES


@pytest.fixture
def one():
    return One()


def test_a_round_gets_the_mean_of_all_that_was_computed(one):
    one.compute(1.0, loss=2.0)
    one.compute(3.0, loss=4.0)
    assert (one.contribution.samples, one.contribution.loss) == (2 * SAMPLES, 3.0)
    work = one.contribution.give()
    assert one.vector.wire.tolist() == [2.0, 2.0]
    assert (work.samples, work.loss) == (2 * SAMPLES, 3.0)
    assert one.contribution.samples == 0


def test_work_that_a_round_gave_back_counts_beside_later_work(one):
    one.compute(1.0)
    work = one.contribution.give()
    one.compute(4.0)
    one.contribution.take_back(work)
    assert one.contribution.samples == 2 * SAMPLES
    one.contribution.give()
    assert one.vector.wire.tolist() == [2.5, 2.5]


def test_withheld_work_is_in_no_round(one):
    one.compute(1.0)
    one.contribution.withhold()
    one.compute(5.0)
    assert one.contribution.give().samples == SAMPLES
    assert one.vector.wire.tolist() == [5.0, 5.0]


def test_work_that_is_not_finite_is_dropped_and_the_weights_may_be_why_after_several_in_a_row(one):
    for number in range(1, MAX_DROPPED + 1):
        one.compute(float("nan"))
        assert not one.contribution.is_finite
        assert one.contribution.drop() == (number == MAX_DROPPED)
        assert one.contribution.is_finite
        assert one.contribution.samples == 0


def test_an_update_alone_takes_the_mean_and_leaves_nothing(one):
    one.compute(1.0)
    one.compute(3.0)
    assert one.contribution.give_alone() > 0
    one.vector.hand_over()
    assert one.param.grad.tolist() == [2.0, 2.0]
    assert one.contribution.samples == 0


def test_a_running_statistic_that_the_codec_cuts_off_is_warned_of_once(caplog):
    """All peers would have a wrong statistic, in validations and checkpoints too."""
    variance = torch.tensor([1e3])
    vector = GradientVector([nn.Parameter(torch.zeros(2))], [variance])
    version = SimpleNamespace(step=0, lineage=bytes(LINEAGE_BYTES))
    exact, half = (Contribution(vector, version, Codec(name).largest_number) for name in ("none", "fp16"))
    half.give()
    variance.fill_(-1e5)
    exact.give()
    assert not caplog.records
    for _ in range(2):
        half.give()
    (record,) = caplog.records
    assert "beyond ±65,504" in record.message
    assert "where fp16 cuts numbers off" in record.message, "auto may average with another codec by now"
    assert "--averaging sync, overlap or local and the codec none" in record.message, "auto takes no codec"
