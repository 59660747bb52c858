"""`TokenBucket`: the amount that may be used up in a time."""

from types import SimpleNamespace

import pytest

from swarm.runtime.token_bucket import TokenBucket, TokenBuckets


def test_a_bucket_is_full_at_first_and_fills_up_evenly():
    clock = SimpleNamespace(now=100.0)
    seconds = TokenBucket(6.0, 0.1, lambda: clock.now)
    assert seconds.left == 6.0
    seconds.spend(7.0)
    assert seconds.left == -1.0
    clock.now += 20.0
    assert seconds.left == pytest.approx(1.0)
    clock.now += 1000.0
    assert seconds.left == 6.0


def test_each_name_has_its_own_bucket_and_names_are_bounded():
    buckets = TokenBuckets(most=2, per_second=0.0, names=3)
    assert [buckets.take("a") for _ in range(3)] == [True, True, False]
    assert buckets.take("b")
    assert buckets.take("c")
    assert not buckets.take("d"), "while so many are in use"
