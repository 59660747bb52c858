"""A list is handed out until a peer has taken it."""

from types import SimpleNamespace

import pytest

from swarm.network import record_push
from swarm.network.record_push import AGAIN_SECONDS, push_until_taken


class Clock:
    """A clock on which time passes only in sleep. Each sleep takes this many seconds longer than it should."""

    def __init__(self, late_seconds: float = 0.0):
        self.now, self.late_seconds = 0.0, late_seconds

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late_seconds


class Dht:
    """A DHT whose peers take a list at the last of this many attempts."""

    owner = b"owner"

    def __init__(self, attempts: int):
        self.attempts, self.made, self.patience = attempts, 0, []

    def run_coroutine(self, _push, return_future: bool) -> SimpleNamespace:
        self.made += 1
        return SimpleNamespace(result=self.result)

    def result(self, timeout_seconds: float) -> int:
        self.patience.append(timeout_seconds)
        return int(self.made >= self.attempts)


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(record_push, "time", clock)
    return clock


def test_a_list_that_no_peer_takes_is_handed_out_again():
    patient, hopeless, alone = Dht(3), Dht(10**9), Dht(10**9)
    assert push_until_taken(patient, "run", "removed", b"signed", ["ada"], 10) == 1
    assert patient.made == 3
    assert push_until_taken(hopeless, "run", "removed", b"signed", ["ada"], 10) == 0
    assert hopeless.made == 10, "one a second"
    assert push_until_taken(alone, "run", "removed", b"signed", [], 10) == 0
    assert alone.made == 1, "no peer is there to take it"


def test_a_peer_that_has_slept_for_too_long_still_waits_for_an_answer(clock):
    clock.late_seconds, hopeless = 20.0, Dht(10**9)
    assert push_until_taken(hopeless, "run", "removed", b"signed", ["ada"], 10) == 0
    assert hopeless.patience == [10.0, AGAIN_SECONDS]
