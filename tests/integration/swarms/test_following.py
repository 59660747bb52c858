"""A joiner whose line is slower than the swarm downloads one state, and then makes the updates that it has missed."""

import time
from functools import partial
from itertools import cycle

import lightning as L
import pytest
import torch

from swarm.averaging.averager import SwarmAverager
from swarm.averaging.compression.codec import TOO_COARSE_FOR_BUFFERS
from swarm.averaging.striped_allreduce import StripedAllReduce
from swarm.protocol.messages import RoundFailed
from swarm.state_sync.average_log import MAX_AVERAGES, AverageLog
from swarm.state_sync.transfer_status import TransferStatus
from swarm.training.averaging_mode import Averaging
from swarm.training.gradient_buffer import GradientVector
from swarm.training.joining import listener as listener_module
from swarm.training.joining.listener import Listener
from swarm.training.joining.probation import MAX_UPDATES
from swarm.training.joining.state_takeover import StateTakeover
from swarm.training.joining.update_replay import UpdateReplay
from swarm.training.strategy import SwarmStrategy
from tests.helpers.islands.slow_joiners import SLOW_SECONDS, count_followed_updates, download_states_slowly
from tests.helpers.strategy_runs import Plan, Task, assert_same_bits, loader, patience, trainer_for
from tests.helpers.swarm_peers import FORK_SERVER, Peers, running_dht


def test_more_than_the_last_average_is_kept_only_for_peers_that_follow():
    average_log = AverageLog()
    for step in (1, 2):
        average_log.add(step, b"before", b"after", torch.ones(4))
    assert average_log.of(1) is None
    assert average_log.of(2).after == b"after"
    average_log.keep()
    for step in range(3, MAX_AVERAGES + 3):
        average_log.add(step, b"before", b"after", torch.full((4,), 0.5))
    assert average_log.of(2) is None, "there are only so many"
    assert average_log.of(3) is not None
    average_log.add(100, b"other", b"another", torch.full((4,), 1 / 3))
    (half,), (single,) = average_log.of(MAX_AVERAGES + 2).tensors, average_log.of(100).tensors
    assert (half.dtype, single.dtype) == (torch.float16, torch.float32), "nothing is lost"
    average_log.until = 0.0
    average_log.add(101, b"another", b"last", torch.ones(4))
    assert average_log.of(100) is None


class Weights(L.Callback):
    """The swarm's weights after every update, and the number of its members; ends when all have made some together.

    Args:
        newest: shared number, which becomes the step of the swarm
    """

    def __init__(self, line, num_peers: int, times: int, newest=None):
        self.of: dict[int, dict[str, torch.Tensor]] = {}
        self.num_peers: dict[int, int] = {}
        self.joined_at = 0
        self._line, self._all, self._times, self._newest = line, num_peers, times, newest

    def on_train_start(self, trainer, pl_module):
        self.joined_at = trainer.global_step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        report = trainer.strategy.coordinator.last_step
        if report is None or report.step in self.of or report.step != trainer.global_step:
            return
        state = trainer.strategy.lightning_module_state_dict()
        self.of[report.step] = {name: tensor.clone() for name, tensor in state.items()}
        self.num_peers[report.step] = report.num_peers
        self._line.put(report.step)
        if self._newest is not None:
            self._newest.value = max(self._newest.value, report.step)
        trainer.should_stop |= sum(number == self._all for number in self.num_peers.values()) >= self._times


def take_part(
    name, initial_peers, line, plan, averaging, num_peers, min_peers=1, slow=False, max_steps=-1, newest=None
):
    """Run a peer until all have made four updates together, or so many in all.

    Returns:
        the swarm's weights after each update, and the step at which it joined; its optimizer; the number of updates
        that it made up for; the number of states that it downloaded
    """
    downloads, fetch = [], StateTakeover.download

    def count_downloads(self, *arguments, **wishes):
        downloads.append(arguments)
        return (yield from fetch(self, *arguments, **wishes))

    StateTakeover.download, followed = count_downloads, count_followed_updates()
    if slow:
        download_states_slowly(newest)
    with running_dht(initial_peers, line) as dht:
        strategy = SwarmStrategy(64, "following", dht=dht, name=name, options=patience(min_peers), averaging=averaging)
        task, weights = Task(plan), Weights(line, num_peers, 4 if max_steps < 0 else max_steps, newest)
        trainer_for(strategy, [weights], max_steps=max_steps, gradient_clip_val=plan.clip).fit(task, loader(ord(name)))
        optimizer = strategy.optimizers[0].state_dict()
    return (weights.of, weights.joined_at), optimizer, sum(followed), len(downloads)


@pytest.mark.parametrize(
    ("founders", "averaging"),
    [
        ("ab", Averaging.sync("fp16")),
        ("a", Averaging.sync()),
        ("ab", Averaging.overlap("int8")),
        ("a", Averaging.local(2, "none", 0.7, 0.9, fragments=3)),
        pytest.param("ab", Averaging.local(2, "topk"), marks=pytest.mark.long),
    ],
    ids=["synchronous", "alone", "overlapped", "local fragments, alone", "largest numbers"],
)
def test_a_joiner_that_downloads_slowly_follows(founders, averaging):
    plan = Plan(batch_norm=averaging.codec.name not in TOO_COARSE_FOR_BUFFERS, compute_seconds=0.03)
    train = partial(take_part, newest=FORK_SERVER.RawValue("q", 0))
    with Peers(timeout_seconds=90) as peers:
        for name in founders:
            peers.start(name, train, plan, averaging, len(founders) + 1, len(founders))
        peers.until(lambda: len(peers["a"].messages) >= 5)
        peers.start("z", train, plan, averaging, len(founders) + 1, 1, True)
        found = peers.results()
    (weights, joined_at), optimizer, followed, num_downloads = found["z"]
    assert num_downloads == 1
    assert followed >= 3, "updates were made meanwhile"
    assert min(weights) - joined_at <= MAX_UPDATES, "it took part when other peers had confirmed its state"
    for name in founders:
        (theirs, _), their_optimizer, *_ = found[name]
        common = theirs.keys() & weights.keys()
        assert len(common) >= 4
        for step in common:
            assert_same_bits(theirs[step], weights[step])
        if averaging.local_steps is None:  # with local steps, each peer has its own
            torch.testing.assert_close(their_optimizer, optimizer, rtol=0, atol=0)


def listen(name, initial_peers, line, plan, averaging):
    """Run a joiner whose state takes longer to download than an update; the model counts as a large one.

    Returns:
        as `take_part`; the steps of the rounds that it listened to and used as its own
    """
    taken, take = [], Listener.take

    def take_and_note(self, step, lineage):
        listened = take(self, step, lineage)
        taken.extend([step] if listened is not None else [])
        return listened

    listener_module.LISTEN_BYTES, Listener.take = 0, take_and_note
    return *take_part(name, initial_peers, line, plan, averaging, 3, slow=True), taken


@pytest.mark.parametrize("averaging", [Averaging.overlap("fp16"), Averaging.local(1, "fp16")], ids=str)
def test_a_joiner_that_is_nearly_done_is_in_a_round_before_it_has_the_weights(averaging):
    plan = Plan(compute_seconds=0.3)
    with Peers(timeout_seconds=90) as peers:
        for name in "ab":
            peers.start(name, take_part, plan, averaging, 3, 2)
        peers.until(lambda: len(peers["a"].messages) >= 2)
        peers.start("z", listen, plan, averaging)
        found = peers.results()
    (weights, joined_at), _, _, num_downloads, taken = found["z"]
    assert num_downloads == 1
    assert taken, "it has listened"
    assert taken[0] - joined_at <= 1
    for name in "ab":
        (theirs, _), *_ = found[name]
        common = theirs.keys() & weights.keys()
        assert taken[0] + 1 in common, "the update out of the round to which it has listened"
        for step in common:
            assert_same_bits(theirs[step], weights[step])


def lose_an_average(step: int) -> None:
    """Make this peer lose the parts of this average; the other peers get them."""
    average = StripedAllReduce.average

    async def lost(self, vector, *arguments):
        await average(self, vector, *arguments)
        if self.group.step == step:
            vector.zero_()
            raise RoundFailed("a part was lost")

    StripedAllReduce.average = lost


def train_with_a_loss(name, initial_peers, line, plan):
    if name == "b":
        lose_an_average(7)
    return take_part(name, initial_peers, line, plan, Averaging.sync("fp16"), 3, min_peers=3, max_steps=12)


def test_a_peer_that_has_lost_an_average_gets_it_from_another_and_needs_no_state():
    """The averages are in half precision, in which they are kept as long as nothing is lost by that."""
    with Peers(timeout_seconds=90) as peers:
        for name in "abc":
            peers.start(name, train_with_a_loss, Plan(compute_seconds=0.03))
        found = peers.results()
    (weights, joined_at), optimizer, followed, num_downloads = found["b"]
    assert (joined_at, num_downloads) == (0, 0), "all peers begin with the same weights"
    assert followed >= 1
    for name in "ac":
        (theirs, _), their_optimizer, *_ = found[name]
        assert 8 in set(theirs) - set(weights), "it has not made that update in a round"
        assert_same_bits(theirs[12], weights[12])
        torch.testing.assert_close(their_optimizer, optimizer, rtol=0, atol=0)


def train_beside_a_slow_answer(name, initial_peers, line):
    """Train with a search for a further average that takes a second when it first finds none."""
    fetch, waits = UpdateReplay.fetch_averages, []

    def fetch_slowly(self, *arguments):
        try:
            return (yield from fetch(self, *arguments))
        except RoundFailed:
            until = time.monotonic() + SLOW_SECONDS
            while not waits and time.monotonic() < until:
                yield None
            waits.append(until)
            raise

    if name == "b":
        lose_an_average(7)
        UpdateReplay.fetch_averages = fetch_slowly
    averaging = Averaging.local(2, "fp16", 0.7, 0.9, fragments=3)
    return take_part(name, initial_peers, line, Plan(compute_seconds=0.03), averaging, 3, min_peers=3, max_steps=28)


def test_local_steps_beside_following_do_not_change_the_common_weights():
    with Peers(timeout_seconds=90) as peers:
        for name in "abc":
            peers.start(name, train_beside_a_slow_answer)
        found = peers.results()
    (weights, _), _, followed, num_downloads = found["b"]
    assert (followed >= 1, num_downloads) == (True, 0)
    (theirs, _), *_ = found["a"]
    common = [step for step in theirs.keys() & weights.keys() if step > 8]
    assert common, "it came back"
    for step in common:
        assert_same_bits(theirs[step], weights[step])


def train_alone(name, initial_peers, line):
    """Peers begin to follow this one now and then, also between the average and the update."""
    looks, shown, kept = cycle([False, True]), [], []
    TransferStatus.is_followed = property(lambda self: next(looks))
    GradientVector.show = lambda self: shown.append(True)
    SwarmAverager.keep_average = lambda self, step, before, after: kept.append(len(shown))
    take_part(name, initial_peers, line, Plan(), Averaging.sync(), 1, max_steps=8)
    return kept


def test_only_an_average_that_was_written_is_kept():
    with Peers() as peers:
        peers.start("a", train_alone)
        kept = peers.results()["a"]
    assert kept == [1, 2, 3, 4], "of eight updates, every other one"
