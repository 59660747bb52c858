"""A peer goes on telling others where it is.

A failed look at their records does not count as one that found no peers.
"""

import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest

from swarm.membership.record_exchange import RecordExchange
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS
from tests.helpers.records import RECORD, done


class Store:
    """A store that answers at once, unless something is wrong with the DHT."""

    def __init__(self):
        self.posts, self.looks = 0, []
        self.telling_ends, self.is_silent = True, False
        self.has_been_told = threading.Semaphore(0)

    def post(self, _record) -> Future:
        self.posts += 1
        self.has_been_told.release()
        return done(True) if self.telling_ends else Future()

    def look(self, search: bool):
        self.looks.append(search)
        if self.is_silent:
            raise TimeoutError
        return {}


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def exchange(store):
    timeouts = replace(DEFAULT_TIMEOUTS, report_seconds=0.2, search_seconds=0.5, record_seconds=1.5)
    exchange = RecordExchange(store, lambda: RECORD, lambda _all, _corrected: None, lambda: 0.2, timeouts)
    yield exchange
    exchange.close(says_goodbye=False)
    exchange.join(5)


def test_a_post_that_never_ends_is_given_up(store, exchange):
    store.telling_ends = False
    exchange.start()
    for _ in range(3):
        assert store.has_been_told.acquire(timeout=5)


def test_a_post_is_not_begun_again_while_it_may_still_end(store, exchange):
    store.telling_ends = False
    began = time.monotonic()
    exchange.start()
    assert exchange.wait_refreshed(5)
    assert store.posts <= 1 + (time.monotonic() - began) / 0.5


def test_a_look_that_fails_does_not_count(store, exchange):
    store.is_silent, rings = True, []
    exchange.on_refreshed = lambda: rings.append(True)
    exchange.start()
    assert not exchange.wait_refreshed(1.0)
    assert len(store.looks) > 1
    assert all(store.looks), "a caller that waits waits for a search, and none has succeeded"
    assert not rings
    store.is_silent = False
    assert exchange.wait_refreshed(5)


def test_an_error_of_those_who_listen_does_not_end_the_exchange(store, exchange):
    def fail() -> None:
        raise OSError("too many open files")

    exchange.on_refreshed = fail
    exchange.start()
    assert exchange.wait_refreshed(5)


def test_an_error_of_the_estimate_does_not_end_the_exchange(store):
    def seconds_to_round() -> float:
        raise ZeroDivisionError

    exchange = RecordExchange(store, lambda: RECORD, lambda _all, _corrected: None, seconds_to_round, DEFAULT_TIMEOUTS)
    exchange.start()
    assert exchange.wait_refreshed(5)
    exchange.close(says_goodbye=False)
    exchange.join(5)
