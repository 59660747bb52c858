"""Reads what strangers have encoded in Hivemind's way, which knows tuples and dictionaries of records beside msgpack.

Hivemind decodes each of these by a call from within the C code of msgpack. So a message of 2 kB with 300 tuples inside
each other overflowed the stack, and killed the process. And it wrote a line to the log for each type that it did not
know. An empty list is one byte of a message, and costs hundreds of times what a byte of a text costs: 4 MB of them
froze a process for 4 s. So nothing is decoded before it is known how many values it has, and where lists are of no use,
there are none.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgpack
import msgspec
from hivemind.dht.storage import DictionaryDHTValue
from msgspec import Meta, Raw

TUPLE, DICTIONARY = 0x40, 0x50
"""The types that Hivemind adds to msgpack; it has others, which no peer of ours sends."""
MAX_RECORDS = 2**13
"""In a dictionary: 5,000 that have an owner and a signature fill the largest message."""
MAX_BYTES = 2**20
"""Of anything that is no dictionary of records."""
MAX_VALUES = 2**14
"""In all lists and mappings together, each of which counts as one more."""
MAX_NESTED = 8
"""Lists, tuples and mappings inside each other. Ours need four."""

_LISTS = frozenset([*range(0x90, 0xA0), 0xDC, 0xDD])
_MAPPINGS = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])
_TYPED = frozenset([*range(0xC7, 0xCA), *range(0xD4, 0xD9)])
_MORE = _LISTS | _MAPPINGS | _TYPED
"""First bytes of what is more than a single value."""
_TYPE = msgspec.msgpack.Decoder(msgspec.msgpack.Ext)
_LIST, _MAPPING = msgspec.msgpack.Decoder(list[Raw]), msgspec.msgpack.Decoder(dict[str, Raw])
_DICTIONARY = msgspec.msgpack.Decoder(tuple[Raw, Raw, Annotated[list[Raw], Meta(max_length=MAX_RECORDS)]])
_RECORD = msgspec.msgpack.Decoder(tuple[bytes, bytes, float])
_ERRORS = (msgspec.MsgspecError, ValueError, TypeError, IndexError, RecursionError)


def plain(data: bytes) -> Any:
    """A single value as Hivemind decodes it: what is in records is bytes, or nothing.

    Raises:
        ValueError: it cannot be decoded, or is a list, a mapping, or one of Hivemind's types
    """
    if data[:1] and data[0] in _MORE:
        raise ValueError("more than a single value")
    return msgpack.unpackb(data, raw=False)


def loads(data: bytes, max_values: int = MAX_VALUES) -> Any:
    """The inverse of Hivemind's `MSGPackSerializer.dumps`.

    Args:
        max_values: in all lists and mappings together

    Raises:
        ValueError: it cannot be read, is too large or nested too deeply, or has types that nobody knows
    """
    try:
        if data[0] in _TYPED and (found := _TYPE.decode(data)).code == DICTIONARY:
            return _dictionary(found.data)
        if len(data) > MAX_BYTES:
            raise ValueError(f"{len(data)} bytes, which are no records")
        return _Reader(max_values).read(data)
    except _ERRORS as error:
        raise ValueError(f"it cannot be read: {error}") from error


class _Reader:
    """Reads one message from outside to inside: how long a list is, is known before anything in it is read.

    Args:
        max_values: as of `loads`
    """

    def __init__(self, max_values: int):
        self._left = max_values

    def read(self, data: bytes | Raw, depth: int = 0) -> Any:
        """Raises ValueError, or one of msgspec's errors: it cannot be read"""
        if depth > MAX_NESTED:
            raise ValueError(f"more than {MAX_NESTED} lists or mappings inside each other")
        begin = bytes(memoryview(data)[:5])
        if begin[0] in _LISTS:
            return self._list(data, begin, depth)
        if begin[0] in _MAPPINGS:
            self._count(begin)
            return {key: self.read(value, depth + 1) for key, value in _MAPPING.decode(data).items()}
        if begin[0] not in _TYPED:
            return msgpack.unpackb(data, raw=False)
        found = _TYPE.decode(data)
        if found.code != TUPLE:
            raise ValueError(f"type {found.code} of {len(found.data)} bytes")
        return tuple(self._list(found.data, bytes(found.data[:5]), depth))

    def _list(self, data: bytes | Raw, begin: bytes, depth: int) -> list[Any]:
        self._count(begin)
        return [self.read(value, depth + 1) for value in _LIST.decode(data)]

    def _count(self, begin: bytes) -> None:
        """Raises ValueError: more values are to come than there may be."""
        self._left -= 1 + _length(begin)
        if self._left < 0:
            raise ValueError("too many values")


def _length(begin: bytes) -> int:
    """Of the list or the mapping that begins with these five bytes."""
    if begin[0] < 0xA0:
        return begin[0] & 0x0F
    return int.from_bytes(begin[1:3] if begin[0] in (0xDC, 0xDE) else begin[1:5], "big")


def _dictionary(data: bytes) -> DictionaryDHTValue:
    """Without the largest size and the latest expiration that its sender names: every search would use them.

    And without what is no record of an owner. Keys of other kinds cannot be compared with those that are bytes, which
    ends the search that sorts them by their end; and honest nodes of Hivemind pass on what anybody has stored there.
    """
    _, _, entries = _DICTIONARY.decode(data)
    with DictionaryDHTValue().freeze() as found:
        for entry in entries:
            try:
                found.store(*_RECORD.decode(entry))
            except msgspec.MsgspecError:
                continue
    return found
