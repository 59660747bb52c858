"""Averaging between real processes on loopback, against means computed by hand."""

import math

import numpy as np
import pytest
import torch

from swarm.averaging.averager import SwarmAverager
from swarm.averaging.commands import RunRound
from swarm.protocol.messages import NOWHERE, Ticket, WentBack
from swarm.protocol.round_report import RoundReport
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.runtime.line_use import LineUse
from tests.helpers.averaging_rounds import (
    NO_TARGET,
    averager_for,
    contribution,
    dismiss,
    introduce,
    meet_everyone,
    options_for,
    run_one_round,
    run_round,
    say_goodbye,
)
from tests.helpers.swarm_peers import Peers, running_dht

pytestmark = pytest.mark.timeout(180)
SIZES = (1, 1000, 700_001)
ROUNDS = 4


def weighted_mean(names: str, size: int, step: int) -> np.ndarray:
    """Return the average in float64."""
    vectors, weights = zip(*(contribution(name, size, step) for name in names), strict=True)
    return np.average([vector.double().numpy() for vector in vectors], axis=0, weights=weights)


def average(name, initial_peers, line, sizes, rounds, client_mode=False):
    """Run a peer that averages `rounds` vectors of each size. Returns {size: [(average, report), ...]}."""
    with running_dht(initial_peers, line, client_mode=client_mode) as dht:
        averagers = {
            size: SwarmAverager(dht, options_for(torch.zeros(size), f"run-{size}"), lambda: ({}, [])) for size in sizes
        }
        for averager in averagers.values():
            averager.start()
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
    """Check that all rounds gave all peers the same bits, which are the weighted mean, from all parts."""
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


def test_a_listener_receives_the_average_and_does_not_change_it():
    one, other, ignored = (torch.full((200_000,), number) for number in (1.0, 4.0, torch.nan))
    found = run_one_round({"a": (one, 10), "b": (ignored, 0), "c": (other, 20)})
    for vector, report in found.values():
        assert isinstance(report, RoundReport), report
        assert torch.equal(vector, torch.full((200_000,), 3.0))
        assert report.complete
        assert report.group.samples == 30
    assert found["b"][1].bytes_sent < 0.6 * found["a"][1].bytes_sent, "the averages of its share, and no parts"


def test_a_peer_that_gives_little_of_its_line_is_waited_for():
    vectors = {name: contribution(name, 200_000, 0)[0] for name in "ab"}
    found = run_one_round({"a": (vectors["a"], 10), "b": (vectors["b"], 10, False, "none", 4.0)})
    for vector, report in found.values():
        assert torch.equal(vector, found["a"][0])
        assert report.complete
        assert report.exchange_seconds > 1.0, "800 kB at 500 kB/s; the last part waits for the one before it only"


def test_half_precision_gives_all_peers_the_same_bits():
    vectors = {name: contribution(name, 50_000, 0) for name in "abc"}
    found = run_one_round({name: (vector, samples, False, "fp16") for name, (vector, samples) in vectors.items()})
    averages = [average for average, _ in found.values()]
    assert all(report.complete for _, report in found.values())
    assert torch.equal(averages[0], averages[1])
    assert torch.equal(averages[0], averages[2])
    assert torch.equal(averages[0], averages[0].half().float()), "all peers hold the numbers that were sent"
    # each contribution is rounded to 11 bits, and so is the average; below 6e-5 steps have a fixed size
    exact = torch.from_numpy(weighted_mean("abc", 50_000, 0)).float()
    largest = torch.stack([vector.abs() for vector, _ in vectors.values()]).max(0).values
    assert ((averages[0] - exact).abs() <= 2 * 2**-11 * largest + 2**-24).all()
    assert not torch.equal(averages[0], exact)


def repeat(name, initial_peers, line, vector, samples, codec, rounds, max_upload_mbps=math.inf):
    """Run a peer that brings the same vector to every round. Returns (all averages, reports)."""
    with running_dht(initial_peers, line) as dht:
        averager = averager_for(vector, dht, codec, line=LineUse(max_upload_mbps))
        members = meet_everyone(line, dht)
        averages, reports = [], []
        for step in range(rounds):
            lineage = reports[-1].group.group_id if reports else bytes(LINEAGE_BYTES)
            reports.append(run_round(averager, members, vector, samples, step, lineage))
            averages.append(averager.vector.clone())
        say_goodbye(line, averager)
        return torch.stack(averages), reports


def test_a_slow_line_reduces_less_from_round_to_round():
    vectors = {name: contribution(name, 200_000, 0) for name in "abc"}
    contributions = {name: (vector, samples, "none", 3) for name, (vector, samples) in vectors.items()}
    found = run_one_round(contributions | {"c": (*contributions["c"], 2.5)}, repeat)
    assert all(torch.equal(found["a"][0], other) for other, _ in found.values()), "the same bits everywhere"
    assert all(torch.equal(average, found["a"][0][0]) for average in found["a"][0]), "whichever peer reduces which part"
    slow = found["c"][1]
    assert slow[0].share == pytest.approx(1 / 3)
    assert slow[-1].share < slow[0].share / 2, "a tenth, or more on a busy machine, where all lines are slow"
    assert 0 < slow[-1].line_kbps < 3000, "2500, or less on a busy machine"
    assert all(report.complete for _, reports in found.values() for report in reports)
    for shares in zip(*([report.share for report in reports] for _, reports in found.values()), strict=True):
        assert sum(shares) == pytest.approx(1)


@pytest.mark.parametrize(
    ("codec", "share", "size"),
    [("fp16", 0.5, 50_000), ("int8", 0.25, 50_000), ("int4", 0.129, 450_001), ("fp16", 0.5, 450_001)],
)
def test_what_rounding_leaves_out_comes_with_the_next_round(codec, share, size):
    vectors = {name: contribution(name, size, 0) for name in "abc"}
    contributions = {name: (vector, samples, codec, 10) for name, (vector, samples) in vectors.items()}
    found = run_one_round(contributions, repeat)
    averages = found["a"][0].double()
    assert all(torch.equal(found["a"][0], other) for other, _ in found.values()), "the same bits everywhere"
    reports = [report for _, all_of_one in found.values() for report in all_of_one]
    assert all(report.complete for report in reports)
    # A peer sends two thirds of its vector, and its third of the average to two others; and messages have heads. Thirds
    # are whole parts, and each round draws anew which peer has one part more: only the sum is the same every time.
    sent = sum(report.bytes_sent for report in reports)
    assert sent == pytest.approx(len(reports) * share * 4 * size * 4 / 3, rel=0.01)
    assert sent == sum(report.bytes_received for report in reports)
    exact = torch.from_numpy(weighted_mean("abc", size, 0))
    one, ten = (averages[0] - exact).abs(), (averages.mean(0) - exact).abs()
    assert one.max() > 0
    assert ten.mean() < one.mean() / 4, "an error that is the same in each round would not shrink"


def want_back(name, initial_peers, line):
    """Two rounds of step 7, in which all want to go back to step 5, and one of step 8. Returns the result of each."""
    with running_dht(initial_peers, line) as dht:
        averager = averager_for(torch.zeros(1000), dht, "int8")
        members, found = meet_everyone(line, dht), []
        vector, samples = contribution(name, 1000, 7)
        for step, back_to in ((7, 5), (7, 5), (8, NOWHERE)):
            averager.vector.copy_(vector)
            ticket = Ticket(step, samples, False, 1.0, bytes(LINEAGE_BYTES), back_to=back_to)
            order = RunRound(ticket, members, NO_TARGET, patience_seconds=10.0, timeout_seconds=30.0)
            try:
                found.append(averager.run_round(order).result(35))
            except WentBack as back:
                assert torch.equal(averager.vector, vector), "nothing is averaged"
                found.append((back.step, frozenset(back.group.peer_ids)))
        say_goodbye(line, averager)
        return str(dht.peer_id), found, averager.vector.clone()


def test_a_group_that_goes_back_averages_nothing_and_meets_again():
    with Peers(timeout_seconds=80) as peers:
        for name in "ab":
            peers.start(name, want_back)
        introduce(peers)
        found = dismiss(peers)
    all_of_them = {peer_id for peer_id, *_ in found.values()}
    for _, (*backs, report), average in found.values():
        for step, group in backs:
            assert step == 5
            assert {str(peer) for peer in group} == all_of_them
        assert report.group.step == 8
        assert {str(peer) for peer in report.group.peer_ids} == all_of_them
        assert torch.equal(average, found["a"][-1])
        difference = average.double() - torch.from_numpy(weighted_mean("ab", 1000, 7))
        assert difference.abs().max() < 0.3, "int8 rounds numbers of up to 30"


def test_two_passes_of_low_rank_give_all_peers_the_same_bits_and_few_bytes():
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
    assert ten < 0.9 * one, "the numbers that the first round left out come with the next ones"
