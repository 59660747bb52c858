"""The number of bytes of a download on their way: the line is full, and other users of it wait for little."""

import heapq
from itertools import count

import pytest

from swarm.state_sync.download_messages import PIECE_BYTES
from swarm.state_sync.download_window import MAX_WINDOW_BYTES, Window


class LineOf:
    """A line with a queue in front of it, in virtual time, and a download over it.

    Args:
        rate: bytes per second
        round_trip: seconds, without a queue
    """

    def __init__(self, rate: float, round_trip: float):
        self.rate, self.round_trip, self.now = rate, round_trip, 0.0
        self.window = Window(PIECE_BYTES, clock=lambda: self.now)
        self.free_at, self.on_their_way, self.num_bytes = 0.0, 0, 0
        self.queued: list[tuple[float, float]] = []
        """(when, seconds that a byte of another user would have waited)."""
        self._coming: list[tuple[float, float]] = []

    def run(self, until: float, others: float = 0.0) -> None:
        """Let time pass.

        Args:
            others: bytes per second that other users send meanwhile, before anything of this download
        """
        while self.now < until:
            while self.window.has_room(self.on_their_way):
                begins = max(self.now + self.round_trip / 2, self.free_at)
                self.free_at = begins + PIECE_BYTES / (self.rate - others)
                heapq.heappush(self._coming, (self.free_at + self.round_trip / 2, self.now))
                self.on_their_way += PIECE_BYTES
            self.queued.append((self.now, max(0.0, self.free_at - self.now - self.round_trip / 2)))
            self.now, asked_at = heapq.heappop(self._coming)
            self.on_their_way -= PIECE_BYTES
            self.num_bytes += PIECE_BYTES
            self.window.arrived(self.now - asked_at, PIECE_BYTES)


MBIT = 125_000.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "round_trip"),
    [(10 * MBIT, 0.03), (10 * MBIT, 0.2), (100 * MBIT, 0.1), (100 * MBIT, 0.2), (2 * MBIT, 0.05), (1000 * MBIT, 0.002)],
    ids=str,
)
def test_the_line_is_full_and_the_queue_short(rate, round_trip):
    line = LineOf(rate, round_trip)
    line.run(until=20.0)
    before = line.num_bytes
    line.run(until=50.0)
    assert line.num_bytes - before > 0.9 * 30 * rate
    piece_seconds = PIECE_BYTES / rate
    longest = max(seconds for _, seconds in line.queued)
    assert longest < 0.35 + 3 * piece_seconds, "also while it was tried out how much the line carries"
    assert max(seconds for when, seconds in line.queued if when > 20) < 0.2 + 3 * piece_seconds


def test_a_long_fast_line_is_filled_within_some_round_trips():
    line = LineOf(100 * MBIT, 0.1)
    line.run(until=3.5)
    assert line.num_bytes > 32e6 * 0.9


def test_a_download_yields_to_others_and_comes_back():
    line = LineOf(10 * MBIT, 0.05)
    line.run(until=20.0)
    before = line.window.size_bytes
    line.run(until=60.0, others=0.9 * 10 * MBIT)
    assert max(seconds for when, seconds in line.queued if when > 50) < 0.2 + 2 * PIECE_BYTES / MBIT
    assert line.window.size_bytes < before
    line.run(until=70.0)
    during = line.num_bytes
    line.run(until=80.0)
    assert line.num_bytes - during > 0.8 * 10 * 10 * MBIT


def test_one_piece_may_always_be_on_its_way_and_never_too_many():
    seconds = count()
    window = Window(PIECE_BYTES, clock=lambda: next(seconds))
    window.arrived(0.01, PIECE_BYTES)
    for _ in range(50):
        window.arrived(0.5, PIECE_BYTES)
    assert window.has_room(0)
    assert not window.has_room(PIECE_BYTES)
    window = Window(PIECE_BYTES, clock=lambda: 0.0)
    for _ in range(10_000):
        window.arrived(0.01, PIECE_BYTES)
    assert window.size_bytes == MAX_WINDOW_BYTES
