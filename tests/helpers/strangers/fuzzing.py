"""Input that strangers may send: true messages that were damaged, and junk. Tests of parsers read it, or refuse it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import msgpack
from hypothesis import HealthCheck, settings
from hypothesis import strategies as some

TIMES = int(os.environ.get("FUZZ_TIMES", "1"))
"""Factor for the number of inputs of each test (`make fuzz`)."""
MAX_SECONDS = 2.0
"""Processor time for one input. Only a parser that does far too much exceeds it, not a busy machine."""

scalars = some.one_of(
    some.none(),
    some.booleans(),
    some.integers(-(2**63), 2**64 - 1),
    some.floats(),
    some.text(max_size=30),
    some.binary(max_size=40),
)
junk = some.recursive(
    scalars,
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(some.text(max_size=9), inner, max_size=4),
    max_leaves=6,
)
json_junk = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=30),
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(some.text(max_size=9), inner, max_size=4),
    max_leaves=6,
)


def often(inputs: int) -> Callable:
    """Return settings for so many inputs, times FUZZ_TIMES; the same in every run (`tests/conftest.py`)."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return settings(max_examples=inputs * TIMES, suppress_health_check=slow)


@some.composite
def damaged(draw, true: bytes) -> bytes:
    """True bytes with some of them changed, cut out or repeated."""
    data = bytearray(true)
    for _ in range(draw(some.integers(1, 3))):
        place = draw(some.integers(0, len(data)))
        data[place : place + draw(some.integers(0, 3))] = draw(some.binary(max_size=3))
    return bytes(data)


@some.composite
def falsified(draw, true: bytes) -> bytes:
    """A true message of fields, some of which hold something else, are missing, or are there twice."""
    fields = list(msgpack.unpackb(true))
    for _ in range(draw(some.integers(1, 3))):
        place = draw(some.integers(0, len(fields)))
        fields[place : place + draw(some.integers(0, 1))] = draw(some.lists(junk, max_size=2))
    return msgpack.packb(fields)


def messages(true: bytes) -> some.SearchStrategy[bytes]:
    return some.one_of(some.binary(max_size=300), junk.map(msgpack.packb), damaged(true), falsified(true))


def refused(parse: Callable, data: object, kind: type[Exception] = ValueError) -> bool:
    """Whether the parser refuses the data with this exception; any other exception fails the test."""
    began = time.thread_time()
    try:
        parse(data)
    except kind:
        return True
    finally:
        assert time.thread_time() - began < MAX_SECONDS
    return False
