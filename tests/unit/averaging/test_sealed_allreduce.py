"""An all-reduce in which members sign what they send: real ones, in one process."""

import asyncio
import os
import random
from dataclasses import replace

import pytest
import torch

from swarm.averaging.allreduce import AllReduce
from swarm.averaging.audit.audits import Audits
from swarm.averaging.audit.seals import Seals, seal_with
from swarm.averaging.compression.codec import CODECS
from swarm.averaging.compression.error_feedback import ErrorFeedback
from swarm.membership.backoff import BlameBackoff
from swarm.protocol.messages import Blame, Group, RoundFailed
from tests.helpers.attacks.sealed_exchange import Exchange
from tests.helpers.attacks.sealed_rounds import SIZE, group_of, judge_of, key, peer

MEMBERS = (0, 1, 2, 3)
ROUNDS = int(os.environ.get("HONEST_ROUNDS", "12"))
"""More by hand: HONEST_ROUNDS=200."""
NUMBERS = {peer(number): number for number in MEMBERS}


def seals_of(me, stripe):
    return Seals(me, stripe, key(NUMBERS[me]))


def vectors_of(group, seed=0, size=SIZE):
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(size, generator=generator)
    return {member: common + torch.randn(size, generator=generator) for member in group.peer_ids}


def outcome_of(group: Group, *arguments, **kinds) -> tuple[Exchange, dict]:
    """Of one exchange: its members, and what each has in the end."""

    async def run():
        exchange = Exchange(group, vectors_of(group), *arguments, **kinds)
        return exchange, await exchange.run()

    return asyncio.run(run())


def changed(group: Group, place: int, **ticket) -> Group:
    """The same group, of which one member has another ticket."""
    tickets = [*group.tickets]
    tickets[place] = replace(tickets[place], **ticket)
    return Group.close(group.nonce, group.peer_ids, tuple(tickets))


GROUPS = {
    "all alike": group_of(MEMBERS),
    "one cannot be called": changed(group_of(MEMBERS), 1, client_mode=True),
    "one has no samples": changed(group_of(MEMBERS), 2, samples=0),
    "one has no samples and cannot be called": changed(group_of(MEMBERS), 2, samples=0, client_mode=True),
}


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("codec", ["none", "fp16", "int8", "int4", "topk"])
def test_seals_change_no_bit_of_an_average(kind, codec):
    _, plain = outcome_of(GROUPS[kind], codec, None)
    exchange, sealed = outcome_of(GROUPS[kind], codec, seals_of)
    one = next(iter(plain.values()))
    assert all(torch.equal(found, one) for found in [*plain.values(), *sealed.values()])
    assert not any(member.blamed for member in exchange.members.values())
    for member in exchange.members.values():
        assert member.parts_received == member.parts_expected
        assert member.inputs_received == member.inputs_expected


def test_all_members_have_the_same_receipts():
    made = {}

    def keep(me, stripe):
        made[me] = seals_of(me, stripe)
        return made[me]

    group = GROUPS["one cannot be called"]
    outcome_of(group, "fp16", keep)
    reducers = {member for member, ticket in zip(group.peer_ids, group.tickets, strict=True) if not ticket.client_mode}
    receipts = [seals.receipts for seals in made.values()]
    assert all(found == receipts[0] and found.keys() == reducers for found in receipts)
    assert all(counted.is_signed for receipt in receipts[0].values() for counted in receipt.counted)


class GivesOneMemberAnotherAverage(AllReduce):
    """And the receipt of the true one."""

    async def rpc_aggregate_part(self, stream, context):
        async for answer in super().rpc_aggregate_part(stream, context):
            if context.remote_id == peer(1) and answer.tensor_part.size[0]:
                average = -self.codec.extract(answer.tensor_part)
                answer.tensor_part.buffer = average.numpy().tobytes()
            yield answer


class SignsForSomethingElse(AllReduce):
    """As a sender."""

    async def inputs_for(self, reducer):
        async for message in super().inputs_for(reducer):
            if not message.tensor_part.size[0]:
                message.tensor_part.CopyFrom(seal_with(b"nothing"))
            yield message


def test_an_average_without_its_receipt_is_not_taken():
    group = GROUPS["all alike"]
    exchange, outcomes = outcome_of(group, "none", seals_of, kinds={peer(0): GivesOneMemberAnotherAverage})
    assert isinstance(outcomes[peer(1)], RoundFailed)
    assert exchange.members[peer(1)].blamed == {peer(0): Blame.SENT_A_BAD_RECEIPT}
    assert torch.equal(outcomes[peer(2)], outcomes[peer(3)])
    assert not exchange.members[peer(2)].blamed


def test_who_does_not_sign_for_its_parts_is_named_and_the_others_go_on():
    group = GROUPS["all alike"]
    exchange, outcomes = outcome_of(group, "none", seals_of, kinds={peer(0): SignsForSomethingElse})
    for number in MEMBERS[1:]:
        assert exchange.members[peer(number)].blamed == {peer(0): Blame.SENT_A_BAD_COMMITMENT}
        assert torch.equal(outcomes[peer(number)], outcomes[peer(1)])
    assert isinstance(outcomes[peer(0)], RoundFailed), "it gets no receipts"


@pytest.mark.parametrize("codec", ["none", "fp16", "int8", "int4", "topk"])
def test_honest_members_never_find_anybody_out(codec):
    """Round after round with what codecs leave out, some without samples, some lost on the way; all is audited."""
    rng, audited = random.Random(codec), []
    judge = judge_of(codec)
    shunned = {member: BlameBackoff() for member in NUMBERS}

    async def ask(me, other, request, most):
        try:
            audited.append(other)
            return await audits[other].answer(me, request)
        except ValueError as error:
            raise OSError from error

    audits = {
        me: Audits(
            me,
            key(number),
            judge,
            lambda other, request, most, me=me: ask(me, other, request, most),
            shunned[me],
            100.0,
        )
        for me, number in NUMBERS.items()
    }
    feedbacks = {me: ErrorFeedback(CODECS[codec](), SIZE) for me in NUMBERS}
    group = group_of(MEMBERS)

    async def one_round(number: int) -> None:
        nonlocal group
        tickets = [
            audits[me].sign(replace(GROUPS["all alike"].tickets[0], lineage=group.group_id)) for me in group.peer_ids
        ]
        place = rng.randrange(8)
        if place < 4:
            tickets[place] = replace(
                tickets[place], **rng.choice([{"samples": 0}, {"samples": 1000}, {"client_mode": True}])
            )
        group = Group.close(rng.randbytes(16), group.peer_ids, tuple(tickets))
        for one in audits.values():
            one.begin(group)
        vectors = vectors_of(group, rng.randrange(10**6))
        scale = 10.0 ** rng.uniform(-8, 3)  # what was left out before may be far larger than what comes now
        exchange = Exchange(
            group.bounded(judge.target),
            {me: scale * vector for me, vector in vectors.items()},
            codec,
            lambda me, stripe: audits[me].seals_of(stripe),
            feedbacks,
        )
        if number % 3 == 2:
            asyncio.get_running_loop().call_later(rng.uniform(0, 0.03), exchange.lose, rng.choice(group.peer_ids))
        for me, outcome in (await exchange.run()).items():
            audits[me].end(has_average=not isinstance(outcome, BaseException))
        for one in audits.values():
            await one.until_done()
        for member in exchange.members.values():
            assert not member.blamed

    async def all_rounds() -> None:
        for number in range(ROUNDS):
            await one_round(number)
            for one in audits.values():
                assert one.found() == {}

    asyncio.run(all_rounds())
    assert len(audited) >= (0 if codec == "topk" else ROUNDS)
    assert not any(other in shunned[me] for me in NUMBERS for other in NUMBERS)
