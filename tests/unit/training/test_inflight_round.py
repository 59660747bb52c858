"""A round in the background ends, also when the process that runs it does not."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from hivemind.p2p import PeerID

from recipe.errors import InputError
from swarm.averaging.averager import SwarmAverager
from swarm.averaging.commands import RunRound
from swarm.averaging.compression.codec import Codec
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.messages import Member, RoundFailed, Ticket
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.runtime.async_utils import wait_a_little
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS
from swarm.training.options import CoordinatorOptions
from swarm.training.rounds import inflight_round as pending
from swarm.training.rounds.inflight_round import InflightRound
from swarm.training.throughput import Work
from tests.helpers.hurry import shorter


class StoppedAverager:
    """An averager that takes a round and never says anything about it."""

    timeouts = DEFAULT_TIMEOUTS

    def __init__(self, is_killed: bool = False):
        self.is_killed = is_killed
        self.cancelled = 0

    def longest_round_seconds(self, timeout_seconds: float, members) -> float:
        return timeout_seconds

    def run_round(self, order: RunRound) -> Future:
        return Future()

    def is_alive(self) -> bool:
        return not self.is_killed

    def cancel_round(self) -> None:
        self.cancelled += 1

    def kill(self) -> None:
        self.is_killed = True

    def check_alive(self) -> None:
        if self.is_killed:
            raise InputError("The averaging process has died")


@pytest.mark.parametrize(
    ("callable_ones", "others", "seconds"),
    [(2, 0, 80.0), (10, 0, 80.0), (2, 2, 80.0), (1, 9, 360.0), (2, 8, 200.0), (2, 98, 640.0)],
)
def test_a_round_may_take_as_long_as_a_slow_line_needs(callable_ones, others, seconds):
    """10 million bytes of a gradient at 250 kB/s: the peers that can be called carry what the others cannot."""
    averager = SimpleNamespace(vector=torch.zeros(2_500_000), _codec=Codec().make())
    members = [Member(PeerID(bytes([n])), 0.0, n >= callable_ones) for n in range(callable_ones + others)]
    assert SwarmAverager.longest_round_seconds(averager, 60.0, members) == pytest.approx(seconds)
    assert SwarmAverager.longest_round_seconds(averager, 700.0, members) == 700.0


def round_of(averager: StoppedAverager) -> InflightRound:
    options = CoordinatorOptions(averaging_timeout_seconds=0.1)
    order = RunRound(Ticket(0, 32, False, 1.0, bytes(LINEAGE_BYTES)), [], BatchTarget(32))
    return InflightRound(averager, order, options, Work())


def test_an_averaging_process_that_is_stopped_is_ended():
    averager = StoppedAverager()
    averager.timeouts = shorter(300)
    with pytest.raises(InputError, match="has died"):
        round_of(averager).wait(members=list, should_stop=lambda: False)


@pytest.mark.parametrize(("is_killed", "looks"), [(True, 1), (False, 12)])
def test_a_peer_that_leaves_waits_for_no_round_that_will_not_end(is_killed, looks, monkeypatch):
    """A leaving peer waits two seconds if the averaging process lives.

    A stopped process does not answer the cancellation.
    """
    seen = []
    monkeypatch.setattr(pending, "wait_a_little", lambda future: seen.append(future) or wait_a_little(future))
    averager = StoppedAverager(is_killed)
    averager.check_alive = lambda: None  # it has just died
    with pytest.raises(RoundFailed, match="leaving"):
        round_of(averager).wait(members=list, should_stop=lambda: True)
    assert averager.cancelled == 1
    assert len(seen) <= looks
