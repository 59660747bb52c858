"""Decodes strangers' messages in Hivemind's encoding: msgpack, with extension types for tuples and record dictionaries.

Hivemind decodes each extension by a call from within the C code of msgpack. So a message of 2 kB with 300 nested tuples
overflowed the stack and killed the process. And Hivemind wrote a line to the log for each type that it did not know. An
empty list is one byte of a message, and costs hundreds of times what a byte of a text costs: 4 MB of them froze a
process for 4 s. So the number of values is checked before anything is decoded. Where no list is needed, none is
accepted.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgpack
import msgspec
from hivemind.dht.storage import DictionaryDHTValue
from msgspec import Meta, Raw

TUPLE, DICTIONARY = 0x40, 0x50
"""Codes of the extension types that Hivemind adds to msgpack. It has more, which no peer of this program sends."""
MAX_RECORDS = 2**13
"""Records in a dictionary. 5,000 with an owner and a signature fill the largest message."""
MAX_BYTES = 2**20
"""Bytes of a message that is no dictionary of records."""
MAX_VALUES = 2**14
"""Values in all lists and mappings of a message together. Each list or mapping counts as one more."""
MAX_NESTED = 8
"""Depth of nested lists, tuples and mappings. This program's messages need four."""

_LISTS = frozenset([*range(0x90, 0xA0), 0xDC, 0xDD])
_MAPPINGS = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])
_TYPED = frozenset([*range(0xC7, 0xCA), *range(0xD4, 0xD9)])
_MORE = _LISTS | _MAPPINGS | _TYPED
"""First bytes of messages that are more than a single value."""
_TYPE = msgspec.msgpack.Decoder(msgspec.msgpack.Ext)
_LIST, _MAPPING = msgspec.msgpack.Decoder(list[Raw]), msgspec.msgpack.Decoder(dict[str, Raw])
_DICTIONARY = msgspec.msgpack.Decoder(tuple[Raw, Raw, Annotated[list[Raw], Meta(max_length=MAX_RECORDS)]])
_RECORD = msgspec.msgpack.Decoder(tuple[bytes, bytes, float])
_ERRORS = (msgspec.MsgspecError, ValueError, TypeError, IndexError, RecursionError)


def plain(data: bytes) -> Any:
    """Decode a single value as Hivemind does. The contents and subkeys of records are single values.

    Raises:
        ValueError: it cannot be decoded, or is a list, a mapping, or one of Hivemind's types
    """
    if data[:1] and data[0] in _MORE:
        raise ValueError("more than a single value")
    return msgpack.unpackb(data, raw=False)


def loads(data: bytes, max_values: int = MAX_VALUES) -> Any:
    """The inverse of Hivemind's `MSGPackSerializer.dumps`, within bounds.

    Args:
        data: one message
        max_values: values that all lists and mappings together may have

    Raises:
        ValueError: it cannot be read, is too large or nested too deeply, or has unknown types
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
    """Reads one message from the outside in: the length of a list is checked before anything in it is read.

    Args:
        max_values: as in `loads`
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
        """Count a list or mapping that begins with these bytes.

        Raises:
            ValueError: the message has more values than it may have
        """
        self._left -= 1 + _length(begin)
        if self._left < 0:
            raise ValueError("too many values")


def _length(begin: bytes) -> int:
    """Number of entries of the list or mapping that begins with these five bytes."""
    if begin[0] < 0xA0:  # short forms: the length is in the lower four bits
        return begin[0] & 0x0F
    return int.from_bytes(begin[1:3] if begin[0] in (0xDC, 0xDE) else begin[1:5], "big")


def _dictionary(data: bytes) -> DictionaryDHTValue:
    """Decode a dictionary of records, without the largest size and the latest expiration that its sender names.

    Every search would use these two values. Entries that are no record of an owner are left out as well. Their subkeys
    cannot be compared with subkeys that are bytes, and a search that sorts records by expiration would end with an
    error. Honest nodes of Hivemind pass such entries on, so the rest of the dictionary is kept.
    """
    _, _, entries = _DICTIONARY.decode(data)
    with DictionaryDHTValue().freeze() as found:
        for entry in entries:
            try:
                found.store(*_RECORD.decode(entry))
            except msgspec.MsgspecError:
                continue
    return found
