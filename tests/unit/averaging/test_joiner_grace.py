"""`JoinerGrace`: a leader holds its group open for a peer that catches up, and not for one that keeps asking."""

from types import SimpleNamespace

import pytest

from swarm.averaging.meeting import joiner_grace as grace
from swarm.protocol.messages import MAX_GROUP_SIZE
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(grace, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_it_is_held_until_the_peer_comes_or_some_seconds_have_passed(clock):
    held = grace.JoinerGrace()
    held.hold("a")
    held.hold("b")
    assert held.open_until == clock.now + DEFAULT_TIMEOUTS.hold_seconds
    assert held.awaited(arrived=set()) == {"a", "b"}
    assert held.awaited(arrived={"a"}) == {"b"}
    assert held.awaited(arrived=set()) == {"b"}, "a has been here"
    clock.now += DEFAULT_TIMEOUTS.hold_seconds
    assert held.awaited(arrived=set()) == set()


def test_a_short_hold_does_not_end_a_long_one(clock):
    held = grace.JoinerGrace()
    held.hold("a", 15.0)
    held.hold("a")
    clock.now += 2 * DEFAULT_TIMEOUTS.hold_seconds
    assert held.awaited(arrived=set()) == {"a"}
    assert held.seconds_left({"a", "b"}) == 15.0 - 2 * DEFAULT_TIMEOUTS.hold_seconds
    assert held.seconds_left({"b"}) == 0.0


def test_no_peer_can_hold_a_group_open_for_good(clock):
    held, seconds = grace.JoinerGrace(), 0
    while clock.now < 1000 + 600:
        held.hold("a")
        seconds += "a" in held.awaited(arrived=set())
        clock.now += 1
    share = grace.MAX_HOLDS * DEFAULT_TIMEOUTS.hold_seconds / grace.WITHIN_SECONDS
    assert seconds <= 1.2 * share * 600
    held.hold("b")
    assert held.awaited(arrived=set()) >= {"b"}, "others are not the worse for it"


def test_a_peer_that_never_leads_forgets_for_which_peers_it_would_have_waited(clock):
    held = grace.JoinerGrace()
    held.hold("a")
    clock.now += 2 * DEFAULT_TIMEOUTS.hold_seconds
    held.hold("b")
    assert held.seconds_left({"a"}) == 0.0, "nothing is remembered of it, not even that its time is over"


def test_strangers_do_not_fill_it(clock):
    held = grace.JoinerGrace()
    for peer in range(2 * MAX_GROUP_SIZE):
        held.hold(peer)
    assert len(held.awaited(arrived=set())) == MAX_GROUP_SIZE
