"""Messages that members of a round send each other, and show each other afterwards, are read or refused."""

import asyncio
from functools import partial

import msgpack
import pytest
import torch
from hivemind.compression import CompressionInfo
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import MSGPackSerializer
from hypothesis import example, given
from hypothesis import strategies as some

from swarm.averaging.audit.audits import Audits
from swarm.averaging.audit.given_work import GivenWork
from swarm.averaging.audit.judge import Evidence
from swarm.averaging.audit.proofs import guilty, of_a_false_average, of_other_work, of_two_receipts
from swarm.averaging.audit.statements import Receipt, check_commitment, commit, root_of
from swarm.averaging.compression.codec import CODECS
from swarm.averaging.meeting.matchmaking_messages import orders_reply, parse_knock, parse_orders, to_knock
from swarm.averaging.shares import decode
from swarm.membership.backoff import BlameBackoff
from swarm.protocol.messages import RoundFailed
from swarm.protocol.order_book import MAX_BOOK_BYTES
from swarm.protocol.wire import to_wire
from swarm.protocol.work import NUM_PLACES, Line, WorkList, name_of, places_in_vector
from swarm.state_sync.average_log import averages_in
from swarm.state_sync.training_state import SharedState
from tests.helpers.attacks.sealed_rounds import SIZE, group_of, judge_of, key, peer, sealed_share
from tests.helpers.strangers.fuzzing import TIMES, damaged, junk, messages, often, refused

pytestmark = pytest.mark.timeout(300 * TIMES)


# ---- meeting ---------------------------------------------------------------------------------------------------------

KNOCK = to_knock(b"ticket", b"orders")


@often(200)
@given(messages(KNOCK))
@example(KNOCK)
def test_knocks(data):
    if not refused(parse_knock, data):
        shown, orders = parse_knock(data)
        assert isinstance(shown, bytes)
        assert len(orders) <= MAX_BOOK_BYTES


@often(200)
@given(some.sampled_from(averaging_pb2.MessageCode.values()), some.lists(some.binary(max_size=40), max_size=3))
@example(averaging_pb2.NOT_DECLARED, [b"orders"])
def test_answers_with_orders(code, gathered):
    found = parse_orders(averaging_pb2.MessageFromLeader(code=code, gathered=gathered))
    assert (found is not None) == (code == averaging_pb2.NOT_DECLARED and bool(gathered))
    assert orders_reply(b"orders").code == averaging_pb2.NOT_DECLARED


# ---- parts of gradients and averages ---------------------------------------------------------------------------------

MOST = 4096
"""Largest number of numbers in a part."""
sizes = some.integers(-(2**31), 2**31 - 1)


@pytest.mark.parametrize("name", [*CODECS])
def test_parts(name):
    codec, numbers = CODECS[name](), torch.linspace(-1, 1, 1000)
    true = codec.compress(numbers, CompressionInfo.from_tensor(numbers))

    @often(200)
    @given(
        some.binary(max_size=600) | damaged(true.buffer),
        some.lists(some.sampled_from([0, 1, 1000, MOST, MOST + 1]) | sizes, max_size=3) | some.just([1000]),
        some.just(true.dtype)
        | some.sampled_from(["float64", "int8", "object", "V100000000", ""])
        | some.text(max_size=9),
        some.just(true.compression) | some.sampled_from(runtime_pb2.CompressionType.values()),
    )
    @example(true.buffer, [1000], true.dtype, true.compression)
    def check(buffer, size, dtype, compression):
        try:
            tensor = runtime_pb2.Tensor(buffer=buffer, size=size, dtype=dtype, compression=compression)
        except ValueError:  # protobuf's own bounds
            return
        found = decode(tensor, codec, MOST)
        assert found is None or (found.dtype == torch.float32 and found.numel() <= MOST and found.isfinite().all())

    check()
    assert torch.allclose(decode(true, codec, MOST), codec.extract(true))


# ---- statements that are signed about a round ------------------------------------------------------------------------

STRIPE, ROOT = bytes(16), root_of([bytes(32)])


def proof_of_other_work(judge) -> tuple[GivenWork, bytes]:
    """The code that compares, and a proof that the last of three members gave something else than its list says."""
    given_work = GivenWork(judge, partial(places_in_vector, [SIZE]))
    listed = WorkList("", [Line(0, 100, (1e3,) * NUM_PLACES)]).to_bytes()
    group = group_of((0, 1, 2), work=name_of(listed))
    share = sealed_share((0, 1, 2), judge, group)
    part = given_work.parts(group, share.reducer, liar := group.peer_ids[2])[0]
    given = share.seals[share.reducer].signed_part(liar, part.part_index)
    return given_work, of_other_work(group, part.stripe, part.part_index, share.reducer, given, listed)


@pytest.fixture(scope="module")
def signed():
    """Readers of statements that members sign, with true statements."""
    judge = judge_of()
    share = sealed_share((0, 1, 2), judge)
    shown = share.seals[share.reducer].show(0)
    lie = sealed_share((0, 1, 2), judge, change=lambda mean: -10 * mean)
    false_average = of_a_false_average(lie.group, 0, 0, lie.receipt, lie.seals[lie.reducer].show(0))
    false = Receipt.sign(key(0), share.receipt.stripe, root_of([]), share.receipt.counted)
    same = Receipt.sign(key(0), share.receipt.stripe, ROOT, share.receipt.counted)
    given_work, other_work = proof_of_other_work(judge)
    return {
        "receipt": (Receipt.from_bytes, share.receipt.data),
        "commitment": (
            lambda data: check_commitment(data, peer(0), STRIPE, peer(1), ROOT),
            commit(key(0), STRIPE, peer(1), ROOT),
        ),
        "evidence": (Evidence.from_bytes, shown),
        "two receipts": (lambda data: guilty(data, judge), of_two_receipts(false, same)),
        "false average": (lambda data: guilty(data, judge), false_average),
        "other work": (lambda data: guilty(data, judge, given_work), other_work),
        "content of other work": (
            lambda data: guilty(msgpack.packb(["other work", data]), judge, given_work),
            msgpack.unpackb(other_work)[1],
        ),
    }


SIGNED = ("receipt", "commitment", "evidence", "two receipts", "false average", "other work", "content of other work")


@pytest.mark.parametrize("name", SIGNED)
def test_what_is_signed(signed, name):
    parse, true = signed[name]

    @often(200)
    @given(messages(true))
    def check(data):
        refused(parse, data)

    check()
    assert not refused(parse, true)


@pytest.fixture(scope="module")
def audits():
    """The audits of a member that was in a round with two others."""

    async def nobody(*_):
        raise OSError("nobody answers")

    audits = Audits(peer(0), key(0), judge_of(), nobody, BlameBackoff(), share=0.0)
    audits.begin(group_of((0, 1, 2)))
    audits.end(has_average=True)
    return audits


ASKED = to_wire("part", STRIPE, 0)


@often(200)
@given(messages(ASKED))
@example(ASKED)
def test_what_audits_are_asked(audits, data):
    assert refused(lambda data: asyncio.run(audits.answer(peer(1), data)), data), "that round is not known"


# ---- a state or averages, after their tensors have been read ---------------------------------------------------------


def state() -> SharedState:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    model(torch.ones(3)).sum().backward()
    (optimizer := torch.optim.AdamW(model.parameters())).step()
    return SharedState(model, [optimizer])


STATE = state()
DESCRIPTION, TENSORS = STATE.export(5, bytes(16))
odd_tensors = some.sampled_from(
    [
        torch.tensor(-1.0),
        torch.full((2, 3), torch.nan),
        torch.ones(2, 3, dtype=torch.int64),
        torch.empty(0),
        torch.ones(7),
    ]
)


@often(300)
@given(
    some.lists(some.tuples(some.sampled_from([*DESCRIPTION]), junk), max_size=3),
    some.lists(some.tuples(some.integers(0, len(TENSORS) - 1), odd_tensors), max_size=2),
    some.integers(-1, 1),
)
@example([], [], 0)
def test_states(changes, others, more):
    description, tensors = DESCRIPTION | dict(changes), list(TENSORS)
    for place, tensor in others:
        tensors[place] = tensor
    tensors = tensors[: len(tensors) + min(more, 0)] + tensors[: max(more, 0)]
    description = MSGPackSerializer.loads(MSGPackSerializer.dumps(description))
    if not refused(lambda description: STATE.check(description, tensors), description, RoundFailed):
        STATE.take(description, tensors)
        assert all(tensor.isfinite().all() for tensor in STATE.held()[1])


AVERAGES = [torch.ones(6), torch.arange(3, dtype=torch.int32), torch.ones(3, dtype=torch.float16)]


@often(300)
@given(some.lists(some.sampled_from(AVERAGES) | odd_tensors, max_size=5))
@example(AVERAGES)
def test_averages(tensors):
    if not refused(lambda tensors: list(averages_in(tensors, iter([6] * 9))), tensors):
        assert len(list(averages_in(tensors, iter([6] * 9)))) <= len(tensors)
