"""An all-reduce in which members sign what they send: real ones, in one process."""

import asyncio
import gc
import os
import random
from dataclasses import replace

import pytest
import torch
from hivemind.compression import CompressionInfo
from hivemind.proto.averaging_pb2 import AVERAGED_PART, AveragingData

from swarm.averaging.allreduce import AllReduce
from swarm.averaging.audit.audits import Audits
from swarm.averaging.audit.judge import Evidence
from swarm.averaging.audit.seals import Seals, seal_with
from swarm.averaging.audit.statements import Receipt, hash_of, root_of
from swarm.averaging.compression.codec import CODECS
from swarm.averaging.compression.error_feedback import ErrorFeedback
from swarm.averaging.robust_mean import Combination
from swarm.averaging.shares import count_stripes
from swarm.averaging.unsettled import Unsettled
from swarm.membership.backoff import BlameBackoff
from swarm.protocol.messages import Blame, Group, RoundFailed
from tests.helpers.attacks.sealed_exchange import Exchange
from tests.helpers.attacks.sealed_rounds import SIZE, group_of, judge_of, key, peer

MEMBERS = (0, 1, 2, 3)
ROUNDS = int(os.environ.get("HONEST_ROUNDS", "12"))
"""Number of random rounds. For a longer check by hand, set HONEST_ROUNDS=200."""
NUMBERS = {peer(number): number for number in MEMBERS}
PADDING_BYTES = 2**23
"""With a part or two of so many bytes, evidence is too large."""
PADDING = b"\xfa\x01" + b"\x80\x80\x80\x04" + bytes(PADDING_BYTES)
"""Field 31, of that length: neither a part nor its message has one of this number."""


def seals_of(me, stripe):
    return Seals(me, stripe, key(NUMBERS[me]))


def vectors_of(group, seed=0, size=SIZE):
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(size, generator=generator)
    return {member: common + torch.randn(size, generator=generator) for member in group.peer_ids}


def outcome_of(group: Group, *arguments, **kinds) -> tuple[Exchange, dict]:
    """Run one exchange. Return it, and what each of its members has in the end."""

    async def run():
        exchange = Exchange(group, vectors_of(group), *arguments, **kinds)
        return exchange, await exchange.run()

    return asyncio.run(run())


def changed(group: Group, place: int, **ticket) -> Group:
    """The same group, with one member's ticket changed."""
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


@pytest.mark.parametrize("samples", [(100, 100, 400), (100, 100, 100, 10), (400, 100, 100, 50)])
def test_buffers_that_are_the_same_on_all_members_stay_what_they_are_however_unequal_their_local_steps(samples):
    """Gradients of local steps grow with the samples. Running statistics and constant buffers do not."""
    group = group_of(range(len(samples)))
    for place, number in enumerate(samples):
        group = changed(group, place, samples=number)
    constant, rule = torch.full((500,), 0.5), Combination(clips=True, local_steps=16)
    gradients = {peer: torch.ones(1500) * ticket.samples / 100 for peer, ticket in group.members}

    async def average_of(vectors: dict) -> dict:
        return await Exchange(group, vectors, "fp16", rule=rule, num_buffers=500).run()

    buffers = constant
    for _ in range(3):
        vectors = {peer: torch.cat([gradients[peer], buffers]) for peer in group.peer_ids}
        one, *others = asyncio.run(average_of(vectors)).values()
        assert all(torch.equal(one, other) for other in others)
        buffers = one[1500:]
    assert torch.equal(buffers, constant)


class AnswersAtOnce(AllReduce):
    """A reducer that sends only nonsense, before any member can have read the first average."""

    hung_up: asyncio.Event

    async def rpc_aggregate_part(self, stream, context):
        numbers = torch.full((8,), torch.nan)
        nonsense = self.codec.compress(numbers, CompressionInfo.from_tensor(numbers))
        try:
            for _ in range(4):
                yield AveragingData(code=AVERAGED_PART, tensor_part=nonsense)
            await asyncio.Event().wait()
        finally:
            self.hung_up.set()


class BreaksOff(AllReduce):
    """A reducer that breaks off the stream of one member."""

    async def rpc_aggregate_part(self, stream, context):
        if context.remote_id == peer(1):
            raise ConnectionError("the line has broken down")
        async for answer in super().rpc_aggregate_part(stream, context):
            yield answer


@pytest.mark.parametrize(("lineage", "is_settled"), [(b"of that round", True), (b"made alone", False)])
def test_a_remainder_of_a_round_that_only_the_reducer_has_missed_goes_with_its_next_average(lineage, is_settled):
    """Otherwise the remainder from before that round would go twice."""
    group, codec = group_of((0, 1, 2)), CODECS["int8"]()
    feedbacks = {member: ErrorFeedback(codec, SIZE) for member in group.peer_ids}

    async def run() -> dict:
        exchange = Exchange(
            group, vectors_of(group), "int8", feedbacks=feedbacks, kinds={peer(2): BreaksOff}, seconds=1.0
        )
        found, unsettled = await exchange.run(), Unsettled()
        unsettled.failed(b"of that round", [exchange.members[peer(1)]])
        before = feedbacks[peer(1)].left_out.clone()
        unsettled.holds(lineage)
        changed = feedbacks[peer(1)].left_out != before
        assert changed.any() == is_settled
        assert changed.sum() <= SIZE / 3 + 1, "its share"
        unsettled.forget()
        unsettled.holds(b"of that round")
        assert torch.equal(feedbacks[peer(1)].left_out != before, changed), "once"
        return found

    found = asyncio.run(run())
    assert isinstance(found[peer(1)], RoundFailed)
    assert torch.equal(found[peer(0)], found[peer(2)]), "the others have the average"


@pytest.fixture
def no_garbage_collection():
    """Turn the collector off: sooner or later it would close a stream that nothing else closes."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
def test_a_member_that_refuses_an_average_hangs_up_though_the_next_ones_have_come():
    """Otherwise its reducer would wait for this member's next part."""
    group = group_of((0, 1))
    honest, liar = group.peer_ids

    async def run():
        AnswersAtOnce.hung_up = asyncio.Event()
        exchange = Exchange(group, vectors_of(group), kinds={liar: AnswersAtOnce})
        running = asyncio.ensure_future(exchange.members[honest].run())
        await asyncio.wait_for(AnswersAtOnce.hung_up.wait(), 30)
        assert exchange.members[honest].blamed == {liar: Blame.SENT_A_BAD_AVERAGE}
        running.cancel()

    asyncio.run(run())


def test_all_members_have_the_same_receipts():
    made = {}

    def keep(me, stripe):
        made[me] = seals_of(me, stripe)
        return made[me]

    group = GROUPS["one cannot be called"]
    outcome_of(group, "fp16", keep)
    reducers = {member for member, ticket in group.members if not ticket.client_mode}
    receipts = [seals.receipts for seals in made.values()]
    assert all(found == receipts[0] and found.keys() == reducers for found in receipts)
    assert all(counted.is_signed for receipt in receipts[0].values() for counted in receipt.counted)


class GivesOneMemberAnotherAverage(AllReduce):
    """A reducer that gives one member another average, with the receipt of the true one."""

    async def rpc_aggregate_part(self, stream, context):
        async for answer in super().rpc_aggregate_part(stream, context):
            if context.remote_id == peer(1) and answer.tensor_part.size[0]:
                average = -self.codec.extract(answer.tensor_part)
                answer.tensor_part.buffer = average.numpy().tobytes()
            yield answer


class SignsForSomethingElse(AllReduce):
    """A sender that signs for something else than it sends."""

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


def test_a_member_that_does_not_sign_for_its_parts_is_named_and_the_others_go_on():
    group = GROUPS["all alike"]
    exchange, outcomes = outcome_of(group, "none", seals_of, kinds={peer(0): SignsForSomethingElse})
    for number in MEMBERS[1:]:
        assert exchange.members[peer(number)].blamed == {peer(0): Blame.SENT_A_BAD_COMMITMENT}
        assert torch.equal(outcomes[peer(number)], outcomes[peer(1)])
    assert isinstance(outcomes[peer(0)], RoundFailed), "it gets no receipts"


class PadsItsTensors(AllReduce):
    """A sender that adds a field to its parts which no peer reads, and which no hash covers."""

    async def inputs_for(self, reducer):
        async for message in super().inputs_for(reducer):
            message.tensor_part.MergeFromString(PADDING)
            yield message


class PadsItsMessages(AllReduce):
    """A sender that adds the same field beside its parts, and so to what its reducer has to hold in memory."""

    async def inputs_for(self, reducer):
        async for message in super().inputs_for(reducer):
            message.MergeFromString(PADDING)
            yield message


@pytest.mark.parametrize("kind", [PadsItsTensors, PadsItsMessages])
def test_a_member_that_pads_its_parts_is_named_and_its_reducers_can_show_what_they_have_averaged(kind):
    """Otherwise what a reducer shows would be too large for its auditors, and they would suspect the reducer."""
    made = {}

    def keep(me, stripe):
        made[me] = seals_of(me, stripe)
        return made[me]

    exchange, outcomes = outcome_of(GROUPS["all alike"], "fp16", keep, kinds={peer(0): kind})
    for number in MEMBERS[1:]:
        reducer, witness = peer(number), made[peer(number % 3 + 1)]
        assert witness.num_averages(reducer)
        for index in range(witness.num_averages(reducer)):
            Evidence.from_bytes(made[reducer].show(index))
        assert exchange.members[reducer].blamed == {peer(0): Blame.SENT_NONSENSE}
        assert torch.equal(outcomes[reducer], outcomes[peer(1)])


class Audited:
    """Members that average round after round, audit each other, and ask each other without a network.

    Args:
        share: how often each reducer is audited, as a share of the updates
    """

    def __init__(self, codec: str, share: float):
        self.codec, self.judge, self.asked = codec, judge_of(codec), 0
        self.shunned = {me: BlameBackoff() for me in NUMBERS}
        self.audits = {
            me: Audits(me, key(number), self.judge, self.asker(me), self.shunned[me], share)
            for me, number in NUMBERS.items()
        }
        self._feedbacks = {me: ErrorFeedback(CODECS[codec](), SIZE) for me in NUMBERS}
        self.group, self._number = group_of(MEMBERS), 0

    def asker(self, me):
        async def ask(other, request, most):
            self.asked += 1
            try:
                return await self.audits[other].answer(me, request)
            except ValueError as error:
                raise OSError from error

        return ask

    async def round(self, scale=1.0, change=None, loses=False, kinds=None, lines=(0, 0, 0, 0)) -> Exchange:
        """Run one round, and all audits that follow.

        Args:
            scale: factor of all gradients
            change: place of a member, and the changed fields of its ticket
            loses: whether one member is gone before the round is over
            lines: line speeds that the members state, by which shares move
        """
        self._number += 1
        ticket = replace(GROUPS["all alike"].tickets[0], lineage=self.group.group_id)
        tickets = [
            replace(self.audits[me].annotate(ticket), line_kbps=line)
            for me, line in zip(self.group.peer_ids, lines, strict=True)
        ]
        if change is not None:
            place, other = change
            tickets[place] = replace(tickets[place], **other)
        self.group = Group.close(self._number.to_bytes(16), self.group.peer_ids, tuple(tickets))
        for audits in self.audits.values():
            audits.begin(self.group)
        exchange = Exchange(
            self.group.bounded(self.judge.target_at(self.group.step)),
            {me: scale * vector for me, vector in vectors_of(self.group, self._number).items()},
            self.codec,
            lambda me, stripe: self.audits[me].seals_of(stripe),
            self._feedbacks,
            kinds,
        )
        if loses:
            gone = self.group.peer_ids[self._number % len(MEMBERS)]
            asyncio.get_running_loop().call_later(0.002 * (self._number % 10), exchange.lose, gone)
        outcomes = await exchange.run()
        averages = [outcome for outcome in outcomes.values() if isinstance(outcome, torch.Tensor)]
        if kinds is None:
            assert all(torch.equal(average, averages[0]) for average in averages)
        for me, outcome in outcomes.items():
            self.audits[me].end(has_average=not isinstance(outcome, BaseException))
        for audits in self.audits.values():
            await audits.until_done()
        return exchange

    def found(self) -> dict:
        """The peers that each member has found out since the last call."""
        return {me: audits.found() for me, audits in self.audits.items()}


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "fp16", "int8", "int4", "topk"])
def test_honest_members_never_find_a_peer_out(codec):
    """Codecs leave remainders, some members have no samples, and some are lost on the way. Every round is audited.

    Shares move from round to round, with the line speeds that members state.
    """
    swarm, rng = Audited(codec, share=100.0), random.Random(codec)

    async def run():
        for number in range(ROUNDS):
            other = rng.choice([{"samples": 0}, {"samples": 1000}, {"client_mode": True}])
            exchange = await swarm.round(
                scale=10.0 ** rng.uniform(-8, 3),  # the remainders may be far larger than what comes now
                change=(rng.randrange(len(MEMBERS)), other) if rng.random() < 0.5 else None,
                loses=number % 3 == 2,
                lines=[rng.choice([0, 10, 1000, 1500, 10**6]) for _ in MEMBERS],
            )
            assert not any(member.blamed for member in exchange.members.values())
            assert not any(swarm.found().values())

    asyncio.run(run())
    assert swarm.asked >= (0 if codec == "topk" else ROUNDS)
    assert not any(other in swarm.shunned[me] for me in NUMBERS for other in NUMBERS)


class MakesUpItsAverage(AllReduce):
    """A reducer that makes up its average, and signs it."""

    def encode_average(self, part_index, mean):
        return super().encode_average(part_index, -10 * mean)


class TellsMembersDifferentThings(AllReduce):
    """A reducer that gives one member another average, with a receipt that fits."""

    async def rpc_aggregate_part(self, stream, context):
        hashes = []
        async for answer in super().rpc_aggregate_part(stream, context):
            if context.remote_id == peer(1) and answer.tensor_part.size[0]:
                answer.tensor_part.buffer = (-self.codec.extract(answer.tensor_part)).numpy().tobytes()
                hashes.append(hash_of(answer.tensor_part))
            elif context.remote_id == peer(1):
                true = Receipt.from_bytes(answer.tensor_part.buffer)
                false = Receipt.sign(key(0), true.stripe, root_of(hashes), true.counted)
                answer.tensor_part.CopyFrom(seal_with(false.data))
            yield answer


@pytest.mark.parametrize(
    ("kind", "deed", "rounds"),
    [(MakesUpItsAverage, Blame.MADE_UP_AN_AVERAGE, 1), (TellsMembersDifferentThings, Blame.EQUIVOCATED, 2)],
)
def test_a_reducer_that_lies_is_found_out_by_all(kind, deed, rounds):
    """A made-up average is found before the next round. Different averages are found when the members meet again."""
    swarm = Audited("none", share=100.0 if kind is MakesUpItsAverage else 0.0)

    async def run():
        for _ in range(rounds):
            assert not any(swarm.found().values())
            await swarm.round(kinds={peer(0): kind})

    asyncio.run(run())
    found = swarm.found()
    assert [found[peer(number)] for number in MEMBERS[1:]] == [{peer(0): deed}] * 3
    assert all(peer(0) in swarm.shunned[peer(number)] for number in MEMBERS[1:])
    assert not any(peer(other) in swarm.shunned[me] for me in NUMBERS for other in MEMBERS[1:])


@pytest.mark.parametrize(("kind", "is_false"), [(AllReduce, False), (MakesUpItsAverage, True)])
def test_large_vectors_are_checked_in_each_of_their_stripes(kind, is_false):
    group, made = group_of(MEMBERS[:3]), {}
    size = 800_000
    judge = replace(judge_of("fp16"), size_at=lambda step: size)
    vectors = vectors_of(group, size=size)
    stripes = count_stripes(group, vectors[group.peer_ids[0]], judge.codec)
    assert stripes == 2
    liar = peer(0)

    async def run(stripe):
        def keep(me, part):
            made[stripe, me] = seals_of(me, part)
            return made[stripe, me]

        part = slice(size * stripe // stripes, size * (stripe + 1) // stripes)
        given = {me: vector[part] for me, vector in vectors.items()}
        exchange = Exchange(group, given, "fp16", keep, kinds={liar: kind}, stripe=stripe, stripes=stripes)
        assert all(isinstance(outcome, torch.Tensor) for outcome in (await exchange.run()).values())

    for stripe in range(stripes):
        asyncio.run(run(stripe))
        receipt = made[stripe, peer(1)].receipts[liar]
        for index in range(made[stripe, peer(1)].num_averages(liar)):
            evidence = Evidence.from_bytes(made[stripe, liar].show(index))
            judge.check_commitments(group, receipt, evidence)
            assert judge.is_false(group, stripe, index, receipt, evidence) == is_false
