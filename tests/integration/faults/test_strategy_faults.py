"""Peers come late, fail, die or go astray, and the other peers train on without harm."""

import time
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from threading import Event, Thread

import lightning as L
import psutil
import pytest
import torch
from hivemind.utils import get_dht_time
from torch.nn import functional as F

from recipe.errors import InputError
from swarm.averaging.averager import SwarmAverager
from swarm.membership.progress_record import JOINING, TRAINING, PeerProgress
from swarm.membership.progress_store import ProgressStore
from swarm.runtime import fault_injection as faults
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS
from swarm.state_sync.training_state import SharedState
from swarm.training.averaging_mode import Averaging
from swarm.training.joining.probation import MAX_UPDATES
from swarm.training.strategy import SwarmStrategy
from tests.helpers.averaging_rounds import options_for
from tests.helpers.strategy_runs import (
    Plan,
    Record,
    Samples,
    Task,
    assert_equal_updates,
    assert_same_bits,
    learning_rate_factor,
    loader,
    nan_loader,
    patience,
    train,
    trainer_for,
)
from tests.helpers.swarm_peers import FORK_SERVER, Peers, running_dht

pytestmark = pytest.mark.timeout(180)
IMPOSSIBLE = 10**6
"""A step that no swarm of these tests comes to."""


def after_three_together(updates) -> bool:
    """Whether there were enough updates for a joiner to give its samples, even if no peer has confirmed its state."""
    return sum(update.num_peers == 3 for update in updates) >= MAX_UPDATES + 4


MOST_ROUNDS_MISSED = 20
"""Rounds that a joiner may miss before its first update, because other peers were ahead or did not wait for it."""


def test_a_late_joiner_takes_over_the_state_and_counts():
    plan = Plan(batch_norm=True, compute_seconds=0.03)
    with Peers() as peers:
        for name in "ab":
            peers.start(name, partial(train, min_peers=2, stop=after_three_together), plan, 64)
        peers.until(lambda: any(step >= 10 for step, *_ in peers["a"].messages))
        peers.start("c", partial(train, stop=after_three_together), plan, 64)
        found = peers.results()
    joiner = found["c"]
    step, learning_rate = joiner.joined_at
    assert step >= 10
    assert learning_rate == pytest.approx(0.01 * learning_rate_factor(step), rel=1e-6)
    first = joiner.updates[0]
    assert first.step > step
    assert sum(tried < first.step for tried in joiner.sent) <= MOST_ROUNDS_MISSED, "soon, by rounds that it went to"
    assert first.global_step == first.scheduler_step == first.step
    given = [update.own_samples > 0 for update in joiner.updates]
    assert given == sorted(given), "nothing before the other one has confirmed its state, and then always"
    assert any(given)
    for name in "ab":
        with_joiner = [update for update in found[name].updates if joiner.peer_id in update.peer_ids]
        assert with_joiner[0].step == first.step
        assert with_joiner[0].samples == first.samples
        assert_equal_updates(found[name], joiner)
        assert_same_bits(found[name].state, joiner.state)
        torch.testing.assert_close(found[name].optimizer, joiner.optimizer, rtol=0, atol=0)


def were_three_again(updates) -> bool:
    """Whether three are together again: after some drops in a row a peer takes over a state, and returns to the others,
    which do not wait for it."""
    return bool(updates) and updates[-1].step >= 6 and updates[-1].num_peers == 3


def test_a_peer_whose_gradients_are_not_finite_only_listens():
    plan = Plan(batch_norm=True)  # its running statistics are not finite either
    with Peers() as peers:
        for name, data in (("a", loader), ("b", nan_loader), ("c", loader)):
            peers.start(name, partial(train, min_peers=3, stop=were_three_again, data=data), plan, 96)
        found = peers.results()
    for name in "ac":
        updates = found[name].updates
        assert [update.step for update in updates] == list(range(1, len(updates) + 1))
        assert all(update.complete for update in found[name].updates)
    for one, other in zip(found["a"].updates, found["c"].updates, strict=True):
        assert one.samples == one.own_samples + other.own_samples
    assert any(update.step > 1 and update.num_peers == 3 for update in found["b"].updates), "it goes on to listen"
    assert all(update.own_samples == 0 for update in found["b"].updates)
    assert all(torch.isfinite(tensor).all() for tensor in found["a"].state.values())
    assert_same_bits(found["a"].state, found["c"].state)
    assert_same_bits(found["a"].state, found["b"].state)


LOST_SECONDS = {"kill": 30.0, "freeze": 40.0}
"""Limits; on an idle machine it takes 1 to 3 s and 3 to 6 s. A killed peer never answers, a frozen one may be slow."""


def after_five_of_two(updates) -> bool:
    seen_three = any(update.num_peers == 3 for update in updates)
    return seen_three and len(updates) >= 5 and all(update.num_peers == 2 for update in updates[-5:])


def train_doomed(fault, name, initial_peers, line, *args, **options):
    """Train until the fault happens."""
    faults.plan(fault)
    return train(name, initial_peers, line, *args, **options)


@pytest.mark.parametrize(
    ("victim", "action", "stage"),  # the first peer leads
    [
        ("a", "kill", "any"),
        ("c", "kill", "computing"),
        ("c", "kill", "meeting"),
        ("c", "kill", "met"),
        *[(n, "kill", "exchanging") for n in "ac"],
        ("a", "freeze", "meeting"),
        ("c", "freeze", "met"),
    ],
)
def test_the_others_go_on_when_a_peer_is_killed_or_frozen(victim, action, stage):
    plan = Plan(compute_seconds=0.03)
    with Peers(timeout_seconds=120) as peers:
        for name in "abc":
            fault = f"{action} {stage} 5" if name == victim and stage != "any" else ""
            doomed = partial(train_doomed, fault, min_peers=3, stop=after_five_of_two)
            peers.start(name, doomed, plan, 96)
        peers.until(lambda: any(step >= 5 for step, *_ in peers[victim].messages))
        processes = peers[victim].processes()
        if stage == "any":
            assert len(processes) >= 4  # itself, DHT, p2pd, averager
            peers[victim].kill()
        peers[victim].killed = True
        lost_at = time.monotonic()
        found = peers.results()
        if action == "kill":
            _, alive = psutil.wait_procs({*processes, *peers[victim].processes()}, timeout=5)
            assert alive == []
    one, other = found.values()
    assert_equal_updates(one, other)
    assert_same_bits(one.state, other.state)
    for outcome in (one, other):
        # a survivor that missed parts of the victim's last round, while the other got all, has caught up by download
        steps = [update.step for update in outcome.updates]
        assert steps == sorted(set(steps))
        without = [update for update in outcome.updates if update.num_peers == 2]
        assert without[0].at - lost_at < LOST_SECONDS[action]


NEVER, LATER = 2**40, 20


def some_updates_later(is_over, stop_at, updates) -> bool:
    """Whether to stop. The first peer that sees the end sets the same step for all; the test may be held up by then."""
    if updates and is_over.value and stop_at.value == NEVER:
        stop_at.value = updates[-1].step + LATER
    return bool(updates) and updates[-1].step >= stop_at.value


@pytest.mark.parametrize(("victim", "stage"), [("a", "giving state"), ("c", "taking state")])
def test_a_donor_or_a_newcomer_is_killed_during_the_download(victim, stage):
    plan, faulty = Plan(compute_seconds=0.03), {victim: f"kill {stage} 3"}
    is_over, stop_at = FORK_SERVER.RawValue("b", False), FORK_SERVER.RawValue("q", NEVER)
    stop = partial(some_updates_later, is_over, stop_at)
    with Peers(invite_by_all=True) as peers:  # a newcomer that knows only a victim could be left alone
        for name in "ab":
            peers.start(name, partial(train_doomed, faulty.get(name, ""), min_peers=2, stop=stop), plan, 64)
        peers.until(lambda: any(step >= 5 for step, *_ in peers["b"].messages))
        if victim == "a":
            peers["a"].killed = True
        for name in "cdef":  # a joiner asks the donor that is furthest, which is b now and then
            newcomer = peers.start(name, partial(train_doomed, faulty.get(name, ""), stop=stop), plan, 64)
            newcomer.killed = victim == name
            peers.until(lambda n=newcomer: not peers[victim].is_alive or n.messages)
            if not peers[victim].is_alive:
                break
        if victim == "a":
            peers.until(lambda: any(num == len(peers.peers) - 1 for _, num, *_ in newcomer.messages))
        is_over.value = True
        survivors = [*peers.results().values()]
        _, alive = psutil.wait_procs(peers[victim].processes(), timeout=10)
        assert alive == []
    for survivor in survivors:
        latest = [update.peer_ids for update in survivor.updates if update.step > survivors[0].updates[-1].step - LATER]
        assert {each.peer_id for each in survivors} in latest, "a peer that is held up may miss some"
        assert_same_bits(survivor.state, survivors[0].state)


def host_dht(name, initial_peers, line):
    """Run a DHT node that does not train. It knows the key of the run's records, since it has written one, too."""
    with running_dht(initial_peers, line) as dht:
        now = get_dht_time()
        record = PeerProgress(name, 0, 0, 0.0, now, now, True, JOINING)
        ProgressStore(dht, f"{SwarmStrategy(64, 'test').namespace}.progress").post(record).result(10)
        line.get()


def three_with_the_newcomer(updates) -> bool:
    latest = [update for update in updates if update.num_peers == 2 and update.peer_ids == updates[-1].peer_ids]
    return len(latest) >= 3 and latest[0].step > 5


def test_an_outbound_only_peer_that_is_ahead_of_all_others_hands_over_its_state():
    """The only peer that could be called has died; a new one without its checkpoint comes in its place."""
    plan = Plan(compute_seconds=0.03)
    with Peers(timeout_seconds=120) as peers:
        peers.start("h", host_dht)
        peers.start("a", partial(train, min_peers=2), plan, 64)
        peers.start("c", partial(train, min_peers=2, client_mode=True, stop=three_with_the_newcomer), plan, 64)
        peers.until(lambda: sum(num_peers == 2 for _, num_peers, *_ in peers["c"].messages) >= 6)
        peers["a"].kill()
        peers.start("b", partial(train, stop=three_with_the_newcomer), plan, 64)
        found = peers.results("b", "c")
        peers["h"].tell("go on")
        peers.results("h")
    step, _ = found["b"].joined_at
    assert step >= 6
    assert_equal_updates(found["b"], found["c"])
    assert_same_bits(found["b"].state, found["c"].state)


def together_again(updates) -> bool:
    """Whether three are together after one was away. That one sees a gap where the others were two."""
    away = any(update.num_peers == 2 for update in updates)
    away = away or any(later.step > earlier.step + 1 for earlier, later in pairwise(updates[:-2]))
    return away and all(update.num_peers == 3 for update in updates[-3:])


def test_what_a_frozen_peer_computed_on_old_weights_does_not_count():
    """Each update is the gradient of what all peers report as computed for it, on the weights of the update before."""
    plan, plain = Plan(optimizer="sgd", clip=None, compute_seconds=0.03), Averaging.sync(robust="off")
    with Peers(timeout_seconds=90) as peers:
        for name in "abc":
            fault = "freeze computing 5" if name == "c" else ""  # it holds a gradient that it has not counted yet
            doomed = partial(train_doomed, fault, min_peers=3, stop=together_again, averaging=plain)
            peers.start(name, doomed, plan, 96)
        peers.until(lambda: psutil.STATUS_STOPPED in [process.status() for process in peers["c"].processes()])
        for process in peers["c"].processes():
            process.suspend()
        peers.until(lambda: sum(num_peers == 2 for _, num_peers, *_ in peers["a"].messages) >= 5)
        for process in peers["c"].processes():
            process.resume()
        found = peers.results()
    of = {name: {update.step: update for update in outcome.updates} for name, outcome in found.items()}
    together = [step for step, update in of["a"].items() if update.num_peers == 3 and step - 1 in of["a"]]
    assert max(step for step, update in of["a"].items() if update.num_peers == 2) < max(together)
    for step in together:
        updates = [of[name][step] for name in "abc"]
        assert updates[0].samples == sum(update.own_samples for update in updates)
        net, samples = plan.net(), Samples()
        net.load_state_dict(of["a"][step - 1].weights)
        computed = [list(chain.from_iterable(update.indices)) for update in updates]
        counted = [one[len(one) - update.own_samples :] for one, update in zip(computed, updates, strict=True)]
        indices = list(chain.from_iterable(counted))
        assert len(indices) == updates[0].samples
        F.cross_entropy(net(samples.x[indices]), samples.y[indices]).backward()
        expected = {name: parameter.detach() - parameter.grad for name, parameter in net.named_parameters()}
        for update in updates:
            torch.testing.assert_close(update.weights, expected, rtol=0, atol=2e-6)


# ---- weights that went astray --------------------------------------------------------------------------------------


REPLACED, LAST = 16, 64
"""Weights are compared at every eighth update, and by the second comparison they have been replaced. A peer that has
missed the end goes on alone to the last update."""


def were_three_at_last(updates) -> bool:
    """Whether all three are together late enough; all of them see it at the same update."""
    return updates[-1].num_peers == 3 and updates[-1].step >= REPLACED


class Cosmic(L.Callback):
    """Multiplies weights of this peer after an update, as faulty memory would."""

    def __init__(self, step: int, factor: float):
        self._step, self._factor = step, factor

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self._step:
            self._step = -1
            with torch.no_grad():
                next(pl_module.parameters()).mul_(self._factor)


def train_with_a_fault(name, initial_peers, line, plan, target, callbacks, folder):
    with running_dht(initial_peers, line) as dht:
        strategy = SwarmStrategy(target, "fault", dht=dht, name=name, options=patience(3))
        record = Record(line, were_three_at_last)
        trainer = trainer_for(strategy, [*callbacks, record], max_steps=LAST)
        strategy.keep_own = lambda step: trainer.save_checkpoint(folder / f"{name}-{step}.ckpt")
        trainer.fit(Task(plan), loader(ord(name)))
        return record.updates


@pytest.mark.parametrize("factor", [1.5, torch.nan])
def test_weights_that_went_astray_are_replaced_by_those_of_the_others(factor, tmp_path):
    plan = Plan(clip=None, compute_seconds=0.02)
    with Peers() as peers:
        for name in "abc":
            peers.start(name, train_with_a_fault, plan, 96, [Cosmic(4, factor)] if name == "b" else [], tmp_path)
        found = {name: {update.step: update for update in updates} for name, updates in peers.results().items()}
    assert_same_bits(found["a"][4].weights, found["c"][4].weights)
    with pytest.raises(AssertionError):
        assert_same_bits(found["a"][4].weights, found["b"][4].weights)
    by_three = [{step for step, update in of.items() if update.num_peers == 3} for of in found.values()]
    last = max(set.intersection(*by_three))
    assert last >= REPLACED
    assert_same_bits(found["a"][last].weights, found["c"][last].weights)
    assert_same_bits(found["a"][last].weights, found["b"][last].weights)
    assert all(torch.isfinite(weight).all() for weight in found["a"][last].weights.values())
    kept = [path.name for path in tmp_path.iterdir()]
    if factor == 1.5:
        assert len(kept) == 1, "the weights that were far from the swarm's, before they were replaced"
        assert kept[0].startswith("b-")
        checkpoint = torch.load(tmp_path / kept[0], weights_only=False)["state_dict"]
        distance = (checkpoint["net.0.weight"] - found["a"][8].weights["0.weight"]).norm()
        assert distance > 0.2 * found["a"][8].weights["0.weight"].norm()


# ---- claims that do not hold ----------------------------------------------------------------------------------------


class BesideAStranger(L.Callback):
    """Notes the donors that this peer asks until ten updates after it has read a record of a step that was never made.

    Then it says so, and goes on until all have said so: which donors a peer asks after its companion has left is
    another question.
    """

    def __init__(self, line, step: int = IMPOSSIBLE):
        self.asked, self._seen_at, self._line, self._step = [], None, line, step
        self._has_seen_enough = False

    def on_train_start(self, trainer, pl_module):
        averager = trainer.strategy.coordinator.averager
        download = averager.download_state

        def ask(donors, *args, **kwargs):
            if not self._has_seen_enough:
                self.asked.extend(map(str, donors))
            return download(donors, *args, **kwargs)

        averager.download_state = ask
        self._line.put("trains")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        others = trainer.strategy.coordinator.tracker.others
        if self._seen_at is None and any(record.step == self._step for record in others.values()):
            self._seen_at = trainer.global_step
        if self._has_seen_enough:
            trainer.should_stop = self._line.has_message()
        elif self._seen_at is not None and trainer.global_step >= self._seen_at + 10:
            self._has_seen_enough = True
            self._line.put("has seen enough")


def end_beside_a_stranger(peers: Peers) -> dict:
    """Let peers a and b leave when both have seen enough, then the stranger z; returns the results of a and b."""
    for name in "ab":
        assert peers.message(name) == "has seen enough"
    for name in "ab":
        peers[name].tell("enough")
    members = peers.results("a", "b")
    peers["z"].tell("enough")
    peers.results("z")
    return members


def train_beside_a_stranger(name, initial_peers, line):
    with running_dht(initial_peers, line) as dht:
        strategy = SwarmStrategy(64, "test", namespace="claims", dht=dht, name=name, options=patience(2))
        beside = BesideAStranger(line)
        trainer = trainer_for(strategy, [beside])
        trainer.fit(Task(Plan(compute_seconds=0.03)), loader(ord(name)))
        return beside.asked, trainer.global_step


def claim(name, initial_peers, line):
    """Store a record with a false step, without a state, until the test has seen enough."""
    with running_dht(initial_peers, line) as dht:
        now = get_dht_time()
        record = PeerProgress(name, IMPOSSIBLE, 10**6, 1e3, now - 10, now, False, TRAINING)
        line.put(str(dht.peer_id))
        ProgressStore(dht, "claims.progress").post(record).result(10)
        line.get()


def test_no_peer_stops_for_a_stranger_that_claims_to_be_ahead():
    with Peers(timeout_seconds=90) as peers:
        for name in "ab":
            peers.start(name, train_beside_a_stranger)
        for name in "ab":
            peers.message(name)
        peers.start("z", claim)
        stranger = peers.message("z")
        members = end_beside_a_stranger(peers)
    for asked, step in members.values():
        assert stranger not in asked, "a peer that was held up may ask only its companion"
        assert 10 <= step < IMPOSSIBLE


NEAR = 90
"""A step that members may have reached; still a stranger's claim to it is not believed."""


def train_beside_a_liar(name, initial_peers, line, step):
    with running_dht(initial_peers, line) as dht:
        strategy = SwarmStrategy(64, "test", namespace="claims", dht=dht, name=name, options=patience(2))
        beside, task = BesideAStranger(line, step), Task(Plan(compute_seconds=0.03))
        trainer = trainer_for(strategy, [beside])
        trainer.fit(task, loader(ord(name)))
        weights = {name: tensor.clone() for name, tensor in task.net.state_dict().items()}
        return beside.asked, trainer.global_step, weights


def lie(name, initial_peers, line, claimed: int):
    """Claim a step, answer calls, and hand over a state of a step that was never made, with its weights negated."""
    with running_dht(initial_peers, line) as dht:
        task = Task(Plan())
        state = SharedState(task, [torch.optim.AdamW(task.parameters())])
        with torch.no_grad():
            for param in task.parameters():
                param.neg_()
        options = options_for(torch.zeros(sum(param.numel() for param in task.parameters())), "claims")
        averager = SwarmAverager(dht, options, lambda: state.export(IMPOSSIBLE, bytes(16)))
        averager.start()
        averager.set_step(IMPOSSIBLE)
        board, told = ProgressStore(dht, "claims.progress"), Event()
        line.put(str(dht.peer_id))
        waiting = Thread(target=lambda: (line.get(), told.set()), daemon=True)
        waiting.start()
        while not told.wait(1.0):
            now = get_dht_time()
            record = PeerProgress(name, claimed, 10**6, 1e3, 0.0, now, False, TRAINING)
            board.post(record).result(10)
        averager.shutdown()


@pytest.mark.parametrize("claimed", [IMPOSSIBLE, NEAR], ids=["far", "near"])
def test_an_impossible_step_is_neither_taken_over_nor_waited_for(claimed):
    with Peers(timeout_seconds=120) as peers:
        for name in "ab":
            peers.start(name, train_beside_a_liar, claimed)
        for name in "ab":
            peers.message(name)
        peers.start("z", lie, claimed)
        liar = peers.message("z")
        found = end_beside_a_stranger(peers)
    for asked, step, weights in found.values():
        assert 10 <= step < IMPOSSIBLE, "it has made its own updates to the end"
        assert all(torch.isfinite(weight).all() for weight in weights.values())
        assert liar not in asked, "a stranger's claim alone does not make it a donor"


class KillsAveraging(L.Callback):
    """Kills the averaging process at once, as the kernel does for want of memory."""

    def on_train_start(self, trainer, pl_module):
        psutil.Process(trainer.strategy.coordinator.averager.pid).kill()


def train_alone_without_averaging(name, initial_peers, line):
    """Run a script without a supervisor; returns the sentence with which it ends."""
    with running_dht(initial_peers, line) as dht:
        options = replace(patience(1), timeouts=replace(DEFAULT_TIMEOUTS, dead_seconds=1.0))
        strategy = SwarmStrategy(16, "test", dht=dht, options=options)
        trainer = trainer_for(strategy, [KillsAveraging()], max_time={"seconds": 20})
        try:
            trainer.fit(Task(Plan(compute_seconds=0.01)), loader(1))
        except InputError as error:
            return str(error)
        return ""


def test_a_lone_peer_whose_averaging_process_has_died_says_so():
    """Else it would train on, and no peer could join it."""
    with Peers() as peers:
        peers.start("a", train_alone_without_averaging)
        assert "averaging process has died" in peers.results()["a"]
