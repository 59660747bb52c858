"""Processes that share one model list work that other peers recompute, and they recompute that of other peers."""

import os
from dataclasses import replace

import pytest
import torch

from recipe.training.launched import Launched
from swarm.protocol.work import Assignment, Line, WorkList, name_of, places_in_vector
from swarm.training.audit.work_log import Loss
from swarm.training.gradient_buffer import averaged_tensors
from swarm.training.island.channel import Channel
from swarm.training.island.lost import IslandLost
from swarm.training.island.sharded.crew import ShardedCrew
from swarm.training.island.sharded.lead import ShardedLead, ShardedLog
from swarm.training.island.sharded.peer import ShardedVector
from tests.helpers.attacks.work_trainer import LINEAGE, RECIPES, Trainer, X, Y
from tests.helpers.clusters import run_processes

pytestmark = pytest.mark.timeout(60)
SIZE, TURNS = 2, 3


class Process(Trainer):
    """One process of an island without a swarm."""

    def __init__(self, name: str):
        super().__init__(RECIPES[name], X)
        from swarm.training.island.sharded.division import divide

        launched = Launched.from_environment()
        self.channel = Channel(launched, torch.device("cpu"), divides=True)
        self.channel.begin_default_group()
        self.roots = divide(self.task, self.channel.device, SIZE)
        self.optimizer = self.task.configure_optimizers()["optimizer"]
        self.data.deal_out(launched.rank, SIZE)
        self.batches = iter(self.data.train_dataloader())

    def turn(self, begin_backward) -> tuple[int, torch.Tensor]:
        """Compute a micro-batch; returns its number of samples and its loss."""
        batch = self.data.on_before_batch_transfer(next(self.batches), 0)
        samples = len(batch[1])
        self.replay.begin()
        loss = self.loss(batch)
        begin_backward(samples)
        (loss * samples).backward()
        return samples, loss.detach()


class First(Process):
    """The process that talks to the swarm.

    Args:
        loss: computes the loss of other peers' micro-batches; by default the loss of its own
    """

    def __init__(self, name: str, loss: Loss | None = None):
        super().__init__(name)
        self.lead = ShardedLead(self.channel, self.task, self.roots, self.optimizer)
        self.vector = ShardedVector(*averaged_tensors(self.task, self.optimizer), self.lead, None)
        self.lead.attach(self.task, self.vector)
        self.kind = self.lead.kind_of(self.replay)
        self.log = ShardedLog(self.replay, loss or self.loss, self.vector, self.version, self.kind)

    def compute(self, times: int = 1) -> None:
        work = self.throughput.work
        for _ in range(times):
            self.lead.begin_micro_batch(0, LINEAGE)
            samples, loss = self.turn(self.begin_backward)
            self.vector.collect()
            work.noted += self.log.note(samples)
            work.samples += self.lead.add_up(samples, loss)[0]
        self.lead.gather(self.vector, work.noted)

    def begin_backward(self, samples: int) -> None:
        self.vector.receive(samples)
        self.log.begin_backward()

    def holds(self, line: Line) -> bool | None:
        """Whether a micro-batch of peer Y holds."""
        self.log.check(Assignment(Y, line))
        return self.log.own(self.throughput.work, SIZE).verdict.holds


def compute(name: str) -> None:
    """Do all that the first process asks for."""
    one = Process(name)
    crew = ShardedCrew(one.channel, one.task, one.roots, one.optimizer, 64, 100)
    crew.check_work(one.replay, one.loss)
    while crew.begin_micro_batch():
        crew.contribute(*one.turn(crew.begin_backward))


def work(name: str, lines: list[Line]):
    """Run one process of two.

    Returns from the first process: its kind of device, its encoded list and the list's samples, its findings on these
    lines of Y, whether its sums are unchanged by the checks, and the numbers that it gives at the places of its list.
    """
    if os.environ["RANK"] != "0":
        return compute(name)
    one = First(name)
    one.compute(TURNS)
    samples = one.throughput.work.samples
    listed = one.log.own(one.throughput.work, SIZE).listed
    before = [piece.to_local().clone() for piece in one.lead.pieces.sums]
    found = [one.holds(line) for line in lines]
    is_as_before = all(map(torch.equal, before, (piece.to_local() for piece in one.lead.pieces.sums)))
    one.vector.to_wire(samples)
    given = one.vector.wire[places_in_vector(one.vector.sizes, LINEAGE)].tolist()
    one.lead.end()
    return one.kind, listed, samples, found, is_as_before, given


def is_lost(name: str, line: Line) -> bool:
    """Run one process of two, of which the first fails while it recomputes a micro-batch of Y.

    Returns whether this process learns that its island cannot go on.
    """
    try:
        if os.environ["RANK"] == "0":
            fail_at(name, line)
        else:
            compute(name)
    except IslandLost:
        return True
    return False


def fail_at(name: str, line: Line) -> None:
    """Run the first process, which runs out of memory when the others have computed as far as it has."""

    def fail(batch):
        one.loss(batch)
        raise RuntimeError("out of memory")

    one = First(name, fail)
    one.compute()
    assert one.holds(line) is None
    one.compute()


@pytest.mark.parametrize("name", RECIPES)
def test_work_on_pieces_is_computed_again_by_others_and_they_look_at_that_of_others(name):
    other, checker = Trainer(RECIPES[name], Y), Trainer(RECIPES[name], Y)
    other.compute(2)
    line = other.listed().lines[1]
    large = Trainer(RECIPES[name], Y, micro_batch=32)
    large.compute()
    lines = [line, replace(line, first_position=40), *large.listed().lines]
    (kind, listed, samples, found, is_as_before, given), _ = run_processes(SIZE, work, name, lines)
    assert kind == checker.replay.kind
    own = WorkList.from_bytes(listed, name_of(listed), samples)
    assert [one.first_position for one in own.lines] == list(range(0, 48, 8)), "the processes take turns"
    for one in own.lines:
        assert checker.finds(X, one)
        assert checker.finds(Y, one) is False
    assert found == [True, False, True if checker.replay.has_slices else None]
    assert is_as_before
    said = torch.tensor([one.numbers for one in own.lines]).sum(0) / samples
    torch.testing.assert_close(torch.tensor(given), said, rtol=1e-4, atol=1e-6)


def test_a_process_that_fails_in_a_shared_computation_ends_its_island():
    """They wait for the rest of it."""
    other = Trainer(RECIPES["drop path"], Y)
    other.compute()
    assert run_processes(SIZE, is_lost, "drop path", other.listed().lines[0]) == [True, True]
