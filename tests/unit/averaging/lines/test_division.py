"""Shares by lines: all members compute the same division from their tickets, and no member gets more than the bound."""

import random
from fractions import Fraction

import pytest
import torch
from hivemind.p2p import PeerID
from hypothesis import given
from hypothesis import strategies as some

from swarm.averaging.compression.codec import CODECS
from swarm.averaging.lines.division import WHOLE, divide, fractions_of, shares_of
from swarm.averaging.shares import count_stripes, partition, stripe_of
from swarm.protocol.messages import MAX_LINE_KBPS, Group, Ticket
from swarm.protocol.wire import LINEAGE_BYTES

lines = some.one_of(some.integers(0, MAX_LINE_KBPS), some.sampled_from([0, 1, 2, 10_000, 10_001, MAX_LINE_KBPS]))


@some.composite
def swarms(draw):
    """Lines of the members that can be called, whether each has samples, and the number of all members."""
    members = draw(some.lists(some.tuples(lines, some.booleans()), min_size=1, max_size=64))
    return *zip(*members, strict=True), len(members) + draw(some.integers(0, 20))


def seconds_of(line: int, share: Fraction, has_samples: bool, num_members: int) -> Fraction:
    """Seconds that a member needs to send its part of an exchange, for a vector of one unit."""
    sent = share * (num_members - 1) + (1 - share) * has_samples
    return sent / line


@given(swarms())
def test_shares_add_up_and_no_member_gets_too_much(swarm):
    shares, k = divide(*swarm), len(swarm[0])
    assert len(shares) == k
    assert min(shares) >= 0
    assert sum(shares) == WHOLE or shares == (1,) * k
    assert k == 1 or max(shares) * (k + 1) <= 2 * sum(shares)
    assert divide.__wrapped__(*swarm) == shares


@given(swarms(), some.randoms())
def test_the_faster_line_never_gets_less(swarm, rng):
    of_lines, gives, num_members = swarm
    shares = divide(of_lines, (True,) * len(gives), num_members)
    known = [(line, share) for line, share in zip(of_lines, shares, strict=True) if line]
    assert all(more >= less for line, more in known for other, less in known if line > other)
    if len(known) == len(shares):  # otherwise the middle line may be another one
        place = rng.randrange(len(shares))
        faster = [*of_lines]
        faster[place] = min(MAX_LINE_KBPS, 2 * faster[place])
        grown = divide(tuple(faster), (True,) * len(gives), num_members)
        assert grown[place] / sum(grown) >= shares[place] / sum(shares) - 1 / WHOLE


@given(swarms())
def test_no_number_moved_to_another_member_ends_the_round_earlier(swarm):
    """All members that have a share, and are not at the bound, end at the same time.

    The others could not end sooner.
    """
    of_lines, gives, num_members = swarm
    of_lines = tuple(line or 7 for line in of_lines)
    shares = divide(of_lines, gives, num_members)
    if sum(shares) != WHOLE:
        return
    most, step = 2 * WHOLE // (len(shares) + 1), Fraction(2, WHOLE)
    members = [*zip(of_lines, (Fraction(share, WHOLE) for share in shares), gives, strict=True)]
    last = max(seconds_of(line, share - step, has, num_members) for line, share, has in members if share > step)
    for line, share, has in members:
        if share * WHOLE < most - 1:
            assert seconds_of(line, share + step, has, num_members) >= last


def test_shares_are_equal_as_long_as_no_line_is_known_or_all_are_alike():
    for of_lines in ((0,) * 5, (10_000,) * 5, (10_000, 0, 0, 10_000, 0)):
        assert divide(of_lines, (True,) * 5, 8) == (1,) * 5
    assert divide((0, 0), (True, False), 3) == (1, 1)
    assert divide((1, 10**6), (True, True), 2) == (1, 1), "of two, each sends one vector anyhow"


def test_shares_stay_equal_where_others_save_next_to_nothing():
    assert divide((100, 105, 110, 95), (True,) * 4, 4) == (1,) * 4
    slower = divide((100, 105, 110, 80), (True,) * 4, 4)
    assert slower[3] < min(slower[:3])


def test_a_line_that_is_not_known_counts_as_the_middle_one():
    assert divide((10, 0, 40, 50, 500), (True,) * 5, 5) == divide((10, 40, 40, 50, 500), (True,) * 5, 5)


@pytest.mark.parametrize(
    ("of_lines", "num_members", "expected", "times_faster"),
    [
        # Of eight members, four can be called, and one of these has a slow line: 2.5 vectors before, and 1 now.
        ((10_000, 100_000, 100_000, 100_000), 8, (0, 1 / 3, 1 / 3, 1 / 3), 2.5),
        # Four home lines.
        ((10_000, 40_000, 50_000, 500_000), 4, (0, 0.211, 0.389, 0.4), 1.5),
        # Of two members that can be called, one gets two thirds at most.
        ((10_000, 100_000), 6, (1 / 3, 2 / 3), 9 / 7),
    ],
)
def test_a_slow_line_reduces_little_or_nothing(of_lines, num_members, expected, times_faster):
    shares = [share / WHOLE for share in divide(of_lines, (True,) * len(of_lines), num_members)]
    assert shares == pytest.approx(expected, abs=0.001)
    equal = max(seconds_of(line, Fraction(1, len(shares)), True, num_members) for line in of_lines)
    now = max(seconds_of(line, share, True, num_members) for line, share in zip(of_lines, shares, strict=True))
    assert equal / now == pytest.approx(times_faster, rel=0.01)


def test_a_member_without_samples_reduces_more_for_the_same_line():
    helper, *others = divide((100, 10, 100, 100, 100), (False, True, True, True, True), 8)
    assert [helper / WHOLE, *(share / WHOLE for share in others)] == pytest.approx(
        [1 / 3, 0, 2 / 9, 2 / 9, 2 / 9], abs=0.001
    )


def test_one_liar_of_three_members_gets_half_and_three_of_nine_get_three_fifths():
    assert divide((MAX_LINE_KBPS, 10, 10), (True,) * 3, 20)[0] == WHOLE // 2
    shares = divide((MAX_LINE_KBPS,) * 3 + (10,) * 6, (True,) * 9, 9)
    assert max(shares) <= WHOLE // 5
    assert sum(shares[:3]) <= 3 * WHOLE // 5


# ---- of a group ----------------------------------------------------------------------------------------------------


def group_of(*members: tuple[int, bool, int]) -> Group:
    """A group of members, each given as line, whether it cannot be called, and samples."""
    peers = tuple(PeerID(bytes([number])) for number in range(len(members)))
    lineage = bytes(LINEAGE_BYTES)
    tickets = tuple(Ticket(3, samples, mode, 1.0, lineage, line_kbps=line) for line, mode, samples in members)
    return Group(bytes(16), peers, tickets)


def test_a_member_that_cannot_be_called_has_no_share_and_its_line_does_not_matter():
    group = group_of((10, False, 8), (0, True, 8), (100, False, 8), (10**6, True, 8), (100, False, 0))
    shares = shares_of(group)
    assert [*shares] == [group.peer_ids[place] for place in (0, 2, 4)]
    assert [*shares.values()] == [*divide((10, 100, 100), (True, True, False), 5)]
    fractions = fractions_of(group)
    assert sum(fractions.values()) == pytest.approx(1)
    assert fractions[group.peer_ids[1]] == 0


def test_a_stripe_is_divided_as_the_whole():
    group = group_of((10, False, 8), (100, False, 8), (100, False, 8))
    assert shares_of(stripe_of(group, 0, 3)) == shares_of(group)


@pytest.mark.parametrize("size", [1, 2, 7, 100_003])
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_each_number_has_one_place_whatever_the_lines_are(size, codec):
    rng, vector = random.Random(size), torch.arange(float(size))
    for _ in range(20):
        group = group_of(*((rng.choice([0, 1, 50, 10**6]), rng.random() < 0.3, 8) for _ in range(rng.randint(2, 9))))
        group = group_of((rng.choice([0, 20]), False, 8), *((t.line_kbps, t.client_mode, 8) for t in group.tickets))
        coder, shares = CODECS[codec](), shares_of(group)
        found = partition(vector, group, count_stripes(group, vector, coder), coder, is_sealed=True)
        parts = [part for parts in found.values() for part in parts if not part.is_seal]
        assert torch.equal(torch.cat([part.numbers for part in parts]), vector)
        for peer, share in shares.items():
            numbers = sum(len(part.numbers) for part in found[peer])
            assert abs(numbers - size * share / sum(shares.values())) < 1
            assert [part.is_seal for part in found[peer]].count(True) == (numbers > 0), "no seal without a part"
