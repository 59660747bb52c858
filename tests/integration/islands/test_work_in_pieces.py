"""What processes that share one model note of their micro-batches, others compute again, and they that of others."""

from dataclasses import replace

import pytest
import torch

from recipe.training.launched import Launched
from swarm.protocol.work import Assignment, Line, WorkList, name_of, places_in_vector
from swarm.training.gradient_buffer import averaged_tensors
from swarm.training.island.channel import Channel
from swarm.training.island.sharded.crew import ShardedCrew
from swarm.training.island.sharded.lead import ShardedLead
from swarm.training.island.sharded.peer import ShardedLog, ShardedVector
from tests.helpers.attacks.work_trainer import LINEAGE, RECIPES, Trainer, X, Y
from tests.helpers.clusters import run_processes

pytestmark = pytest.mark.timeout(60)
SIZE, TURNS = 2, 3


class Process(Trainer):
    """One of an island that has no swarm."""

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
        """A micro-batch."""
        batch = self.data.on_before_batch_transfer(next(self.batches), 0)
        samples = len(batch[1])
        self.replay.begin()
        loss = self.loss(batch)
        begin_backward(samples)
        (loss * samples).backward()
        return samples, loss.detach()


def work(name: str, lines: list[Line]):
    """One process of two.

    Returns what the first one has: its kind of device, its list as it travels and that list's samples, what it finds in
    these lines of Y, whether its sums are what they were before it looked, and what it gives at the places of its list.
    """
    one = Process(name)
    if not one.channel.is_first:
        return compute(one)
    lead = ShardedLead(one.channel, one.task, one.roots, one.optimizer)
    vector = ShardedVector(*averaged_tensors(one.task, one.optimizer), lead, None)
    lead.attach(one.task, vector)
    kind = lead.kind_of(one.replay)
    log, work = ShardedLog(one.replay, one.loss, vector, one.version, kind), one.throughput.work

    def begin_backward(samples: int) -> None:
        vector.receive(samples)
        log.begin_backward()

    for _ in range(TURNS):
        lead.begin_micro_batch(0, LINEAGE)
        samples, loss = one.turn(begin_backward)
        vector.collect()
        work.noted += log.note(samples)
        work.samples += lead.add_up(samples, loss)[0]
    lead.gather(vector, work.noted)
    listed, found = log.own(work, SIZE).listed, []
    pieces = [piece.to_local().clone() for piece in lead.pieces.sums]
    for line in lines:
        log.check(Assignment(Y, line))
        found.append(log.own(work, SIZE).verdict.holds)
    is_as_before = all(torch.equal(own.to_local(), piece) for own, piece in zip(lead.pieces.sums, pieces, strict=True))
    vector.to_wire(work.samples)
    given = vector.wire[places_in_vector(vector.sizes, LINEAGE)].clone()
    lead.end()
    return kind, listed, work.samples, found, is_as_before, given.tolist()


def compute(one: Process) -> None:
    """All that the first process asks for."""
    crew = ShardedCrew(one.channel, one.task, one.roots, one.optimizer, 64, 100)
    crew.check_work(one.replay, one.loss)
    while crew.begin_micro_batch():
        crew.contribute(*one.turn(crew.begin_backward))


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
