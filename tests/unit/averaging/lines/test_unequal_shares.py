"""All-reduces in which members have shares of their own size, or none: real ones, in one process."""

import asyncio
import random
from dataclasses import replace

import pytest
import torch

from swarm.averaging.allreduce import LATE_SECONDS, AllReduce
from swarm.averaging.audit.seals import Seals
from swarm.averaging.compression.codec import CODECS
from swarm.averaging.compression.error_feedback import ErrorFeedback
from swarm.averaging.lines.division import shares_of
from swarm.averaging.robust_mean import Combination
from swarm.protocol.messages import Group
from tests.helpers.attacks.sealed_exchange import Exchange
from tests.helpers.attacks.sealed_rounds import SIZE, group_of, key, peer

MEMBERS = (0, 1, 2, 3)
NUMBERS = {peer(number): number for number in MEMBERS}
MEAN, CLIPPED = Combination(), Combination(clips=True)
LINES = {
    "all different": (10, 40, 50, 500),
    "two have none": (1, 1, 100, 100),
    "one is not known": (0, 10, 40, 1),
}


def seals_of(me, stripe):
    return Seals(me, stripe, key(NUMBERS[me]))


def with_lines(lines, samples=(100, 200, 300, 50)) -> Group:
    tickets = [
        replace(ticket, line_kbps=line, samples=number)
        for ticket, line, number in zip(group_of(MEMBERS).tickets, lines, samples, strict=True)
    ]
    return Group.close(bytes(16), group_of(MEMBERS).peer_ids, tuple(tickets))


def vectors_of(group: Group, seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {member: torch.randn(SIZE, generator=generator) for member in group.peer_ids}


def averages_of(group: Group, *arguments, **keywords) -> tuple[Exchange, list[torch.Tensor]]:
    async def run():
        exchange = Exchange(group, vectors_of(group, 1), *arguments, **keywords)
        return exchange, [*(await exchange.run()).values()]

    return asyncio.run(run())


@pytest.mark.parametrize("lines", LINES.values(), ids=LINES)
@pytest.mark.parametrize("is_sealed", [False, True])
def test_the_bits_of_a_mean_do_not_depend_on_the_reducer_of_each_part(lines, is_sealed):
    _, equal = averages_of(with_lines((0,) * 4), rule=MEAN)
    group = with_lines(lines)
    exchange, unequal = averages_of(group, "none", seals_of if is_sealed else None, rule=MEAN)
    assert all(torch.equal(average, equal[0]) for average in [*equal, *unequal])
    shares = shares_of(group)
    assert len({*shares.values()}) > 1
    for me, member in exchange.members.items():
        assert (member.parts_received, member.inputs_received) == (member.parts_expected, member.inputs_expected)
        assert bool(member.inputs_expected) == bool(shares[me])


def test_one_member_can_reduce_everything():
    group = with_lines((10, 40, 50, 500))
    tickets = [replace(ticket, client_mode=place > 0) for place, ticket in enumerate(group.tickets)]
    _, averages = averages_of(replace(group, tickets=tuple(tickets)), rule=MEAN)
    _, equal = averages_of(with_lines((0,) * 4), rule=MEAN)
    assert all(torch.equal(average, equal[0]) for average in averages)


@pytest.mark.parametrize("codec", ["fp16", "int8", "int4"])
def test_nothing_of_a_gradient_is_lost_where_shares_move(codec):
    """Everything that members gave is in the averages, or still left out at senders and reducers."""
    rng, swarm = random.Random(codec), group_of(MEMBERS).peer_ids
    feedbacks = {me: ErrorFeedback(CODECS[codec](), SIZE) for me in swarm}
    given, moved, gap = torch.zeros(SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64), []

    async def run():
        for number in range(6):
            group = with_lines([rng.choice([1, 10, 100, 1000]) for _ in swarm])
            vectors = vectors_of(group, number)
            outcomes = [*(await Exchange(group, vectors, codec, None, feedbacks, rule=MEAN).run()).values()]
            assert all(torch.equal(average, outcomes[0]) for average in outcomes)
            given.add_(sum(group.ticket_of(me).samples * vector.double() for me, vector in vectors.items()))
            moved.add_(group.samples * outcomes[0].double())
            left_out = sum(feedback.left_out.double() for feedback in feedbacks.values())
            assert left_out.norm() > 0
            gap.append(float((given - moved - left_out).norm() / given.norm()))

    asyncio.run(run())
    assert max(gap) < 1e-5, "float32 sums"


class HasASlowLine(AllReduce):
    """A member on a slow line: each of its parts comes long after those of the others."""

    async def inputs_for(self, reducer):
        async for message in super().inputs_for(reducer):
            await asyncio.sleep(40 * LATE_SECONDS)  # more than any machine is busy for
            yield message


@pytest.mark.parametrize("lines", [(0, 0, 0, 0), (1, 100, 100, 100)], ids=["equal shares", "none for the slow one"])
def test_all_members_know_for_which_member_they_wait(lines):
    group = with_lines(lines)
    slow = group.peer_ids[0]
    exchange, _ = averages_of(group, "none", None, rule=CLIPPED, kinds={slow: HasASlowLine})
    assert {me for me, waits in exchange.waits.items() if waits.were_for_me(len(MEMBERS))} == {slow}
