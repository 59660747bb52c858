"""What a peer has computed: samples, their loss, and how long that took."""

import math

import pytest
import torch

from swarm.training.throughput import Throughput


def test_the_loss_is_the_mean_over_samples_whatever_form_it_comes_in():
    throughput = Throughput()
    throughput.note(3, 1.0)
    throughput.note(1, torch.tensor(5.0, requires_grad=True))
    assert throughput.work.samples == 4
    assert throughput.work.loss == pytest.approx(2.0)


def test_a_loss_that_is_not_finite_counts_as_nothing():
    throughput = Throughput()
    for loss in (2.0, math.nan, torch.tensor(math.inf)):
        throughput.note(1, loss)
    assert throughput.work.loss == pytest.approx(2.0 / 3)


def test_all_time_but_pauses_is_computing(monkeypatch):
    now = 0.0
    monkeypatch.setattr("swarm.training.throughput.time.perf_counter", lambda: now)
    throughput = Throughput()
    now = 2.0
    throughput.note(8, 1.0)
    now = 3.0
    throughput.finish()  # a GPU has still computed
    now = 10.0
    throughput.resume()
    now = 11.0
    throughput.note(8, 1.0)
    assert throughput.work.seconds == pytest.approx(4.0)


def test_work_done_in_vain_counts_again():
    throughput = Throughput()
    throughput.note(4, 1.0)
    work = throughput.take()
    assert throughput.work.samples == 0
    throughput.note(4, 3.0)
    throughput.give_back(work)
    assert throughput.work.samples == 8
    assert throughput.work.loss == pytest.approx(2.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_is_one_micro_batch_behind_and_no_more():
    """Each product takes some milliseconds, the call that begins it some microseconds."""
    matrix, throughput = torch.randn(8192, 8192, device="cuda"), Throughput()
    began = torch.cuda.Event(enable_timing=True)
    began.record()
    ends = []
    for _ in range(4):
        loss = (matrix @ matrix).mean()
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()
        throughput.note(1, loss)
        assert all(end.query() for end in ends[:-1])
    assert not ends[-1].query()
    throughput.finish()
    assert ends[-1].query()


def test_the_loss_counts_once_when_a_round_with_local_steps_fails():
    throughput = Throughput()
    throughput.note(10, 1.0)
    throughput.keep()
    in_vain = throughput.take()
    throughput.note(10, 1.0)
    throughput.keep()
    throughput.give_back(in_vain)
    assert (throughput.work.samples, throughput.work.loss) == (20, pytest.approx(1.0))


def test_samples_that_are_withheld_leave_no_loss_behind():
    throughput = Throughput()
    throughput.note(10, 1.0)
    throughput.keep()
    throughput.withhold()
    throughput.note(10, 3.0)
    throughput.discount(10)
    assert throughput.work.loss == 0
