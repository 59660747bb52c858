"""What may be used up in a time."""

from types import SimpleNamespace

import pytest

from swarm import allowance


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(allowance, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_it_is_full_at_first_and_comes_back_evenly(clock):
    seconds = allowance.Allowance(6.0, 60.0)
    assert seconds.left == 6.0
    seconds.spend(7.0)
    assert seconds.left == -1.0
    clock.now += 20.0
    assert seconds.left == pytest.approx(1.0)
    clock.now += 1000.0
    assert seconds.left == 6.0
