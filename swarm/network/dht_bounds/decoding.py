"""Reads what strangers have encoded in Hivemind's way, which knows tuples and dictionaries of records beside msgpack.

Hivemind decodes each of these by a call from within the C code of msgpack. So a message of 2 kB with 300 tuples inside
each other overflowed the stack, and killed the process. And it wrote a line to the log for each type that it did not
know.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import msgpack
from hivemind.dht.storage import DictionaryDHTValue

TUPLE, DICTIONARY = 0x40, 0x50
"""The types that Hivemind adds to msgpack; it has others, which no peer of ours sends."""
MAX_DEPTH = 8
"""Of tuples and dictionaries inside each other; our messages need four."""
MAX_NESTED = 16
"""Lists and mappings inside each other. msgpack reads a thousand of them, and pickle, which passes what was read on to
another process, does not."""
MAX_ENTRIES = 2**16
"""Of a list or a mapping: as many are made room for as a message says, before one of them is read."""


class _Depth(threading.local):
    """In which a thread is now."""

    now = 0


_depth = _Depth()


def loads(data: bytes) -> Any:
    """The inverse of Hivemind's `MSGPackSerializer.dumps`.

    Raises:
        ValueError: it cannot be read, is nested too deeply, or has types that nobody knows
    """
    if _depth.now >= MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} tuples or dictionaries inside each other")
    _depth.now += 1
    try:
        return unpacked(data, _decode)
    except (ValueError, TypeError, AssertionError, RecursionError) as error:
        raise ValueError(f"it cannot be read: {error}") from error
    finally:
        _depth.now -= 1


def unpacked(data: bytes, decode: Callable[[int, bytes], Any]) -> Any:
    """What msgpack reads, within bounds.

    Args:
        decode: reads a type that is not msgpack's own

    Raises:
        ValueError: it cannot be read, or is too large or nested too deeply
    """
    value = msgpack.unpackb(data, raw=False, ext_hook=decode, max_array_len=MAX_ENTRIES, max_map_len=MAX_ENTRIES)
    level = [value]
    for _ in range(MAX_NESTED):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return value
    raise ValueError(f"more than {MAX_NESTED} lists or mappings inside each other")


def _inside(value: Any) -> Iterable[Any]:
    """Lists and mappings that are in this one."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [one for one in inner if isinstance(one, (list, tuple, dict))]


def _decode(code: int, data: bytes) -> Any:
    if code == TUPLE:
        return tuple(loads(data))
    if code == DICTIONARY:
        return _dictionary(data)
    raise ValueError(f"type {code} of {len(data)} bytes")


def _dictionary(data: bytes) -> DictionaryDHTValue:
    """Without the largest size and the latest expiration that its sender names: every search would use them.

    And without what has no owner. Keys of other kinds cannot be compared with those that are bytes, which ends the
    search that sorts them by their end; and honest nodes of Hivemind pass on what anybody has stored there.
    """
    _, _, entries = loads(data)
    with DictionaryDHTValue().freeze() as found:
        for subkey, value, expiration_time in entries:
            if isinstance(subkey, bytes):
                found.store(subkey, value, expiration_time)
    return found
