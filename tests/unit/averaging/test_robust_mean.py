"""Averages that no single member can carry off. Lies count for little, and honest members count as they are."""

import math

import pytest
import torch

from swarm.averaging.robust_mean import MAX_EXCHANGED, REACH, Combination, capped, median, weighted_mean

CLIP, MEAN = Combination(clips=True), Combination()
SIZE = 5000


def honest(weights, seed: int = 0, signal: float = 1.0) -> list[torch.Tensor]:
    """Means over these numbers of samples: a common part, and noise that is less the more samples there are."""
    generator = torch.Generator().manual_seed(seed)
    common = signal * torch.randn(SIZE, generator=generator) / math.sqrt(SIZE)
    return [common + torch.randn(SIZE, generator=generator) * 10 / math.sqrt(weight * SIZE) for weight in weights]


@pytest.mark.parametrize("weights", [[100.0] * 3, [50.0, 100, 100, 200], [4.0, 100, 100, 100, 100], [1.0] * 20])
def test_honest_members_count_as_they_are_to_the_last_bit(weights):
    """This also holds where one member has far fewer samples, and so far more noise."""
    parts = honest(weights)
    found = CLIP.combine(parts, weights)
    assert found.outside == ()
    assert torch.equal(found.mean, MEAN.combine(parts, weights).mean)
    exact = sum(weight * part.double() for weight, part in zip(weights, parts, strict=True)) / sum(weights)
    torch.testing.assert_close(found.mean.double(), exact, rtol=0, atol=1e-6)


LIES = {
    "reversed": lambda part: -100 * part,
    "noise": lambda part: 1000 * part.norm() * torch.randn(SIZE, generator=torch.Generator().manual_seed(9)),
    "as large as may be": lambda part: torch.full_like(part, 1e24),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(("members", "liars"), [(3, 1), (4, 1), (5, 2), (10, 4)])
def test_liars_move_the_mean_less_than_honest_members_differ(members, liars, lie):
    weights = [100.0] * members
    parts = honest(weights)
    wanted = weighted_mean(parts[liars:], weights[liars:])
    apart = max(float((part - wanted).norm()) for part in parts[liars:])
    lying = [LIES[lie](part) for part in parts[:liars]] + parts[liars:]
    found = CLIP.combine(lying, weights)
    assert set(range(liars)) <= set(found.outside)
    assert (found.mean - wanted).norm() < 1.5 * apart
    assert (MEAN.combine(lying, weights).mean - wanted).norm() > 10 * apart, "the mean is carried off"


def test_a_lie_counts_with_no_more_than_the_usual_distance_and_a_large_one_with_less():
    """Honest members at 0 and ±1 in one number; the rest of the arithmetic by hand."""
    honest_ones = [torch.tensor([value, 0.0]) for value in (-1.0, 0.0, 1.0, 0.0)]
    pushed = []
    for far in (2.5, 10.0, 1000.0):  # the median is (0, 0), and the distances are 1, 0, 1, 0 and this
        found = CLIP.combine([*honest_ones, torch.tensor([0.0, far])], [1.0] * 5)
        assert found.outside == (4,)
        assert found.mean[0] == 0
        center = 0.0
        for _ in range(3):  # the liar pulls by a fifth of 1 x 2 / distance, the others back by what they are away
            center += 0.2 * 2 / (far - center) - 0.8 * center
        assert found.mean[1] == pytest.approx(center, rel=1e-5)
        pushed.append(center)
    assert 0.25 > pushed[0] > pushed[1] > pushed[2] > 0, "the farther away, the less"


def test_between_two_members_nothing_is_clipped():
    parts = [torch.ones(4), torch.full((4,), -100.0)]
    found = CLIP.combine(parts, [1.0, 3.0])
    assert found.outside == ()
    assert torch.equal(found.mean, weighted_mean(parts, [1.0, 3.0]))
    assert torch.equal(CLIP.combine(parts[:1], [5.0]).mean, parts[0])


def test_parts_that_are_all_alike_or_zero_are_what_they_are():
    for part in (torch.zeros(4), torch.tensor([1.0, -2.0, 0.0, 1e-30])):
        found = CLIP.combine([part] * 4, [1.0, 2.0, 4.0, 1.0])
        assert found.outside == ()
        assert torch.equal(found.mean, part)


def test_no_other_member_counts_where_most_agree_to_the_last_bit():
    """The usual distance is 0 then."""
    found = CLIP.combine([torch.ones(4), torch.ones(4), torch.ones(4), torch.full((4,), 7.0)], [1.0] * 4)
    assert found.outside == (3,)
    assert found.mean.tolist() == [1.0] * 4


def test_sparse_parts_are_not_taken_for_lies():
    """`topk` sends such parts: each member sends other numbers, nearly all are 0, and so is the median."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for _ in range(5):
        dense = torch.randn(SIZE, generator=generator)
        parts.append(torch.where(dense.abs() >= dense.abs().topk(150).values[-1], dense, 0.0))
    found = CLIP.combine(parts, [100.0] * 5)
    assert found.outside == ()
    lying = [-100 * parts[0], *parts[1:]]
    assert CLIP.combine(lying, [100.0] * 5).outside == (0,)


def test_a_member_that_has_made_more_local_steps_has_come_farther():
    """One member came twice as far in nearly the same direction, with twice the samples.

    Another one came half a step.
    """
    steps, weights = honest([1000.0] * 5), [200.0, 100.0, 100.0, 100.0, 50.0]
    parts = [2 * steps[0], *steps[1:]]
    local = Combination(clips=True, local_steps=1)
    assert CLIP.combine(parts, weights).outside == (0,)
    found = local.combine(parts, weights)
    assert found.outside == ()
    assert torch.equal(found.mean, weighted_mean(parts, weights))
    liar = local.combine([parts[0], -100 * parts[1], *parts[2:]], weights)
    assert liar.outside == (1,)
    without = weighted_mean([parts[0], *parts[2:]], [200.0, 100.0, 100.0, 50.0])
    assert (liar.mean - without).norm() < 0.3 * without.norm(), "it has as much in it as honest members have made"


def test_a_far_faster_member_has_come_as_far_as_its_samples_say_not_as_its_weight():
    """A GPU beside CPUs: its weight and the distance that it has come are bounded. It is not taken for a liar."""
    steps, samples = honest([1000.0] * 3), [2000.0, 100.0, 100.0]
    parts, local = [20 * steps[0], *steps[1:]], Combination(clips=True, local_steps=30)
    weights = local.weights(samples)
    assert weights[0] < samples[0]
    found = local.combine(parts, weights, samples)
    assert found.outside == ()
    torch.testing.assert_close(found.mean, weighted_mean([2 * steps[0], *steps[1:]], weights))
    assert local.combine(parts, weights).outside == (0,)


@pytest.mark.parametrize("members", [3, 4, 5, 8])
@pytest.mark.parametrize("lie", [-50.0, 16.0])
def test_a_member_that_claims_many_local_steps_makes_no_average_long(members, lie):
    """It claims two updates. What it sends is far away, or looks like that many honest steps."""
    parts, samples = honest([1000.0] * members), [2000.0, *[1000.0 / members] * (members - 1)]
    local = Combination(clips=True, local_steps=16)
    usual = sum(float(part.norm()) for part in parts[1:]) / (members - 1)
    mean = local.combine([lie * parts[0], *parts[1:]], local.weights(samples), samples).mean
    assert mean.norm() < 2.5 * usual


def test_only_the_order_of_members_decides_about_the_last_bits():
    weights = [100.0, 50.0, 70.0, 100.0]
    parts = honest(weights)
    one, other = (CLIP.combine([part.clone() for part in parts], weights).mean for _ in range(2))
    assert torch.equal(one, other)
    lying = [-100 * parts[0], *parts[1:]]
    one, other = (CLIP.combine([part.clone() for part in lying], weights).mean for _ in range(2))
    assert torch.equal(one, other)


@pytest.mark.parametrize("members", [1, 2, 3, 4, 9, MAX_EXCHANGED, MAX_EXCHANGED + 1, MAX_EXCHANGED + 2])
def test_the_median_is_that_of_each_number(members):
    parts = list(torch.randn(members, 50, generator=torch.Generator().manual_seed(members)))
    wanted = torch.stack(parts).double().quantile(0.5, dim=0)
    torch.testing.assert_close(median(parts).double(), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("samples", "counted"),
    [
        ([100, 100, 100], [100, 100, 100]),
        ([10, 10], [10, 10]),
        ([500, 10], [500, 10]),  # of two, 2/2 is all
        ([1024, 100, 100], [400, 100, 100]),
        ([1024, 100, 100, 0, 100], [300, 100, 100, 0, 100]),
        ([1024, 1024, 100, 100, 100, 100], [400, 400, 100, 100, 100, 100]),
        ([0, 0], [0, 0]),
        ([], []),
    ],
)
def test_no_member_counts_for_more_than_two_nths_of_all(samples, counted):
    assert capped(samples) == counted
    assert CLIP.weights(samples) == counted
    assert MEAN.weights(samples) == samples


def test_the_bound_holds_whatever_is_claimed_and_a_smaller_claim_counts_as_it_is():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        samples = torch.randint(0, 2000, (int(torch.randint(3, 12, (), generator=generator)),), generator=generator)
        counted = capped(samples.tolist())
        members = sum(number > 0 for number in counted)
        assert all(number <= 2 / max(1, members) * sum(counted) * (1 + 1e-9) for number in counted)
        most = max(counted)
        assert all(number in (said, most) for number, said in zip(counted, samples.tolist(), strict=True))


@pytest.mark.parametrize("samples", [[8, 16, 24], [8, 16, 1000], [8, 16], [8]])
def test_a_helper_changes_no_weight(samples):
    assert CLIP.weights([0, *samples]) == [0, *CLIP.weights(samples)]


def test_a_member_within_reach_is_not_touched():
    """The bound is where it is said to be."""
    base = [torch.tensor([value, 0.0]) for value in (-1.0, 1.0, -1.0, 1.0)]
    for far, outside in ((0.99 * REACH, ()), (1.01 * REACH, (4,))):
        assert CLIP.combine([*base, torch.tensor([0.0, far])], [1.0] * 5).outside == outside
