"""The number of stripes into which a vector is divided, and how stripes are told apart."""

import asyncio
import contextlib
import time

import pytest
import torch
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import as_aiter

from swarm.averaging.allreduce import AllReduce
from swarm.averaging.compression.codec import Codec
from swarm.averaging.compression.error_feedback import ErrorFeedback
from swarm.averaging.compression.powersgd import LowRank
from swarm.averaging.running_groups import SETTLE_SECONDS, RunningGroups
from swarm.averaging.shares import count_stripes, stripe_of
from swarm.averaging.striped_allreduce import StripedAllReduce
from swarm.membership.failure_detector import FailureDetector
from swarm.protocol.messages import Group, RoundFailed, Ticket
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS
from tests.helpers.attacks import sealed_rounds
from tests.helpers.attacks.sealed_exchange import Exchange
from tests.helpers.virtual_time import run_in_virtual_time


def group_of(full: int, outbound_only: int = 0) -> Group:
    modes = [False] * full + [True] * outbound_only
    peers = tuple(PeerID(bytes([number])) for number in range(len(modes)))
    return Group(bytes(16), peers, tuple(Ticket(0, 1, mode, 0.0, bytes(LINEAGE_BYTES)) for mode in modes))


@pytest.mark.parametrize(
    ("full", "outbound_only", "codec", "numbers", "stripes"),
    [
        (2, 0, "none", 1, 1),
        (2, 0, "none", 2**17, 1),
        (2, 0, "none", 2**18, 2),  # a share of 512 KiB
        (2, 0, "fp16", 2**18, 1),
        (2, 0, "fp16", 2**20, 4),
        (4, 0, "fp16", 2**20, 2),
        (4, 0, "none", 2**24, 2),  # to three other members: six in all
        (16, 0, "none", 2**24, 1),
        (2, 2, "fp16", 2**20, 4),  # a member that cannot be dialled has no share
        (2, 0, "int8", 2**20, 2),
        (1, 3, "none", 2**24, 8),
    ],
)
def test_a_stripe_carries_what_a_new_stream_lets_through_or_more(full, outbound_only, codec, numbers, stripes):
    assert count_stripes(group_of(full, outbound_only), torch.empty(numbers), Codec(codec).make()) == stripes


def test_a_sender_for_an_unknown_group_waits_although_an_older_meeting_ends(monkeypatch):
    """A round that was given up ends a moment after the next one has begun."""

    async def meet_twice() -> None:
        groups, first = RunningGroups(), averaging_pb2.AveragingData(group_id=bytes(16))
        with groups.meeting():
            with groups.meeting():
                pass
            answers = groups.rpc_aggregate_part(as_aiter(first), None)
            waits = asyncio.ensure_future(anext(answers))
            await asyncio.sleep(SETTLE_SECONDS / 2)
            assert not waits.done()
        assert (await waits).code == averaging_pb2.BAD_GROUP_ID

    run_in_virtual_time(meet_twice, monkeypatch)


def test_no_two_stripes_have_the_same_name():
    group = group_of(2)
    stripes = [stripe_of(group, turn, stripe) for turn in range(2) for stripe in range(8)]
    assert len({stripe.group_id for stripe in stripes} | {group.group_id}) == 17
    assert all((stripe.peer_ids, stripe.tickets) == (group.peer_ids, group.tickets) for stripe in stripes)
    assert stripe_of(group, 1, 3) == stripes[11], "the same for all members"


def test_stripes_share_the_memory_of_what_was_left_out():
    feedback = ErrorFeedback(Codec("fp16").make(), 6)
    feedback.part(slice(2, 4)).keep(torch.ones(2), 0, 3.0)
    assert feedback.left_out.tolist() == [0, 0, 3, 3, 0, 0]
    assert ErrorFeedback(Codec("none").make(), 6).part(slice(2, 4)).left_out is None


def test_a_member_that_cannot_reach_a_reducer_is_waited_for_once(monkeypatch):
    """This happens when a home line has got another address. The other members wait for their averages meanwhile."""
    group = sealed_rounds.group_of((0, 1, 2))
    cut_off, reducer, _ = group.peer_ids
    detectors, took = {me: FailureDetector(None, "cut") for me in group.peer_ids}, []

    async def rounds():
        for cut in ([(cut_off, reducer)], [(cut_off, reducer)], [], []):
            vectors = {me: torch.ones(3000) for me in group.peer_ids}
            exchange = Exchange(group, vectors, seconds=10.0, detectors=detectors, cut=cut)
            began = time.monotonic()
            outcomes = await exchange.run()
            took.append(time.monotonic() - began)
            assert {me for me in outcomes if isinstance(outcomes[me], RoundFailed)} == {me for me, _ in cut}

    run_in_virtual_time(rounds, monkeypatch)
    silence_seconds = DEFAULT_TIMEOUTS.silence_seconds
    assert took[0] == pytest.approx(10.0, abs=1.0)
    assert took[1] == pytest.approx(silence_seconds, abs=1.0)
    assert max(took[2:]) < silence_seconds, "it calls again"
    assert not detectors[reducer].never_calls(cut_off)


class BreaksOffAfterItHasRead(AllReduce):
    """A reducer that counts what it is given, and then loses the line before its answers get through."""

    async def rpc_aggregate_part(self, stream, context):
        async for answer in super().rpc_aggregate_part(stream, context):
            if answer:
                raise ConnectionError("the line has broken down")
            yield answer


@pytest.mark.parametrize(
    ("is_cut", "kind", "fails", "has_arrived"),
    [(False, AllReduce, False, True), (False, BreaksOffAfterItHasRead, True, True), (True, AllReduce, True, False)],
)
def test_nothing_of_a_round_in_two_passes_has_arrived_before_the_second_pass_has_left(
    is_cut, kind, fails, has_arrived, monkeypatch
):
    """Other members finish such a round without this peer's part, so nothing of it may count as given."""
    group, low_rank = sealed_rounds.group_of((0, 1)), LowRank([(40, 30)], 40 * 30, rank=4)
    me, other = group.peer_ids
    vectors = {peer: torch.ones(600) for peer in group.peer_ids}
    cut = [(me, other)] if is_cut else []

    async def both_passes():
        passes = [
            Exchange(group, vectors, seconds=1.0),
            Exchange(group, vectors, seconds=1.0, cut=cut, kinds={other: kind}),
        ]
        runners = iter([exchange.members[me] for exchange in passes])
        detector = FailureDetector(None, "two passes")
        stripes = StripedAllReduce(
            group, [1, 1], [], detector, lambda stripe: contextlib.nullcontext(), lambda *_: next(runners)
        )
        for number, exchange in enumerate(passes):
            mine, others = await asyncio.gather(
                stripes.average(vectors[me].clone(), ErrorFeedback(Codec("none").make(), 600)),
                exchange.members[other].run(),
                return_exceptions=True,
            )
            assert isinstance(others, torch.Tensor), "the other one has its average in any case"
            assert isinstance(mine, RoundFailed) == (fails and number == 1)
            assert stripes.memories(low_rank) == ([low_rank] if has_arrived and number == 1 else [])

    run_in_virtual_time(both_passes, monkeypatch)
