"""What a start took, and for what."""

import pytest

from swarm.peer.startup_timer import STARTED, StartupTimer


@pytest.fixture
def clock(monkeypatch) -> StartupTimer:
    """Of a peer that started 100 s ago."""
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    monkeypatch.setenv(STARTED, "900")
    clock = StartupTimer()
    clock.now = now
    return clock


def test_waiting_for_company_is_a_part_of_its_own(clock):
    clock.ends("imports")
    clock.now[0] += 310
    clock.ends("state", waiting_seconds=304.8)
    assert clock.seconds == pytest.approx({"imports": 100, "state": 5.2, "waiting": 304.8})
    assert str(clock).endswith("imports 100.0 s, state 5.2 s, waiting 304.8 s.")


def test_who_does_not_wait_has_no_such_part(clock):
    clock.ends("imports")
    clock.ends("state")
    clock.ends("imports")
    assert list(clock.seconds) == ["imports", "state"]
