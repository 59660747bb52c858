"""`Judge`: whether an average can come of what its reducer was given."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hivemind.compression import CompressionInfo
from hivemind.proto import runtime_pb2

from swarm.averaging.audit.judge import Evidence, OtherOrders, can_be_judged, is_faithful
from swarm.averaging.compression.codec import CODECS
from swarm.averaging.compression.fragments import Fragments
from swarm.averaging.robust_mean import Combination
from swarm.protocol.auto_mode import MODES, Pace, Plan
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.messages import Group
from tests.helpers.attacks.sealed_rounds import SIZE, group_of, judge_of, peer, sealed_share

MEMBERS = (0, 1, 2, 3)
LIES = {
    "scaled": lambda mean: -10 * mean,
    "reversed": lambda mean: -mean,
    "noise": lambda mean: torch.randn_like(mean) * mean.norm() / len(mean) ** 0.5,
    "a sixth longer": lambda mean: mean * 7 / 6,
}


def verdicts(share, judge) -> set[bool]:
    seals, found = share.seals[share.reducer], set()
    for index in range(share.seals[share.group.peer_ids[1]].num_averages(share.reducer)):
        evidence = Evidence.from_bytes(seals.show(index))
        judge.check_commitments(share.group, share.receipt, evidence)
        found.add(judge.is_false(share.group, 0, index, share.receipt, evidence))
    return found


@pytest.mark.parametrize("codec", ["none", "fp16", "int8"])
@pytest.mark.parametrize("local_steps", [0, 16])
def test_an_honest_average_is_none_that_is_false(codec, local_steps):
    judge = judge_of(codec, Combination(clips=True, local_steps=local_steps))
    assert verdicts(sealed_share(MEMBERS, judge), judge) == {False}


@pytest.mark.parametrize("codec", ["none", "fp16", "int8", "int4"])
def test_evidence_takes_no_more_than_members_expect(codec):
    share = sealed_share(MEMBERS, judge := judge_of(codec))
    expected = judge.evidence_bytes(share.group, share.reducer, 0)
    num_bytes = len(share.seals[share.reducer].show(0))
    assert expected / 2 < num_bytes <= expected


def test_an_average_of_buffers_is_made_again_without_regard_to_local_steps():
    """One member has four times the samples; all hold the same running statistics."""
    judge = replace(judge_of("fp16", Combination(clips=True, local_steps=16)), num_buffers=SIZE // 2)
    group = group_of(MEMBERS)
    tickets = (replace(group.tickets[0], samples=400), *group.tickets[1:])
    group = replace(group, tickets=tickets)

    def gradients(place: int, size: int) -> torch.Tensor:
        return torch.cat([torch.full((size // 2,), float(1 + 3 * (place == 0))), torch.full((size // 2,), 0.5)])

    for reducer in (group.peer_ids[0], group.peer_ids[-1]):
        assert verdicts(sealed_share(MEMBERS, judge, group, reducer, gradients=gradients), judge) == {False}


@pytest.mark.parametrize(("step", "is_known"), [(1, True), (2, False)])
def test_a_fragment_is_judged_by_its_own_size(step, is_known):
    """The fragment of every second step has as many numbers as the share."""
    fragments = Fragments.of([SIZE + 1000, SIZE], 2)
    judge = replace(judge_of(), size_at=fragments.size_at)
    group = group_of(MEMBERS)
    group = replace(group, tickets=tuple(replace(ticket, step=step) for ticket in group.tickets))
    share = sealed_share(MEMBERS, judge, group)
    with nullcontext() if is_known else pytest.raises(ValueError, match="a part that no reducer takes"):
        assert verdicts(share, judge) == {False}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("codec", ["none", "fp16", "int8"])
def test_a_false_average_is_found(codec, lie):
    judge = judge_of(codec)
    assert verdicts(sealed_share(MEMBERS, judge, change=LIES[lie]), judge) == {True}


@pytest.mark.parametrize("lie", ["scaled", "reversed"])
def test_int4_hides_no_reversed_average(lie):
    judge = judge_of("int4")
    assert verdicts(sealed_share(MEMBERS, judge), judge) == {False}
    assert verdicts(sealed_share(MEMBERS, judge, change=LIES[lie]), judge) == {True}


def test_nothing_is_said_of_a_codec_that_leaves_out_most():
    assert not can_be_judged(CODECS["topk"]())
    assert all(can_be_judged(CODECS[name]()) for name in ("none", "fp16", "int8", "int4"))


def test_a_member_that_was_lost_counts_as_far_as_it_came():
    judge = judge_of()
    lost = sorted((peer(number) for number in MEMBERS), key=lambda one: one.to_bytes())[2]
    share = sealed_share(MEMBERS, judge, lost={lost: 1})
    assert verdicts(share, judge) == {False}


@pytest.mark.parametrize("scale", [1e-30, 1e-9, 1e-7, 1e6, 1e20])
@pytest.mark.parametrize("codec", ["fp16", "int8", "int4"])
def test_numbers_that_a_codec_cannot_hold_are_held_against_no_reducer(codec, scale):
    judge = judge_of(codec)
    share = sealed_share(MEMBERS, judge, gradients=lambda place, size: scale * torch.randn(size))
    assert verdicts(share, judge) == {False}


def at_the_edge(scale: float):
    """Gradients of which one is `scale` times as far from the others as they are from each other."""

    def gradients(place: int, size: int) -> torch.Tensor:
        numbers = torch.zeros(size)
        numbers[place :: len(MEMBERS)] = scale if place == 3 else 1.0
        return numbers

    return gradients


def counts_in_full(judge, scale: float) -> bool:
    parts = [at_the_edge(scale)(place, 4096) for place in range(len(MEMBERS))]
    return float(judge.rule.combine(parts, [100.0] * len(MEMBERS)).mean[3]) > 0.9 * scale / len(MEMBERS)


def largest_within_reach(judge) -> float:
    low, high = 1.0, 10.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if counts_in_full(judge, middle) else (low, middle)
    assert counts_in_full(judge, low)
    assert not counts_in_full(judge, high)
    return low


def test_a_member_at_the_edge_of_reach_is_held_against_no_reducer():
    """Rounding decides whether it counts in full: another processor may find the opposite."""
    judge = judge_of("none")
    low, averages = largest_within_reach(judge), set()
    for change in (-5e-4, 5e-4):
        made_by = replace(judge, rule=replace(judge.rule, reach=judge.rule.reach * (1 + change)))
        share = sealed_share(MEMBERS, made_by, gradients=at_the_edge(low))
        averages.add(share.receipt.averages)
        assert verdicts(share, judge) == {False}
    assert len(averages) == 2, "it counts in full in one of them"


@pytest.mark.parametrize(("counts", "is_false"), [(0.9, False), (1.5, True), (0.0, True), (-0.5, True)])
def test_a_member_at_the_edge_of_reach_excuses_no_lie(counts, is_false):
    """A reducer chooses its own part after it has seen the others'. Such a part must not excuse a false average.

    `counts` is how much of its part the member at the edge counts for in the average that the reducer makes up.
    """
    judge = judge_of("none")

    def lie(mean: torch.Tensor) -> torch.Tensor:
        mean = mean.clone()
        mean[3 :: len(MEMBERS)] *= counts
        return mean

    share = sealed_share(MEMBERS, judge, change=lie, gradients=at_the_edge(largest_within_reach(judge)))
    assert verdicts(share, judge) == {is_false}


def test_a_remainder_of_earlier_averages_may_come_with_a_later_one():
    judge = judge_of("fp16")
    assert verdicts(sealed_share(MEMBERS, judge, change=lambda mean: mean * 1.03), judge) == {False}


@pytest.mark.parametrize("codec", ["fp16", "int8", "int4"])
def test_an_honest_reducers_average_is_never_false_whatever_it_has_left_out_before(codec):
    """With a remainder added, half of the tolerance is left. Without one, an average is always faithful."""
    codec, info = CODECS[codec](), CompressionInfo.from_tensor(torch.zeros(1))
    for seed in range(40):
        torch.manual_seed(seed)
        mean = torch.randn(5000) * 10.0 ** float(torch.randint(-9, 5, ()))
        assert is_faithful(codec.extract(codec.compress(mean, info)), mean, codec, info)
        assert mean.norm() < 1e-3 or not is_faithful(-mean, mean, codec, info), "fp16 holds no smaller numbers"


def changed(evidence: Evidence, member: int, **what) -> Evidence:
    hashes, commitment, part = evidence.inputs[member]
    given = {"hashes": hashes, "commitment": commitment, "part": part} | what
    inputs = list(evidence.inputs)
    inputs[member] = tuple(given.values())
    return replace(evidence, inputs=inputs)


def test_an_accuser_can_change_nothing():
    """A change would prove an honest reducer guilty."""
    judge = judge_of()
    share = sealed_share(MEMBERS, judge)
    evidence = Evidence.from_bytes(share.seals[share.reducer].show(0))
    false = runtime_pb2.Tensor()
    false.CopyFrom(evidence.inputs[1][2])
    false.buffer = (-torch.ones(len(false.buffer) // 2, dtype=torch.float16)).numpy().tobytes()
    hashes = evidence.inputs[1][0]
    forgeries = [
        changed(evidence, 1, part=false),
        changed(evidence, 1, part=None),
        changed(evidence, 1, hashes=hashes[:-1]),
        changed(evidence, 1, hashes=[*reversed(hashes)]),
        replace(evidence, average=false),
        replace(evidence, averages=[*reversed(evidence.averages)]),
        replace(evidence, inputs=evidence.inputs[:-1]),
        replace(evidence, inputs=[*reversed(evidence.inputs)]),
    ]
    for forged in forgeries:
        with pytest.raises(ValueError, match=r"another|other|signed|read"):
            judge.is_false(share.group, 0, 0, share.receipt, forged)


@pytest.mark.parametrize(
    "group", [group_of(MEMBERS, samples=1), group_of(MEMBERS, name=bytes([1] * 16)), group_of(MEMBERS[:3])]
)
def test_another_group_proves_nothing(group):
    """With other weights an honest average would be a false one."""
    judge = judge_of()
    share = sealed_share(MEMBERS, judge)
    evidence = Evidence.from_bytes(share.seals[share.reducer].show(0))
    with pytest.raises(ValueError, match=r"another|other|signed|read"):
        judge.is_false(group, 0, 0, share.receipt, evidence)


@pytest.mark.parametrize(("stripe", "index"), [(1, 0), (0, 1), (0, SIZE)])
def test_another_place_proves_nothing(stripe, index):
    judge = judge_of()
    share = sealed_share(MEMBERS, judge)
    evidence = Evidence.from_bytes(share.seals[share.reducer].show(0))
    with pytest.raises(ValueError, match=r"another|other|signed|read"):
        judge.is_false(share.group, stripe, index, share.receipt, evidence)


def test_a_reducer_that_does_not_show_what_members_signed_is_noticed():
    judge = judge_of()
    share = sealed_share(MEMBERS, judge)
    evidence = Evidence.from_bytes(share.seals[share.reducer].show(0))
    sender = next(place for place, member in enumerate(share.group.peer_ids) if member != share.reducer)
    with pytest.raises(ValueError, match=r"another|other|signed|read"):
        judge.check_commitments(share.group, share.receipt, changed(evidence, sender, commitment=b""))


def test_no_reducer_is_judged_by_an_order_that_has_come_after_the_round():
    """A smaller batch bounds the weights of the members. By it, another average would have been right."""
    group, judge = group_of(MEMBERS), judge_of()
    tickets = [
        replace(ticket, samples=number) for ticket, number in zip(group.tickets, (400, 100, 60, 30), strict=True)
    ]
    share = sealed_share(MEMBERS, judge, Group.close(bytes(16), group.peer_ids, tuple(tickets)))
    assert verdicts(share, judge) == {False}
    smaller = replace(judge, target_at=lambda step: BatchTarget(32))
    assert verdicts(share, smaller) == {True}, "so it has to be known that the order is another one"
    with pytest.raises(OtherOrders):
        verdicts(share, replace(smaller, orders_at=lambda step: b"another."))


@pytest.mark.parametrize("mode", [1, 2], ids=["int8", "four local steps in float32"])
def test_with_averaging_auto_a_round_is_judged_in_the_mode_of_its_group(mode):
    """Whatever the judge itself follows now, the tickets name codec, local steps and target."""
    closed = group_of(MEMBERS)
    tickets = tuple(replace(ticket, pace=Pace(Plan(mode, 0, 1, 1))) for ticket in closed.tickets)
    group = Group.close(closed.nonce, closed.peer_ids, tuple(replace(ticket, step=5) for ticket in tickets))
    judge = replace(judge_of("fp16"), auto=True)
    of_group = judge.of(group)
    assert of_group.rule.local_steps == MODES[mode].local_steps
    assert of_group.target_at(5).samples == judge.target_at(5).samples * MODES[mode].local_steps
    assert verdicts(sealed_share(MEMBERS, of_group, group), judge) == {False}
    assert verdicts(sealed_share(MEMBERS, of_group, group, change=LIES["reversed"]), judge) == {True}
