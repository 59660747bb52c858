"""Each process of an island notes what it computes. Other peers compute it again as the work of one peer."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from recipe.training.launched import Launched
from swarm.protocol.work import WorkList, name_of
from swarm.training.island import channel as channels
from swarm.training.island.channel import Channel
from swarm.training.island.crew import Crew
from swarm.training.island.lead import Lead
from swarm.training.island.notes import lineage_from, numbers_for
from tests.helpers.attacks.work_trainer import RECIPES, VIT, Trainer, X, Y

SIZE = 2


class Island:
    """An island of two processes, which are threads here.

    Args:
        pool: runs the other process
        channels: the island adds its channels to this list
    """

    def __init__(self, recipe, pool: ThreadPoolExecutor, channels: list[Channel]):
        made = [pool.submit(Channel, Launched(rank, SIZE, rank, SIZE), torch.device("cpu")) for rank in range(SIZE)]
        for one in made:
            channels.append(one.result(20))
        self._pool, self._has_begun = pool, False
        self.first, self.other = (Trainer(recipe, X) for _ in range(SIZE))
        for rank, one in enumerate((self.first, self.other)):
            one.data.deal_out(rank, SIZE)
            one.batches = iter(one.data.train_dataloader())
        self.lead = Lead(channels[0])
        self.lead.attach(self.first.task, self.first.vector)
        self.crew = Crew(channels[1], self.other.task, self.other.optimizer, 64, 100)
        checks = pool.submit(self.crew.check_work, self.other.replay, self.other.loss)
        self.kind = self.lead.kind_of(self.first.replay)
        checks.result(20)

    def _both(self, first: Callable[[], None], other: Callable[[], object]) -> None:
        waits = self._pool.submit(other)
        first()
        waits.result(20)

    def _begin(self) -> None:
        lineage = self.first.version.lineage
        self._both(lambda: self.lead.begin_micro_batch(0, lineage), self.crew.begin_micro_batch)

    def turn(self) -> None:
        """Let both processes compute a micro-batch, one after the other, since threads draw from one generator."""
        if not self._has_begun:
            self._begin()
        self._has_begun = False
        self.first.compute()
        other, work = self.other, self.first.throughput.work
        batch = other.data.on_before_batch_transfer(next(other.batches), 0)
        samples = len(batch[1])
        other.replay.begin()
        loss = other.loss(batch)
        self.crew.begin_backward(samples)
        loss.backward()
        self._both(lambda: self.lead.add_up(samples, 1.0), lambda: self.crew.contribute(samples, loss))
        work.samples += samples

    def gather(self) -> WorkList:
        """Gather before a round.

        Return the list as other peers read it. The crew hears of it when it asks what comes next.
        """
        work = self.first.throughput.work

        def first() -> None:
            self.lead.gather(self.first.vector, work.noted)
            self.lead.begin_micro_batch(0, self.first.version.lineage)

        self._both(first, self.crew.begin_micro_batch)
        self._has_begun = True
        own = self.first.log.own(work, SIZE)
        return WorkList.from_bytes(own.listed, name_of(own.listed), work.samples)


@pytest.fixture
def island_of(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(channels, "meet", lambda rank, size, seconds: store)
    for name, seconds in (("WORK_SECONDS", 20.0), ("SILENT_SECONDS", 20.0), ("CLOSE_SECONDS", 0.1)):
        monkeypatch.setattr(channels, name, seconds)  # in gloo, no timeout of a test ends a thread
    made = []
    with ThreadPoolExecutor(SIZE) as pool:
        yield lambda recipe: Island(recipe, pool, made)
        for channel in made:
            channel.close()


@pytest.mark.parametrize("name", RECIPES)
def test_other_peers_compute_again_what_all_its_processes_have(island_of, name):
    island, checker = island_of(RECIPES[name]), Trainer(RECIPES[name], Y)
    assert island.kind == checker.replay.kind
    for _ in range(3):
        island.turn()
    listed = island.gather()
    assert [one.first_position for one in listed.lines] == list(range(0, 48, 8)), "the processes take turns"
    for line in listed.lines:
        assert checker.finds(X, line)
        assert checker.finds(Y, line) is False


def test_work_before_an_update_is_counted_over_all_processes(island_of):
    island, checker = island_of(VIT), Trainer(VIT, Y)
    island.turn()
    for one in (island.first, checker):
        one.update(bytes(range(100, 116)))
    island.turn()
    island.turn()
    listed = island.gather()
    assert (listed.num_before, len(listed.lines)) == (2, 6)
    assert all(checker.finds(X, line, number < 2) for number, line in enumerate(listed.lines))


def test_work_that_a_failed_round_took_along_stays_in_front_of_later_work_of_all_processes(island_of):
    island, checker = island_of(VIT), Trainer(VIT, Y)
    island.turn()
    throughput = island.first.throughput
    island.gather()
    taken = throughput.take()
    island.turn()
    throughput.give_back(taken)
    listed = island.gather()
    assert [one.first_position for one in listed.lines] == [0, 8, 16, 24]
    assert all(checker.finds(X, line) for line in listed.lines)


def test_processes_on_several_kinds_of_devices_have_a_kind_that_no_other_peer_has(island_of, monkeypatch):
    """Where dropout draws differently on each device, no other peer can tell what is right."""
    island = island_of(RECIPES["dropout, texts"])
    monkeypatch.setattr(type(island.first.replay), "kind", property(lambda replay: f"cuda {id(replay)}"))
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(island.crew.check_work, island.other.replay, island.other.loss)
        kind = island.lead.kind_of(island.first.replay)
        waits.result(20)
    assert kind == f"several {X.to_base58()}"[:64]


@pytest.mark.parametrize("lineage", [bytes(16), bytes(range(16)), b"\xff" * 16, bytes(range(240, 256))])
def test_a_lineage_comes_back_as_it_was_sent(lineage):
    assert lineage_from(numbers_for(lineage)) == lineage
