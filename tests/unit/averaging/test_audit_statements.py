"""Statements that members sign in a round whose averages are checked. They are read as statements of a stranger."""

import msgpack
import pytest
from hivemind.proto import runtime_pb2

from swarm.averaging.audit.seals import seal_with
from swarm.averaging.audit.statements import (
    MAX_RECEIPT_BYTES,
    Counted,
    Receipt,
    check_commitment,
    commit,
    hash_of,
    root_of,
)
from tests.helpers.attacks.sealed_rounds import judge_of, key, peer, sealed_share

STRIPE, ROOT = bytes(16), root_of([bytes(32)])


COUNTED = (Counted(2, ROOT, True), Counted())


def receipt(number=0, averages=ROOT, counted=COUNTED):
    return Receipt.sign(key(number), STRIPE, averages, counted)


def test_a_receipt_says_which_peer_signed_which_content():
    read = Receipt.from_bytes(receipt().data)
    assert read == Receipt(STRIPE, ROOT, COUNTED, peer(0), read.data)


def test_a_commitment_is_for_one_sender_stripe_reducer_and_content():
    signed = commit(key(0), STRIPE, peer(1), ROOT)
    check_commitment(signed, peer(0), STRIPE, peer(1), ROOT)
    others = [
        (peer(2), STRIPE, peer(1), ROOT),
        (peer(0), bytes([1] * 16), peer(1), ROOT),
        (peer(0), STRIPE, peer(2), ROOT),
        (peer(0), STRIPE, peer(1), root_of([])),
    ]
    for other in others:
        with pytest.raises(ValueError, match="signed"):
            check_commitment(signed, *other)


@pytest.mark.parametrize("field", range(5))
def test_nothing_in_a_receipt_can_be_changed(field):
    fields = msgpack.unpackb(receipt().data)
    other = msgpack.unpackb(receipt(1, root_of([]), (Counted(3, ROOT, True), Counted())).data)
    other[0] = bytes([1] * 16)
    fields[field] = other[field]
    with pytest.raises(ValueError, match="signed"):
        Receipt.from_bytes(msgpack.packb(fields))


def test_two_receipts_contradict_each_other_only_about_one_share_of_one_reducer():
    assert receipt().contradicts(receipt(averages=root_of([])))
    assert receipt().contradicts(receipt(counted=(Counted(1, ROOT, True), Counted())))
    assert not receipt().contradicts(receipt()), "signed twice, which gives other signatures"
    assert not receipt().contradicts(receipt(1, averages=root_of([]))), "another reducer"


def test_a_hash_is_over_all_that_decoding_depends_on():
    tensor = runtime_pb2.Tensor(buffer=b"12345678", size=[2], dtype="float32")
    changed = [{"buffer": b"12345679"}, {"size": [1]}, {"dtype": "float64"}, {"compression": 1}]
    hashes = {hash_of(tensor)}
    for change in changed:
        other = runtime_pb2.Tensor(buffer=b"12345678", size=[2], dtype="float32")
        other.MergeFrom(runtime_pb2.Tensor(**change))
        if "size" in change:
            other.size[:] = change["size"]
        hashes.add(hash_of(other))
    assert len(hashes) == 1 + len(changed)


def test_messages_are_bounded():
    with pytest.raises(ValueError, match="at most"):
        Receipt.from_bytes(bytes(MAX_RECEIPT_BYTES + 1))


# ---- what each member looks at when a share is over ------------------------------------------------------------------


def test_a_sender_that_signs_for_other_parts_than_it_gave_is_refused():
    share = sealed_share((0, 1, 2), judge_of())
    sender, reducer = share.group.peer_ids[1], share.reducer
    true = share.seals[sender].commitment(reducer)
    share.seals[reducer].take_commitment(sender, true)
    share.seals[sender].sent(reducer, 10**6, runtime_pb2.Tensor(buffer=b"one more"))
    with pytest.raises(ValueError, match="signed"):
        share.seals[reducer].take_commitment(sender, share.seals[sender].commitment(reducer))
    with pytest.raises(ValueError, match="signed"):
        share.seals[reducer].take_commitment(share.group.peer_ids[2], true)


def receipts_for(share):
    """Receipts of the reducer, each with one thing that is false, and the answer of a member to it."""
    true, place = share.receipt, 1
    own = true.counted[place]
    without = [*true.counted]
    number = next(number for number in range(3) if peer(number) == share.reducer)
    lies = {
        "another share": (bytes([9] * 16), true.averages, true.counted),
        "other averages": (true.stripe, root_of([]), true.counted),
        "another group": (true.stripe, true.averages, true.counted[:-1]),
    }
    for name, counted in {
        "that it was lost": Counted(own.num_parts - 1, own.root, own.is_signed),
        "that it gave something else": Counted(own.num_parts, root_of([]), own.is_signed),
        "that it signed nothing": Counted(own.num_parts, own.root),
        "that it gave nothing": Counted(),
    }.items():
        without[place] = counted
        lies[name] = (true.stripe, true.averages, tuple(without))
    return {name: Receipt.sign(key(number), *said) for name, said in lies.items()}


def test_a_member_accepts_no_receipt_that_differs_from_what_it_gave_and_got():
    share = sealed_share((0, 1, 2), judge_of())
    member = share.seals[share.group.peer_ids[1]]
    member.check_receipt(share.reducer, seal_with(share.receipt.data))
    for name, false in receipts_for(share).items():
        with pytest.raises(ValueError, match=r"a receipt (of|for) (an)?other"):
            member.check_receipt(share.reducer, seal_with(false.data))
        assert member.receipts[share.reducer] == share.receipt, name
    foreign = Receipt.sign(key(7), share.receipt.stripe, share.receipt.averages, share.receipt.counted)
    with pytest.raises(ValueError, match="another share"):
        member.check_receipt(share.reducer, seal_with(foreign.data))


def test_a_reducer_shows_only_parts_that_it_has_averaged():
    share = sealed_share((0, 1, 2), judge_of())
    with pytest.raises(ValueError, match="no such part"):
        share.seals[share.reducer].show(10**4)
    with pytest.raises(ValueError, match="no such part"):
        share.seals[share.group.peer_ids[1]].show(0)
