"""What a peer says that it has computed, another one computes again from (seed, identity, position)."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hivemind.p2p import PeerID

from recipe.config import Recipe
from recipe.presets import preset
from recipe.registry import build_data, build_task
from recipe.training.replay import Replay
from swarm.protocol.messages import Group, Ticket
from swarm.protocol.work import NUM_PLACES, Assignment, MicroBatch, WorkList, name_of
from swarm.training.audit.lot import chance_of_an_audit
from swarm.training.audit.work_log import TOLERANCE, CheckedLog, distance, places, signed
from swarm.training.gradient_buffer import GradientVector, averaged_tensors
from swarm.training.throughput import Throughput

VIT = replace(preset("digits"), drop_path=0.3, embed_dim=32, depth=3, num_heads=2, augmentation="light")
BATCH_NORM = replace(
    preset("digits"),
    **{"model": "resnet10t", "image_size": 16, "patch_size": None, "embed_dim": None, "depth": None},
    **{"num_heads": None, "initialisation": "timm"},
)
TEXTS = replace(preset("docstrings"), embed_dim=32, depth=2, num_heads=2)
RECIPES = {"drop path": VIT, "batch norm": BATCH_NORM, "dropout, texts": TEXTS}
X, Y = (PeerID(bytes([18, 32, *[number] * 32])) for number in (1, 2))
LINEAGE = bytes(range(16))


class Trainer:
    """A peer's, without a swarm.

    Args:
        at: position at which it begins
    """

    def __init__(self, recipe: Recipe, peer: PeerID, at: int = 0, micro_batch: int = 8):
        self.data = build_data(recipe, batch_size=micro_batch, identity=peer.to_base58())
        self.data.load_state_dict({"position": at})
        self.data.trainer = SimpleNamespace(training=True, global_rank=0, world_size=1)
        self.task = build_task(recipe).train()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():  # as if it had been trained: a head of zeros hides all other layers
            for param in self.task.parameters():
                param.add_(torch.randn(param.shape, generator=generator), alpha=0.05)
        self.optimizer = self.task.configure_optimizers()["optimizer"]
        self.vector = GradientVector(*averaged_tensors(self.task, self.optimizer))
        self.replay = Replay(self.task, self.data)
        self.log = CheckedLog(self.replay, self.loss, self.vector, SimpleNamespace(lineage=LINEAGE))
        self.batches = iter(self.data.train_dataloader())
        self.throughput = Throughput()

    def loss(self, batch) -> torch.Tensor:
        return self.task.training_step(batch, 0)

    def compute(self, times: int = 1) -> None:
        """So many micro-batches."""
        for _ in range(times):
            batch = self.data.on_before_batch_transfer(next(self.batches), 0)
            samples = len(batch[1])
            self.replay.begin()
            loss = self.loss(batch)
            self.vector.receive(samples)
            self.log.begin_backward()
            loss.backward()
            self.vector.collect()
            self.throughput.work.noted += self.log.note(samples)
            self.throughput.note(samples, loss)

    def listed(self) -> WorkList:
        """As others read it."""
        own = self.log.own(self.throughput.work)
        return WorkList.from_bytes(own.listed, name_of(own.listed), self.throughput.work.samples)

    def finds(self, peer: PeerID, micro_batch: MicroBatch) -> bool | None:
        """Whether another peer's work holds."""
        self.log.check(Assignment(peer, micro_batch))
        return self.log.own(self.throughput.work).verdict.holds


@pytest.mark.parametrize("name", RECIPES)
def test_another_peer_computes_the_same_numbers_again(name):
    worker, checker = Trainer(RECIPES[name], X, at=24), Trainer(RECIPES[name], Y, micro_batch=6)
    worker.compute(3)
    checker.compute(2)  # it is somewhere else, in its own order
    listed = worker.listed()
    assert [one.first_position for one in listed.micro_batches] == [24, 32, 40]
    for micro_batch in listed.micro_batches:
        assert checker.finds(X, micro_batch)
        assert checker.finds(Y, micro_batch) is False, "the numbers are those of one peer alone"
        other = replace(micro_batch, first_position=micro_batch.first_position + 8)
        assert checker.finds(X, other) is False, "and of its samples"


@pytest.mark.parametrize("name", RECIPES)
def test_to_check_others_changes_nothing(name):
    """Gradients, running statistics, metrics and what comes next are those of a peer that has checked nobody."""
    recipe = RECIPES[name]
    worker, checker, other = Trainer(recipe, X), Trainer(recipe, Y), Trainer(recipe, Y)
    worker.compute()
    (micro_batch,) = worker.listed().micro_batches
    for one in (checker, other):
        one.compute()
        if one is checker:
            assert one.finds(X, micro_batch)
            assert all(param.grad is None for param in one.task.parameters())
        one.compute()
    assert torch.equal(checker.vector.sum_in_units_of(8), other.vector.sum_in_units_of(8))
    for buffer, same in zip(checker.task.buffers(), other.task.buffers(), strict=True):
        assert torch.equal(buffer, same)
    for metric, same in zip(checker.task.train_metrics.values(), other.task.train_metrics.values(), strict=True):
        assert torch.equal(metric.compute(), same.compute())


@pytest.mark.parametrize("name", RECIPES)
def test_with_another_number_of_threads_it_is_the_same(name):
    threads = torch.get_num_threads()
    worker, checker = Trainer(RECIPES[name], X), Trainer(RECIPES[name], Y)
    worker.compute()
    (micro_batch,) = worker.listed().micro_batches
    torch.set_num_threads(4)
    try:
        assert checker.finds(X, micro_batch)
    finally:
        torch.set_num_threads(threads)


def test_who_computes_with_bfloat16_gives_nearly_the_same():
    """Where a recipe says bf16-mixed, devices that have it not compute with float32."""
    recipe = replace(VIT, precision="bf16-mixed")
    worker, checker = Trainer(recipe, X), Trainer(recipe, Y)
    with torch.autocast("cpu", torch.bfloat16):
        worker.compute()
    (micro_batch,) = worker.listed().micro_batches
    assert checker.finds(X, micro_batch)
    assert checker.finds(X, replace(micro_batch, first_position=8)) is False


def test_a_micro_batch_may_change_its_size_in_mid_step():
    worker, checker = Trainer(VIT, X), Trainer(VIT, Y)
    worker.compute()
    worker.data.resize_micro_batch(5)
    worker.compute(2)
    listed = worker.listed()
    assert [(one.first_position, one.samples) for one in listed.micro_batches][-1] == (13, 5)
    assert all(checker.finds(X, one) for one in listed.micro_batches)


def test_half_of_a_micro_batch_is_not_the_whole():
    worker, checker = Trainer(VIT, X), Trainer(VIT, Y)
    honest = worker.loss
    worker.loss = lambda batch: honest([part[: len(part) // 2] for part in batch])
    worker.compute()
    assert checker.finds(X, worker.listed().micro_batches[0]) is False


def test_what_a_round_took_along_in_vain_is_in_the_next_list():
    worker = Trainer(VIT, X)
    worker.compute(2)
    work = worker.throughput.take()
    worker.compute()
    worker.throughput.give_back(work)
    assert [one.first_position for one in worker.listed().micro_batches] == [0, 8, 16]


def test_samples_that_are_of_no_use_are_not_in_the_list():
    worker = Trainer(VIT, X)
    worker.compute(2)
    worker.throughput.withhold()
    worker.compute()
    assert [one.first_position for one in worker.listed().micro_batches] == [16]
    worker.throughput.drop()
    worker.compute()
    assert [one.first_position for one in worker.listed().micro_batches] == [24]


def test_what_no_honest_peer_can_have_computed_does_not_hold():
    checker = Trainer(BATCH_NORM, Y)
    numbers = (0.0,) * NUM_PLACES
    assert checker.finds(X, MicroBatch(2**53, 3, numbers)) is False
    assert checker.finds(X, MicroBatch(0, 1, numbers)) is False, "BatchNorm refuses a single sample"


def test_who_is_short_of_memory_cannot_tell():
    """Only some of torch's allocators say by the kind of the error what is wrong."""
    checker = Trainer(BATCH_NORM, Y)

    def fail(batch) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    checker.log = CheckedLog(checker.replay, fail, checker.vector, SimpleNamespace(lineage=LINEAGE))
    assert checker.finds(X, MicroBatch(0, 3, (0.0,) * NUM_PLACES)) is None


def test_places_are_in_many_tensors_and_others_in_each_step():
    params = averaged_tensors(task := build_task(VIT), task.configure_optimizers()["optimizer"])[0]
    chosen = places(params, LINEAGE)
    assert chosen == places(params, LINEAGE)
    assert len({tensor for tensor, _ in chosen}) == min(NUM_PLACES, len(params))
    assert all(0 <= place < params[tensor].numel() for tensor, place in chosen)
    assert chosen != places(params, bytes(16))


def test_a_peer_that_gives_nothing_has_no_list():
    worker = Trainer(VIT, X)
    own = worker.log.own(worker.throughput.work)
    assert (own.listed, own.chance) == (b"", 0.0)
    ticket = Ticket(0, 0, False, 0.0, LINEAGE)
    assert signed(ticket, own) == signed(ticket, None) == ticket


def test_who_says_nothing_is_named_once():
    says = Ticket(0, 8, False, 1.0, LINEAGE, work=bytes(16))
    tickets = (says, replace(says, work=b""))
    log = Trainer(VIT, Y).log
    assert log.silent(Group.close(bytes(16), (X, Y), (says, replace(says, samples=0, work=b"")))) == []
    assert log.silent(Group.close(bytes(16), (Y, X), tickets)) == [X]
    assert log.silent(Group.close(bytes(16), (Y, X), tickets)) == []


def test_only_data_that_all_have_can_be_computed_again(tmp_path):
    recipe = replace(preset("imagefolder-vit-small"), num_classes=2)
    data = build_data(recipe, tmp_path)
    assert not Replay(build_task(VIT), data).is_shared
    assert Trainer(VIT, X).replay.is_shared


def test_distances():
    one = torch.tensor([3.0, 4.0])
    assert distance(one, one) == distance(torch.zeros(2), torch.zeros(2)) == 0
    assert distance(one, torch.zeros(2)) == distance(torch.zeros(2), one) == 1
    assert distance(one, -one) == 2
    assert distance(one, 1.5 * one) > 10 * TOLERANCE


@pytest.mark.parametrize("num_micro_batches", [4, 5, 8, 20])
def test_who_computes_half_is_found_within_a_hundred_updates(num_micro_batches):
    unseen = 1 - chance_of_an_audit(num_micro_batches) / 2
    assert 1 - unseen**100 > 0.95, "a first difference"
    assert chance_of_an_audit(num_micro_batches) <= 0.02 * num_micro_batches


def test_checks_cost_what_they_may():
    assert chance_of_an_audit(1) == 0.02
    assert chance_of_an_audit(20) == pytest.approx(0.2)
    assert chance_of_an_audit(1000) == 1
