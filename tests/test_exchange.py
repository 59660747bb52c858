"""Averaging between real processes on loopback, against means computed by hand."""

import asyncio
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from hivemind.averaging.partition import TensorPartContainer
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.proto.averaging_pb2 import PART_FOR_AVERAGING, PROTOCOL_VIOLATION, AveragingData
from hivemind.utils.asyncio import as_aiter
from swarm_peers import Line, Peers, running_dht

from swarm.averager import SwarmAverager
from swarm.codecs import Codec
from swarm.exchange import ExactAllReduceRunner
from swarm.outcomes import RoundReport
from swarm.pulse import LATE_SECONDS
from swarm.rendezvous import Rendezvous
from swarm.rounds import LINEAGE_BYTES, Member, RoundFailed, Ticket

pytestmark = pytest.mark.timeout(180)
NAMES = ("a", "b", "c")
SIZES = (1, 1000, 700_001)
ROUNDS = 8
PATIENCE_SECONDS, TIMEOUT_SECONDS = 10.0, 30.0


def contribution(name: str, size: int, step: int) -> tuple[torch.Tensor, int]:
    """What a peer brings to a round: a vector of widely spread numbers, and its weight."""
    generator = torch.Generator().manual_seed(1000 * NAMES.index(name) + step)
    scale = 10.0 ** torch.randint(-3, 2, (size,), generator=generator)
    return scale * torch.randn(size, generator=generator), int(torch.randint(1, 500, (), generator=generator))


def weighted_mean(names: str, size: int, step: int) -> np.ndarray:
    """The average in float64."""
    vectors, weights = zip(*(contribution(name, size, step) for name in names), strict=True)
    return np.average([vector.double().numpy() for vector in vectors], axis=0, weights=weights)


def meet_everyone(line: Line, dht) -> list[Member]:
    """Tell the test who we are and hear from it who all are."""
    line.put(Member(dht.peer_id, 0.0, dht.client_mode))
    return line.get()


def introduce(peers: Peers) -> None:
    members = [peers.message(name) for name in peers.peers]
    for peer in peers.peers.values():
        peer.tell(members)


def say_goodbye(line: Line, *averagers: SwarmAverager) -> None:
    """Close the averagers once nobody receives from them any more."""
    line.put("done")
    line.get()
    for averager in averagers:
        averager.shutdown()


def dismiss(peers: Peers) -> dict:
    """The other side of :func:`say_goodbye`. Returns the results."""
    assert {peers.message(name) for name in peers.peers} == {"done"}
    for peer in peers.peers.values():
        peer.tell("go on")
    return peers.results()


def run_round(
    averager: SwarmAverager, members, vector: torch.Tensor, samples: int, step: int, lineage=bytes(LINEAGE_BYTES)
) -> RoundReport:
    averager.vector.copy_(vector)
    ticket = Ticket(step, samples, averager.client_mode, float(step), lineage)
    return averager.run_round(ticket, members, PATIENCE_SECONDS, TIMEOUT_SECONDS).result(TIMEOUT_SECONDS + 5)


def average(name, initial_peers, line, sizes, rounds, client_mode=False):
    """A peer that averages ``rounds`` vectors of each size. Returns {size: [(average, report), ...]}."""
    with running_dht(initial_peers, line, client_mode=client_mode) as dht:
        averagers = {
            size: SwarmAverager(torch.zeros(size).share_memory_(), dht, f"run-{size}", lambda: ({}, []))
            for size in sizes
        }
        members = meet_everyone(line, dht)  # from here on all of them can be reached
        found = {size: [] for size in sizes}
        for size, averager in averagers.items():
            for step in range(rounds):
                report = run_round(averager, members, *contribution(name, size, step), step)
                found[size].append((averager.vector.clone(), report))
        say_goodbye(line, *averagers.values())
        return found


def run_average(names: str, sizes, rounds, client_modes=()) -> dict:
    with Peers(timeout_seconds=80) as peers:
        for name in names:
            peers.start(name, average, sizes, rounds, name in client_modes)
        introduce(peers)
        return dismiss(peers)


def check(found: dict, names: str, size: int) -> None:
    """All rounds gave everybody the same bits, which are the weighted mean, from all parts."""
    for step, outcomes in enumerate(zip(*(found[name][size] for name in names), strict=True)):
        vectors = [vector for vector, _ in outcomes]
        assert all(torch.equal(vector, vectors[0]) for vector in vectors)
        # float32 sums of up to 3 products: a few rounding errors of 6e-8 each, relative to the largest summand (< 100)
        np.testing.assert_allclose(vectors[0].double().numpy(), weighted_mean(names, size, step), rtol=1e-6, atol=1e-6)
        for _, report in outcomes:
            assert report.complete
            assert report.parts_expected > 0
            assert len(report.group.peer_ids) == len(names)
            assert report.loss == step
    if size > 1000:
        assert any(vector.abs().max() > 10 for vector in vectors)


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_the_average_is_the_weighted_mean_and_the_same_bits_everywhere(names):
    found = run_average(names, SIZES, ROUNDS)
    for size in SIZES:
        check(found, names, size)


def test_every_full_peer_reduces_an_equal_share():
    found = run_average("abc", (300_000,), 1)
    for name in "abc":
        (_, report) = found[name][300_000][0]
        assert report.inputs_expected == 3 * report.parts_expected / 3 == report.parts_received


def test_a_peer_that_cannot_be_dialled_takes_part():
    found = run_average("abc", (1, 50_000), 5, client_modes="c")
    for size in (1, 50_000):
        check(found, "abc", size)
    assert all(report.inputs_expected == 0 for _, report in found["c"][50_000])


def averager_for(vector: torch.Tensor, dht, codec: str) -> SwarmAverager:
    """An averager for such vectors, which PowerSGD takes for one matrix of 200 rows."""
    shapes = [(200, len(vector) // 200)] if codec == "powersgd" else []
    return SwarmAverager(
        torch.zeros_like(vector).share_memory_(), dht, "run", lambda: ({}, []), codec=Codec(codec, 4), shapes=shapes
    )


def one_round(name, initial_peers, line, vector, samples, client_mode=False, codec="none"):
    """A peer that takes part in one round with that vector. Returns (its vector then, report or error)."""
    with running_dht(initial_peers, line, client_mode=client_mode) as dht:
        averager = averager_for(vector, dht, codec)
        members = meet_everyone(line, dht)
        try:
            outcome = run_round(averager, members, vector, samples, 7)
        except RoundFailed as error:
            outcome = error
        say_goodbye(line, averager)
        return averager.vector.clone(), outcome


def one_round_after_a_failed_knock(*arguments):
    """The same, but the first time that this peer knocks at a leader's door, nobody hears it."""
    knocks, follow = [], Rendezvous._follow

    async def follow_later(self, *rest):
        knocks.append(rest)
        return await follow(self, *rest) if len(knocks) > 1 else None

    Rendezvous._follow = follow_later
    return one_round(*arguments)


def one_round_with_calls_that_fail(*arguments):
    """The same, but at first p2pd does not call anybody: it could not reach them just now."""
    get_stub, calls = ExactAllReduceRunner._get_peer_stub, Counter()

    def get_stub_later(self, peer_id):
        calls[peer_id] += 1
        if calls[peer_id] <= 3:
            raise ControlFailure("Connect failed. msg=failed to dial: all dials failed: dial backoff")
        return get_stub(self, peer_id)

    ExactAllReduceRunner._get_peer_stub = get_stub_later
    return one_round(*arguments)


def two_rounds(name, initial_peers, line, vector, samples, stops):
    """Two rounds; in the second, this peer stops to send after its first part if it ``stops``, but lives."""
    send = ExactAllReduceRunner._generate_input_for_peer

    async def send_one_part(self, peer_index):
        async for message in send(self, peer_index):
            yield message
            if self._group.tickets[0].step == 1:
                await asyncio.sleep(3 * LATE_SECONDS)

    if stops:
        ExactAllReduceRunner._generate_input_for_peer = send_one_part
    with running_dht(initial_peers, line) as dht:
        averager = averager_for(vector, dht, "none")
        members = meet_everyone(line, dht)
        reports = [run_round(averager, members, vector, samples, 0)]
        try:
            reports.append(run_round(averager, members, vector, samples, 1))
        except RoundFailed as error:
            reports.append(error)
        say_goodbye(line, averager)
        return dht.peer_id, averager.vector.clone(), reports


def one_round_with_two_streams(*arguments):
    """The same, but this peer wants to send its part of the first reducer's share a second time."""
    send, answers = ExactAllReduceRunner._generate_input_for_peer, []
    register, averaged = TensorPartContainer.register_processed_part, defaultdict(asyncio.Event)

    def register_and_tell(self, peer_index, *part):
        register(self, peer_index, *part)
        averaged[self, peer_index].set()

    async def send_twice(self, peer_index):
        async for message in send(self, peer_index):
            yield message
            if not answers:
                await averaged[self.tensor_part_container, peer_index].wait()  # the first has arrived, others have not
                stub = self._get_peer_stub(self.ordered_peer_ids[peer_index])
                stream = await stub.rpc_aggregate_part(
                    as_aiter(AveragingData(code=PART_FOR_AVERAGING, group_id=self.group_id))
                )
                if (await anext(stream)).code != PROTOCOL_VIOLATION:
                    await asyncio.Event().wait()
                answers.append(stream)

    TensorPartContainer.register_processed_part = register_and_tell
    ExactAllReduceRunner._generate_input_for_peer = send_twice
    return one_round(*arguments)


def run_one_round(contributions: dict, function=one_round) -> dict:
    with Peers(timeout_seconds=80) as peers:
        for name, arguments in contributions.items():
            peers.start(name, function, *arguments)
        introduce(peers)
        return dismiss(peers)


def test_a_listener_receives_the_average_and_does_not_change_it():
    one, other, ignored = torch.full((5000,), 1.0), torch.full((5000,), 4.0), torch.full((5000,), 1e30)
    found = run_one_round({"a": (one, 10), "b": (ignored, 0), "c": (other, 20)})
    for vector, report in found.values():
        assert isinstance(report, RoundReport), report
        assert torch.equal(vector, torch.full((5000,), 3.0))
        assert report.complete
        assert report.group.samples == 30


def test_a_knock_that_nobody_heard_does_not_divide_the_swarm():
    vectors = {name: (torch.full((5000,), value), 10) for name, value in zip("abc", (1.0, 4.0, 7.0), strict=True)}
    found = run_one_round(vectors, one_round_after_a_failed_knock)
    for vector, report in found.values():
        assert isinstance(report, RoundReport), report
        assert len(report.group.peer_ids) == 3
        assert torch.equal(vector, torch.full((5000,), 4.0))
        assert report.meeting_seconds < PATIENCE_SECONDS / 2


def test_who_cannot_be_called_at_once_is_called_again():
    vectors = {name: torch.full((5000,), value) for name, value in zip("abc", (1.0, 4.0, 7.0), strict=True)}
    with Peers(timeout_seconds=80) as peers:
        for name, vector in vectors.items():
            peers.start(name, one_round_with_calls_that_fail if name == "c" else one_round, vector, 10)
        introduce(peers)
        found = dismiss(peers)
    for vector, report in found.values():
        assert isinstance(report, RoundReport), report
        assert report.complete
        assert torch.equal(vector, torch.full((5000,), 4.0))


def test_what_somebody_gives_counts_once():
    vectors = {name: torch.full((200_000,), value) for name, value in zip("abc", (1.0, 4.0, 7.0), strict=True)}
    with Peers(timeout_seconds=80) as peers:
        for name, vector in vectors.items():
            peers.start(name, one_round_with_two_streams if name == "c" else one_round, vector, 10)
        introduce(peers)
        found = dismiss(peers)
    for vector, report in found.values():
        assert isinstance(report, RoundReport), report
        assert report.complete
        assert torch.equal(vector, torch.full((200_000,), 4.0))


def test_who_has_been_in_time_and_is_late_is_given_up_though_it_lives():
    vectors = {name: torch.full((200_000,), value) for name, value in zip("abc", (1.0, 4.0, 7.0), strict=True)}
    found = run_one_round({name: (vector, 10, name == "c") for name, vector in vectors.items()}, two_rounds)
    late, contribution, (_, outcome) = found["c"]
    assert isinstance(outcome, RoundFailed), "they hear of it at once"
    assert torch.equal(contribution, vectors["c"])
    assert torch.equal(found["a"][1], found["b"][1])
    assert found["a"][1].unique().tolist() == [2.5, 4.0], "the mean of all, and of the two who sent everything"
    for name in "ab":
        _, _, (first, second) = found[name]
        assert first.complete
        assert first.lost == set()
        assert second.lost == {late}
        assert LATE_SECONDS / 2 < second.exchange_seconds < 3 * LATE_SECONDS


def test_a_sender_of_nan_is_left_out():
    spoiled = torch.full((50_000,), 7.0)
    spoiled[[0, 25_000, -1]] = torch.nan  # in some parts of both reducers
    found = run_one_round(
        {"a": (torch.full((50_000,), 1.0), 10), "b": (torch.full((50_000,), 4.0), 20)} | {"c": (spoiled, 30, True)}
    )
    (one, report), (other, other_report) = found["a"], found["b"]
    assert torch.equal(one, other)
    assert one[0] == one[-1] == 3.0  # the parts with NaN are the mean of the others
    assert torch.isfinite(one).all()
    assert not report.complete
    assert not other_report.complete
    assert report.parts_received == report.parts_expected


def test_an_average_of_nan_is_not_taken_over():
    spoiled = torch.full((50_000,), torch.nan)
    found = run_one_round({"a": (torch.full((50_000,), 1.0), 10), "b": (spoiled, 20)})
    vector, error = found["a"]
    assert isinstance(error, RoundFailed)
    assert torch.equal(vector, torch.full((50_000,), 1.0))


def test_half_precision_gives_everybody_the_same_bits():
    vectors = {name: contribution(name, 50_000, 0) for name in "abc"}
    found = run_one_round({name: (vector, samples, False, "fp16") for name, (vector, samples) in vectors.items()})
    averages = [average for average, _ in found.values()]
    assert all(report.complete for _, report in found.values())
    assert torch.equal(averages[0], averages[1])
    assert torch.equal(averages[0], averages[2])
    assert torch.equal(averages[0], averages[0].half().float()), "what travels is what everybody has"
    # each contribution is rounded to 11 bits, and so is the average; below 6e-5 steps have a fixed size
    exact = torch.from_numpy(weighted_mean("abc", 50_000, 0)).float()
    largest = torch.stack([vector.abs() for vector, _ in vectors.values()]).max(0).values
    assert ((averages[0] - exact).abs() <= 2 * 2**-11 * largest + 2**-24).all()
    assert not torch.equal(averages[0], exact)


def repeat(name, initial_peers, line, vector, samples, codec, rounds):
    """A peer that brings the same vector to every round. Returns (all averages, reports)."""
    with running_dht(initial_peers, line) as dht:
        averager = averager_for(vector, dht, codec)
        members = meet_everyone(line, dht)
        averages, reports = [], []
        for step in range(rounds):
            lineage = reports[-1].group.group_id if reports else bytes(LINEAGE_BYTES)
            reports.append(run_round(averager, members, vector, samples, step, lineage))
            averages.append(averager.vector.clone())
        say_goodbye(line, averager)
        return torch.stack(averages), reports


@pytest.mark.parametrize(
    ("codec", "share", "size"), [("fp16", 0.5, 50_000), ("int8", 0.25, 50_000), ("fp16", 0.5, 900_001)]
)
def test_what_rounding_leaves_out_comes_with_the_next_round(codec, share, size):
    vectors = {name: contribution(name, size, 0) for name in "abc"}
    contributions = {name: (vector, samples, codec, 10) for name, (vector, samples) in vectors.items()}
    found = run_one_round(contributions, repeat)
    averages = found["a"][0].double()
    assert all(torch.equal(found["a"][0], other) for other, _ in found.values()), "the same bits everywhere"
    for _, reports in found.values():
        assert all(report.complete for report in reports)
        # each peer sends two thirds of its vector, and its third of the average to two others; and messages have heads
        assert sum(report.bytes_sent for report in reports) == pytest.approx(10 * share * 4 * size * 4 / 3, rel=0.03)
    assert sum(r.bytes_sent for _, all_of in found.values() for r in all_of) == sum(
        r.bytes_received for _, all_of in found.values() for r in all_of
    )
    exact = torch.from_numpy(weighted_mean("abc", size, 0))
    one, ten = (averages[0] - exact).abs(), (averages.mean(0) - exact).abs()
    assert one.max() > 0
    assert ten.mean() < one.mean() / 4, "an error that is the same in each round would not shrink"


def test_two_passes_of_low_rank_give_everybody_the_same_bits_and_few_bytes():
    vectors = {name: contribution(name, 50_000, 0) for name in "abc"}
    found = run_one_round({name: (vector, n, "powersgd", 10) for name, (vector, n) in vectors.items()}, repeat)
    averages = found["a"][0].double()
    assert all(torch.equal(found["a"][0], other) for other, _ in found.values()), "the same bits everywhere"
    for _, reports in found.values():
        assert all(report.complete for report in reports)
        assert sum(report.bytes_sent for report in reports) < 10 * 4 * 50_000 / 10, "4 (200 + 250) instead of 50,000"
    assert torch.linalg.matrix_rank(averages[0].view(200, 250), rtol=1e-4) == 4
    exact = torch.from_numpy(weighted_mean("abc", 50_000, 0))
    one, ten = (averages[0] - exact).norm(), (averages.mean(0) - exact).norm()
    assert ten < 0.9 * one, "what the first round left out comes with the next ones"
