"""What rounds show of a peer's line, and how shares follow it."""

import math
from statistics import mean

import pytest
from hivemind.p2p import PeerID

from swarm.averaging.lines.division import divide
from swarm.averaging.lines.line_meter import GROWTH, LEAST_BYTES, SHORT_SECONDS, LineMeter, Waits

PEERS = [PeerID(bytes([number])) for number in range(5)]
MBPS = 125_000
"""Bytes per second."""


def waits_of(told: dict[int, float], seen: dict[int, float] | None = None) -> Waits:
    """Waits in 100 parts: shares in which reducers waited for this peer (`told`), and it for senders (`seen`)."""
    waits = Waits()
    for number in range(100):
        for reducer, fraction in told.items():
            waits.told(PEERS[reducer], number < 100 * fraction)
        for sender, fraction in (seen or {}).items():
            waits.saw(PEERS[sender], number < 100 * fraction)
    return waits


def round_of(
    meter: LineMeter, mbps: float, is_waited_for: bool, seconds: float = 10.0, equal_bytes: float = math.inf
) -> int:
    """The line speed that the meter states after an exchange in which this much was sent."""
    meter.begin()
    for number in (1, 2, 3):
        meter.waits.told(PEERS[number], is_waited_for)
    meter.end(int(mbps * MBPS * seconds), seconds, 4, equal_bytes)
    return meter.kbps


def test_a_line_that_others_wait_for_carries_what_it_has_carried():
    meter = LineMeter()
    assert meter.kbps == 0
    assert round_of(meter, 10, True) == 10_000


def test_an_idle_line_can_carry_more_than_it_has():
    meter = LineMeter()
    assert round_of(meter, 10, False) == 20_000
    assert round_of(meter, 16, False) == 20_000, "the middle of two is the lower one"
    assert round_of(meter, 16, False) == 32_000
    assert round_of(meter, 3, False) == 32_000, "that it has carried less says nothing"


def test_a_line_that_has_shown_its_bounds_goes_beyond_them_only_a_little_at_a_time():
    meter = LineMeter()
    for _ in range(3):
        round_of(meter, 10, True)
    for _ in range(3):
        assert round_of(meter, 5, False) == 10_000
    for _ in range(3):
        found = round_of(meter, 10, False)
    assert found == GROWTH * 10_000


def test_one_bad_round_changes_nothing_and_a_line_that_has_changed_is_followed():
    meter = LineMeter()
    for _ in range(3):
        round_of(meter, 40, True)
    assert round_of(meter, 2, True) == 40_000
    assert round_of(meter, 40, True) == 40_000
    round_of(meter, 10, True)
    assert round_of(meter, 10, True) == 10_000


def test_small_changes_are_not_told():
    meter = LineMeter()
    round_of(meter, 40, True)
    assert [round_of(meter, mbps, True) for mbps in (42, 43, 44, 43, 39, 38)] == [40_000] * 6


def test_few_bytes_show_nothing():
    meter = LineMeter()
    meter.begin()
    meter.end(LEAST_BYTES // 2, 10.0, 4, math.inf)
    assert meter.kbps == 0


def test_a_short_exchange_shows_no_bounds():
    assert round_of(LineMeter(), 10, True, SHORT_SECONDS / 2) == 20_000


def test_fast_lines_say_the_same_whatever_the_first_exchange_has_shown():
    """The first exchange takes long, since processors are busy.

    The others take as long as processors and round trips do.
    """
    vector, meters, first = 3.2e6, [LineMeter() for _ in range(5)], (13, 13, 20, 25, 37)
    for meter, mbps in zip(meters, first, strict=True):
        round_of(meter, mbps, True, 3.0, equal_bytes=1.6 * vector)
    assert len(set(divide(tuple(meter.kbps for meter in meters), (True,) * 5, 5))) > 1
    for _ in range(3):
        shares = divide(tuple(meter.kbps for meter in meters), (True,) * 5, 5)
        for meter, share in zip(meters, shares, strict=True):
            sent = vector * (1 + 3 * share / sum(shares))
            round_of(meter, sent / MBPS / 1.5, True, 1.5, equal_bytes=1.6 * vector)
    assert divide(tuple(meter.kbps for meter in meters), (True,) * 5, 5) == (1,) * 5


def test_a_round_that_lost_a_member_tells_of_a_line_only_if_the_line_was_in_the_way():
    """A peer with a share far too large for its line may never see the end of a round."""
    for is_waited_for, kbps in ((False, 0), (True, 10_000)):
        meter = LineMeter()
        meter.begin()
        meter.waits.told(PEERS[1], is_waited_for)
        meter.end(10 * MBPS * 10, 10.0, 4, math.inf, is_whole=False)
        assert meter.kbps == kbps


def test_a_peer_says_no_more_than_it_may_send():
    meter = LineMeter(most_kbps=15_000.0)
    assert round_of(meter, 10, False) == 15_000


@pytest.mark.parametrize(
    ("told", "seen", "num_members", "was_for_me"),
    [
        ({}, {}, 4, False),
        ({1: 0.9, 2: 0.8, 3: 0.95}, {1: 0.05, 2: 0.05, 3: 0.0}, 4, True),
        ({1: 0.0, 2: 0.02, 3: 0.01}, {1: 0.9, 2: 0.0, 3: 0.05}, 4, False),  # the first one is slow
        ({1: 0.3, 2: 0.35, 3: 0.3}, {1: 0.3, 2: 0.35, 3: 0.3}, 4, True),  # all are alike
        ({1: 1.0, 2: 0.02, 3: 0.01}, {1: 0.1, 2: 0.1, 3: 0.1}, 4, False),  # the first one lies, or is slow itself
        ({1: 0.9, 2: 0.9}, {}, 4, True),  # this peer reduces nothing, since it is slow
        ({1: 0.33}, {1: 0.95, 2: 0.0, 3: 0.0}, 4, False),  # all wait for the other of two reducers
        ({1: 0.95}, {1: 0.33, 2: 0.3, 3: 0.3}, 4, True),
        ({1: 0.9}, {1: 0.9}, 2, True),
    ],
)
def test_a_meter_tells_whether_all_members_wait_for_this_line(told, seen, num_members, was_for_me):
    assert waits_of(told, seen).were_for_me(num_members) == was_for_me


# ---- together ------------------------------------------------------------------------------------------------------


class ModelSwarm:
    """Members whose exchanges take as long as the slowest line needs to send what its share requires.

    Args:
        lines: lines of the members that can be called, in Mbit/s
        num_members: number of all members
    """

    VECTOR = 10e6

    def __init__(self, lines: list[float], num_members: int):
        self.lines, self._num_members = lines, num_members
        self._meters = [LineMeter() for _ in lines]

    def round(self) -> float:
        """Run one exchange and return its seconds."""
        shares = divide(tuple(meter.kbps for meter in self._meters), (True,) * len(self.lines), self._num_members)
        sent = [self.VECTOR * (1 + share / sum(shares) * (self._num_members - 2)) for share in shares]
        needed = [num_bytes / (line * MBPS) for num_bytes, line in zip(sent, self.lines, strict=True)]
        seconds = max(needed)
        for meter, num_bytes, own in zip(self._meters, sent, needed, strict=True):
            meter.begin()
            meter.waits.told(PEERS[0], own > 0.95 * seconds)
            equal_bytes = self.VECTOR * (1 + (self._num_members - 2) / len(self.lines))
            meter.end(int(num_bytes), seconds, self._num_members, equal_bytes)
        return seconds

    def best(self, with_equal_shares: bool = False) -> float:
        """Seconds of an exchange with these shares, if all lines were known."""
        told = tuple(int(1000 * line) for line in self.lines)
        shares = (1,) * len(told) if with_equal_shares else divide(told, (True,) * len(told), self._num_members)
        vectors = [1 + share / sum(shares) * (self._num_members - 2) for share in shares]
        return max(self.VECTOR * sent / (line * MBPS) for sent, line in zip(vectors, self.lines, strict=True))


@pytest.mark.parametrize(
    ("lines", "num_members"),
    [
        ([10, 40, 50, 500], 4),
        ([10, 100, 100, 100], 8),
        ([10, 100], 6),
        ([10, 14, 18, 22], 4),
        ([20, 20, 20, 20, 20], 5),
        ([10, 30, 30, 30, 90, 90, 200, 500], 20),
    ],
)
def test_after_some_rounds_exchanges_take_little_longer_than_if_all_lines_were_known(lines, num_members):
    swarm = ModelSwarm(lines, num_members)
    seconds = [swarm.round() for _ in range(40)]
    assert seconds[0] == pytest.approx(swarm.best(with_equal_shares=True))
    assert mean(seconds[10:]) < 1.1 * swarm.best()
    assert max(seconds) < 1.3 * seconds[0]


def test_shares_follow_a_line_that_becomes_slow_and_one_that_becomes_fast():
    swarm = ModelSwarm([100, 100, 100, 100], 8)
    for _ in range(5):
        swarm.round()
    swarm.lines = [10, 100, 100, 100]
    seconds = [swarm.round() for _ in range(12)]
    assert mean(seconds[5:]) < 1.1 * swarm.best()
    swarm.lines = [400, 100, 100, 100]
    seconds = [swarm.round() for _ in range(40)]
    assert mean(seconds[20:]) < 1.1 * swarm.best()
