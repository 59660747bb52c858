"""How long the parts of a start took, and how long ago the command was."""

import time

import psutil
import pytest

from swarm.peer.startup_timer import STARTED, StartupTimer, seconds_since_command


@pytest.fixture
def clock(monkeypatch) -> StartupTimer:
    """The timer of a peer that started 100 s ago."""
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


def test_a_peer_that_does_not_wait_has_no_such_part(clock):
    clock.ends("imports")
    clock.ends("state")
    clock.ends("imports")
    assert list(clock.seconds) == ["imports", "state"]


def test_time_goes_on_where_torchrun_starts_a_peer_again(monkeypatch):
    own = seconds_since_command()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert seconds_since_command() == pytest.approx(time.time() - psutil.Process().parent().create_time(), abs=5)
    assert seconds_since_command() >= own, "it has made this process"


def test_a_clock_that_is_set_gives_no_peer_more_time(monkeypatch):
    """A laptop sets its clock when it wakes up. psutil computes the time of a start from the clock."""
    before = seconds_since_command()
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: time.time() + 3600)
    assert before <= seconds_since_command() < before + 60
