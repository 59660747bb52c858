"""Averaging between real processes on loopback when a peer does not do what the other peers expect."""

import asyncio
from collections import Counter

import pytest
import torch
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.proto.averaging_pb2 import PART_FOR_AVERAGING, PROTOCOL_VIOLATION, AveragingData
from hivemind.utils.asyncio import as_aiter

from swarm.averaging.allreduce import AllReduce
from swarm.averaging.commands import RunRound
from swarm.averaging.meeting.knock import Knocker
from swarm.protocol.messages import Behind, Blame, RoundFailed, Ticket
from swarm.protocol.round_report import RoundReport
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS
from tests.helpers.averaging_rounds import (
    NO_TARGET,
    PATIENCE_SECONDS,
    TIMEOUT_SECONDS,
    averager_for,
    dismiss,
    introduce,
    meet_everyone,
    one_round,
    run_one_round,
    run_round,
    say_goodbye,
)
from tests.helpers.hurry import shorter
from tests.helpers.swarm_peers import Peers, running_dht

pytestmark = pytest.mark.timeout(180)


def one_round_after_a_failed_knock(*arguments):
    """`one_round` of a peer whose first join request no leader hears."""
    knocks, follow = [], Knocker.follow

    async def follow_later(self, *rest):
        knocks.append(rest)
        return await follow(self, *rest) if len(knocks) > 1 else None

    Knocker.follow = follow_later
    return one_round(*arguments)


def one_round_with_calls_that_fail(*arguments):
    """`one_round` of a peer whose p2pd fails at first to dial the other peers."""
    init, calls = AllReduce.__init__, Counter()

    def init_unlucky(self, *, stub_of, **arguments):
        def stub_later(peer_id):
            calls[peer_id] += 1
            if calls[peer_id] <= 3:
                raise ControlFailure("Connect failed. msg=failed to dial: all dials failed: dial backoff")
            return stub_of(peer_id)

        init(self, stub_of=stub_later, **arguments)

    AllReduce.__init__ = init_unlucky
    return one_round(*arguments)


def send_slowly_in(step: int, seconds: float) -> None:
    """Make this peer wait for so long after each part in the round of that step, while it lives."""
    send = AllReduce.inputs_for

    async def send_and_wait(self, reducer):
        async for message in send(self, reducer):
            yield message
            if self.group.step == step:
                await asyncio.sleep(seconds)

    AllReduce.inputs_for = send_and_wait


HURRIED = shorter(2, silence_seconds=DEFAULT_TIMEOUTS.silence_seconds)
"""Timeouts of peers that only wait for the end of a round."""


def one_round_within(name, initial_peers, line, vector, seconds, stops):
    """Run the first round of all, without known durations. Returns (peer id, the peers that kept it waiting)."""
    if stops:
        send_slowly_in(7, 2 * HURRIED.late_seconds)  # each part comes before the stream would count as broken
        seconds += 2 * HURRIED.late_seconds  # else the other peers might hear of its end before theirs
    with running_dht(initial_peers, line) as dht:
        averager = averager_for(vector, dht, "none", HURRIED)
        members = meet_everyone(line, dht)
        averager.vector.copy_(vector)
        ticket = Ticket(7, 10, False, 1.0, bytes(LINEAGE_BYTES))
        order = RunRound(ticket, members, NO_TARGET, patience_seconds=PATIENCE_SECONDS, timeout_seconds=seconds)
        failed = averager.run_round(order).exception(seconds + 5)
        say_goodbye(line, averager)
        assert stops or isinstance(failed, RoundFailed)
        return dht.peer_id, getattr(failed, "lost", frozenset())


def two_rounds(name, initial_peers, line, vector, samples, stops):
    """Run two rounds. A peer that `stops` sends nothing after its first part in the second, but lives."""
    if stops:
        send_slowly_in(1, 3 * DEFAULT_TIMEOUTS.late_seconds)
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


NUM_ROUNDS = 4


def rounds_of_all(name, initial_peers, line, vector):
    """Run rounds, each with all peers. Returns (peer id, the outcome of each)."""
    with running_dht(initial_peers, line) as dht:
        averager = averager_for(vector, dht, "none")
        members, outcomes = meet_everyone(line, dht), []
        for step in range(NUM_ROUNDS):
            try:
                outcomes.append(run_round(averager, members, vector, 10, step, patience_seconds=4.0))
            except (RoundFailed, Behind) as error:  # Behind: the other peers have met without this peer
                outcomes.append(error)
        say_goodbye(line, averager)
        return dht.peer_id, outcomes


def rounds_with_short_averages(*arguments):
    """`rounds_of_all` of a peer whose averages have one number less than it was given."""
    encode = AllReduce.encode_average

    def cut(self, part_index, average):
        return encode(self, part_index, average[:-1])

    AllReduce.encode_average = cut
    return rounds_of_all(*arguments)


def one_round_with_two_streams(*arguments):
    """`one_round` of a peer that tries to send its part of the first reducer's share a second time."""
    send, answers = AllReduce.inputs_for, []

    async def send_twice(self, reducer):
        async for message in send(self, reducer):
            yield message
            if not answers:
                while self.awaited_average(reducer) == 0:
                    await asyncio.sleep(0.01)  # until the first part has arrived, and others have not
                stream = await self.stub_of(reducer).rpc_aggregate_part(
                    as_aiter(AveragingData(code=PART_FOR_AVERAGING, group_id=self.group.group_id))
                )
                if (await anext(stream)).code != PROTOCOL_VIOLATION:
                    await asyncio.Event().wait()
                answers.append(stream)

    AllReduce.inputs_for = send_twice
    return one_round(*arguments)


def test_an_unheard_join_request_does_not_divide_the_swarm():
    vectors = {name: (torch.full((5000,), value), 10) for name, value in zip("abc", (1.0, 4.0, 7.0), strict=True)}
    found = run_one_round(vectors, one_round_after_a_failed_knock)
    for vector, report in found.values():
        assert isinstance(report, RoundReport), report
        assert len(report.group.peer_ids) == 3
        assert torch.equal(vector, torch.full((5000,), 4.0))


@pytest.mark.parametrize(
    ("odd_one", "size"),
    [(one_round_with_calls_that_fail, 5000), (one_round_with_two_streams, 200_000)],
    ids=["whom the others cannot call at once", "who gives twice"],
)
def test_a_round_is_whole_and_all_count_once(odd_one, size):
    vectors = {name: torch.full((size,), value) for name, value in zip("abc", (1.0, 4.0, 7.0), strict=True)}
    with Peers(timeout_seconds=80) as peers:
        for name, vector in vectors.items():
            peers.start(name, odd_one if name == "c" else one_round, vector, 10)
        introduce(peers)
        found = dismiss(peers)
    for vector, report in found.values():
        assert isinstance(report, RoundReport), report
        assert report.complete
        assert torch.equal(vector, torch.full((size,), 4.0))


def test_a_peer_that_becomes_late_is_dropped_though_it_lives():
    vectors = {name: torch.full((200_000,), value) for name, value in zip("abc", (1.0, 4.0, 7.0), strict=True)}
    found = run_one_round({name: (vector, 10, name == "c") for name, vector in vectors.items()}, two_rounds)
    late, contribution, (_, outcome) = found["c"]
    assert isinstance(outcome, RoundFailed), "they hear of it at once"
    assert torch.equal(contribution, vectors["c"])
    assert torch.equal(found["a"][1], found["b"][1])
    assert found["a"][1].unique().tolist() == [2.5, 4.0], "the mean of all, and of the two that sent everything"
    for name in "ab":
        _, _, (first, second) = found[name]
        assert first.complete
        assert first.lost == set()
        assert second.lost == {late}
        assert DEFAULT_TIMEOUTS.late_seconds / 2 < second.exchange_seconds < TIMEOUT_SECONDS


@pytest.mark.parametrize(("names", "late"), [("abc", "c"), ("ab", "b")])
def test_a_round_that_takes_too_long_names_the_late_peers(names, late):
    """The next round can do without them."""
    vector, seconds = torch.full((200_000,), 1.0), (PATIENCE_SECONDS + 2 * DEFAULT_TIMEOUTS.late_seconds) / 2
    found = run_one_round({name: (vector, seconds, name == late) for name in names}, one_round_within)
    peer_id, _ = found.pop(late)
    assert frozenset([peer_id]) in [named for _, named in found.values()], "the second to end may miss the first, too"


def test_a_sender_of_nan_is_left_out():
    spoiled = torch.full((50_000,), 7.0)
    spoiled[[0, 25_000, -1]] = torch.nan  # in some parts of both reducers
    found = run_one_round(
        {"a": (torch.full((50_000,), 1.0), 10), "b": (torch.full((50_000,), 4.0), 20)} | {"c": (spoiled, 30, True)}
    )
    (one, report), (other, other_report) = found["a"], found["b"]
    assert torch.equal(one, other)
    assert one[0] == one[-1] == 3.0  # the parts with NaN are the mean of the other peers
    assert torch.isfinite(one).all()
    assert not report.complete
    assert not other_report.complete
    assert report.parts_received == report.parts_expected
    assert report.blamed == other_report.blamed
    assert [*report.blamed.values()] == [Blame.SENT_NONSENSE]


def test_a_reducer_of_averages_that_cannot_be_is_named_and_not_met_again():
    """It has spoilt at most three rounds and was named, and the other peers have met without it.

    Numbers that are not finite, or will not be, are in `tests/e2e/attacks/test_members.py`."""
    with Peers(timeout_seconds=120) as peers:
        for name in "abc":
            function = rounds_with_short_averages if name == "c" else rounds_of_all
            peers.start(name, function, torch.full((200_000,), float(ord(name))))
        introduce(peers)
        found = dismiss(peers)
    liar, _ = found["c"]
    for name in "ab":
        _, outcomes = found[name]
        failed = [outcome for outcome in outcomes if not isinstance(outcome, RoundReport)]
        assert len(failed) <= NUM_ROUNDS - 1
        blamed = [outcome.blamed for outcome in outcomes if getattr(outcome, "blamed", None)]
        assert blamed, "it was named"
        assert {liar} == {peer for named in blamed for peer in named}, "no other peer"
        assert {said for named in blamed for said in named.values()} == {Blame.SENT_A_BAD_AVERAGE}
        last = outcomes[-1]
        assert isinstance(last, RoundReport), last
        assert liar not in last.group.peer_ids
        assert len(last.group.peer_ids) == 2
        assert last.complete


def test_an_average_of_nan_is_not_taken_over():
    spoiled = torch.full((50_000,), torch.nan)
    found = run_one_round({"a": (torch.full((50_000,), 1.0), 10), "b": (spoiled, 20)})
    vector, error = found["a"]
    assert isinstance(error, RoundFailed)
    assert torch.equal(vector, torch.full((50_000,), 1.0))
