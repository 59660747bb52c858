"""Work that a peer lists can be computed again by another peer, from (seed, identity, position)."""

import contextlib
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from recipe.presets import preset
from recipe.registry import build_data, build_task
from recipe.training import pacing
from recipe.training.replay import Replay
from swarm.protocol.messages import Ticket
from swarm.protocol.work import MAX_LINES, NUM_PLACES, Line, places, places_in_vector
from swarm.training.audit.lot import chance_of_an_audit
from swarm.training.audit.work_log import WORK_TOLERANCE, CheckedLog, distance, listed_in, with_work_name
from swarm.training.gradient_buffer import averaged_tensors
from tests.helpers.attacks.work_trainer import BATCH_NORM, LINEAGE, RECIPES, TEXTS, VIT, Trainer, X, Y

LATER = bytes(range(1, 17))


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_another_peer_computes_the_same_numbers_again(name):
    worker, checker = Trainer(RECIPES[name], X, at=24), Trainer(RECIPES[name], Y, micro_batch=6)
    worker.compute(3)
    checker.compute(2)  # the checker is somewhere else, in its own order
    listed = worker.listed()
    assert [one.first_position for one in listed.lines] == [24, 32, 40]
    for micro_batch in listed.lines:
        assert checker.finds(X, micro_batch)
        assert checker.finds(Y, micro_batch) is False, "the numbers are those of one peer alone"
        other = replace(micro_batch, first_position=micro_batch.first_position + 8)
        assert checker.finds(X, other) is False, "and of its samples"


@pytest.mark.parametrize("name", RECIPES)
def test_checks_of_others_change_nothing(name):
    """Gradients, running statistics, metrics and what comes next are those of a peer that has checked no other peer."""
    recipe = RECIPES[name]
    worker, checker, other = Trainer(recipe, X), Trainer(recipe, Y), Trainer(recipe, Y)
    worker.compute()
    (micro_batch,) = worker.listed().lines
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
def test_results_are_the_same_with_another_number_of_threads(name):
    threads = torch.get_num_threads()
    worker, checker = Trainer(RECIPES[name], X), Trainer(RECIPES[name], Y)
    worker.compute()
    (micro_batch,) = worker.listed().lines
    torch.set_num_threads(4)
    try:
        assert checker.finds(X, micro_batch)
    finally:
        torch.set_num_threads(threads)


def test_a_peer_that_computes_with_bfloat16_gives_nearly_the_same():
    """Where a recipe says bf16-mixed, devices without it compute with float32."""
    recipe = replace(VIT, precision="bf16-mixed")
    worker, checker = Trainer(recipe, X), Trainer(recipe, Y)
    with torch.autocast("cpu", torch.bfloat16):
        worker.compute()
    (micro_batch,) = worker.listed().lines
    assert checker.finds(X, micro_batch)
    assert checker.finds(X, replace(micro_batch, first_position=8)) is False


def test_a_peer_with_a_compiled_model_computes_again_without_compiling():
    """Other peers wait meanwhile, and a micro-batch of another size would have to be compiled first."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    worker, checker = Trainer(VIT, X), Trainer(VIT, Y, micro_batch=6)
    checker.task.model.compile(backend=backend)
    checker.task.is_compiled = True
    worker.compute()
    checker.compute()
    before = len(compiled)
    assert before
    (micro_batch,) = worker.listed().lines
    assert checker.finds(X, micro_batch)
    assert len(compiled) == before


def test_a_micro_batch_may_change_its_size_in_mid_step():
    worker, checker = Trainer(VIT, X), Trainer(VIT, Y)
    worker.compute()
    worker.data.resize_micro_batch(5)
    worker.compute(2)
    listed = worker.listed()
    assert [(one.first_position, one.samples) for one in listed.lines][-1] == (13, 5)
    assert all(checker.finds(X, one) for one in listed.lines)


def test_half_of_a_micro_batch_is_not_the_whole():
    worker, checker = Trainer(VIT, X), Trainer(VIT, Y)
    honest = worker.loss
    worker.loss = lambda batch: honest([part[: len(part) // 2] for part in batch])
    worker.compute()
    assert checker.finds(X, worker.listed().lines[0]) is False


@pytest.mark.parametrize("micro_batch", [5, 8, 23])
def test_a_larger_micro_batch_is_computed_again_in_slices(micro_batch):
    """Stochastic depth leaves out, and augmentation changes, the same as in the whole micro-batch."""
    worker, checker = Trainer(VIT, X, micro_batch=24), Trainer(VIT, Y, micro_batch=micro_batch)
    worker.compute(2)
    for line in worker.listed().lines:
        assert line.samples == 24
        assert checker.finds(X, line)
        assert checker.finds(X, replace(line, first_position=line.first_position + 1)) is False
    same = Trainer(VIT, X, micro_batch=24)
    worker.compute()
    same.compute(3)
    assert worker.listed() == same.listed(), "to compute in slices leaves no trace"


def test_a_micro_batch_is_not_sliced_where_a_slice_depends_on_the_rest(monkeypatch):
    assert Trainer(VIT, X).replay.has_slices
    assert not Trainer(BATCH_NORM, X).replay.has_slices
    assert not Trainer(TEXTS, X).replay.has_slices
    monkeypatch.setenv(pacing.VARIABLE, "100")
    assert not Trainer(VIT, X).replay.has_slices, "a paced device computes the first samples only"
    monkeypatch.setenv(pacing.ALL_SAMPLES, "1")
    assert Trainer(VIT, X).replay.has_slices


def test_several_micro_batches_in_one_line_are_computed_again():
    worker, checker = Trainer(VIT, X), Trainer(VIT, Y)
    worker.compute(3)
    one, two, three = worker.listed().lines
    both = one.with_next(two)
    assert (both.samples, both.micro_batches) == (16, 2)
    assert checker.finds(X, both)
    assert checker.finds(X, both.with_next(three) or two)
    assert checker.finds(X, replace(both, micro_batches=1)) is False, "each draws anew what it leaves out"


def test_a_list_of_very_many_micro_batches_keeps_the_work_before_an_update_apart():
    one = Line(0, 1, (1.0,) * NUM_PLACES)
    lines = [replace(one, first_position=number) for number in range(MAX_LINES + 1)]
    listed = listed_in(lines, 3, "")
    assert [line.micro_batches for line in listed.lines[:4]] == [1, 1, 1, 2]
    assert (listed.num_before, listed.samples) == (3, MAX_LINES + 1)
    assert len(listed.lines) <= MAX_LINES
    assert listed_in(lines[:-1], 3, "").lines == lines[:-1]


def test_work_before_the_latest_update_is_computed_again_on_the_weights_of_that_time():
    """With overlap, members compute on while an average is on its way."""
    worker, checker, newcomer = Trainer(VIT, X), Trainer(VIT, Y), Trainer(VIT, Y)
    worker.compute(2)
    for one in (worker, checker, newcomer):
        one.update(LATER)
    newcomer.earlier.forget()
    worker.compute()
    listed = worker.listed()
    assert listed.num_before == 2
    held = [param.detach().clone() for param in checker.vector.params]
    for number, line in enumerate(listed.lines):
        is_before = number < 2
        assert checker.finds(X, line, is_before)
        assert checker.finds(X, line, not is_before) is False
        assert newcomer.finds(X, line, is_before) is (None if is_before else True), "it has not made that update"
    for param, before in zip(checker.vector.params, held, strict=True):
        assert torch.equal(param, before)
    assert checker.finds(X, listed.lines[0], True), "and again"


def test_a_peer_that_runs_out_of_memory_during_a_check_keeps_its_own_weights(monkeypatch):
    checker, calls, clone = Trainer(VIT, Y), count(), torch.Tensor.clone
    checker.update(LATER)
    held = [param.detach().clone() for param in checker.vector.params]

    def clone_once(tensor: torch.Tensor) -> torch.Tensor:
        if next(calls):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return clone(tensor)

    monkeypatch.setattr(torch.Tensor, "clone", clone_once)
    with contextlib.suppress(RuntimeError), checker.earlier.in_place():
        pass
    for param, before in zip(checker.vector.params, held, strict=True):
        assert torch.equal(param, before)


def test_a_peer_that_has_computed_on_weights_that_no_peer_keeps_names_no_list():
    """It would be found to lie; a list that is missing once is no reason."""
    worker = Trainer(VIT, X)
    worker.compute()
    for number in (1, 2):
        worker.update(bytes(16 * [number]))
    worker.compute()
    assert worker.log.own(worker.throughput.work, 1).listed == b""


def test_a_peer_of_several_processes_checks_others_as_often_as_its_first_process():
    worker = Trainer(VIT, X)
    worker.compute(4)
    assert worker.log.own(worker.throughput.work, 2).chance == chance_of_an_audit(2)


def test_work_that_a_round_took_along_in_vain_is_in_the_next_list():
    worker = Trainer(VIT, X)
    worker.compute(2)
    work = worker.throughput.take()
    worker.compute()
    worker.throughput.give_back(work)
    assert [one.first_position for one in worker.listed().lines] == [0, 8, 16]


def test_samples_that_are_of_no_use_are_not_in_the_list():
    worker = Trainer(VIT, X)
    worker.compute(2)
    worker.throughput.withhold()
    worker.compute()
    assert [one.first_position for one in worker.listed().lines] == [16]
    worker.throughput.drop_all()
    worker.compute()
    assert [one.first_position for one in worker.listed().lines] == [24]


def test_a_peer_that_has_discarded_most_of_its_samples_names_no_list():
    """No member would accept it: a peer that lists samples that are far apart may have chosen them."""
    worker = Trainer(VIT, X)
    worker.compute()
    work = worker.throughput.take()
    worker.compute(4)
    worker.throughput.drop_all()
    worker.throughput.give_back(work)
    worker.compute()
    assert worker.throughput.work.samples == 16
    assert worker.log.own(worker.throughput.work, 1).listed == b""


def test_a_line_that_no_honest_peer_can_have_computed_does_not_hold():
    checker = Trainer(BATCH_NORM, Y)
    numbers = (0.0,) * NUM_PLACES
    assert checker.finds(X, Line(2**53, 3, numbers)) is False
    assert checker.finds(X, Line(0, 1, numbers)) is False, "BatchNorm refuses a single sample"


def test_a_checker_that_is_short_of_memory_cannot_tell():
    """Only some of torch's allocators show by the type of the error what is wrong."""
    checker = Trainer(BATCH_NORM, Y)

    def fail(batch) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    checker.log = CheckedLog(checker.replay, fail, checker.vector, SimpleNamespace(lineage=LINEAGE))
    assert checker.finds(X, Line(0, 3, (0.0,) * NUM_PLACES)) is None


def test_places_are_in_many_tensors_and_others_in_each_step():
    params = averaged_tensors(task := build_task(VIT), task.configure_optimizers()["optimizer"])[0]
    sizes = [param.numel() for param in params]
    chosen = places(sizes, LINEAGE)
    assert chosen == places(sizes, LINEAGE)
    assert len({tensor for tensor, _ in chosen}) == min(NUM_PLACES, len(params))
    assert all(0 <= place < sizes[tensor] for tensor, place in chosen)
    assert chosen != places(sizes, bytes(16))
    flat, vector = torch.cat([param.detach().flatten() for param in params]), places_in_vector(sizes, LINEAGE)
    assert [float(flat[place]) for place in vector] == [float(params[t].flatten()[p]) for t, p in chosen]


def test_a_peer_that_gives_nothing_has_no_list():
    worker = Trainer(VIT, X)
    own = worker.log.own(worker.throughput.work, 1)
    assert (own.listed, own.chance) == (b"", 0.0)
    ticket = Ticket(0, 0, False, 0.0, LINEAGE)
    assert with_work_name(ticket, own) == with_work_name(ticket, None) == ticket


def test_only_data_that_all_peers_have_can_be_computed_again(tmp_path):
    recipe = replace(preset("imagefolder-vit-small"), num_classes=2)
    data = build_data(recipe, tmp_path)
    assert not Replay(build_task(VIT), data).is_shared
    assert Trainer(VIT, X).replay.is_shared


def test_distances():
    one = torch.tensor([3.0, 4.0])
    assert distance(one, one) == distance(torch.zeros(2), torch.zeros(2)) == 0
    assert distance(one, torch.zeros(2)) == distance(torch.zeros(2), one) == 1
    assert distance(one, -one) == 2
    assert distance(one, 1.5 * one) > 10 * WORK_TOLERANCE


@pytest.mark.parametrize("num_micro_batches", [4, 5, 8, 20])
def test_a_member_that_computes_half_is_found_within_a_hundred_updates(num_micro_batches):
    unseen = 1 - chance_of_an_audit(num_micro_batches) / 2
    assert 1 - unseen**100 > 0.95, "a first difference"
    assert chance_of_an_audit(num_micro_batches) <= 0.02 * num_micro_batches


def test_checks_cost_what_they_may():
    assert chance_of_an_audit(1) == 0.02
    assert chance_of_an_audit(20) == pytest.approx(0.2)
    assert chance_of_an_audit(1000) == 1
