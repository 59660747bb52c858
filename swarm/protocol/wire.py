"""Reads and writes messages between peers. The sender is not trusted: every field has bounds."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

MAX_STEP = 10**9
MAX_SAMPLES = 2**31
LINEAGE_BYTES = 16
PEER_ID_BYTES = 34
"""Size of the id of a peer with an RSA key, which all owners of records have: two bytes, and the digest of the key."""
MAX_SKETCH = 16

Step = Annotated[int, Meta(ge=0, le=MAX_STEP)]
Samples = Annotated[int, Meta(ge=0, le=MAX_SAMPLES)]
Lineage = Annotated[bytes, Meta(min_length=LINEAGE_BYTES, max_length=LINEAGE_BYTES)]
Name = Annotated[bytes, Meta(max_length=LINEAGE_BYTES)]
"""A hash that names something; empty if there is nothing."""
Sketch = Annotated[tuple[float, ...], Meta(max_length=MAX_SKETCH)]

T = TypeVar("T")


def to_wire(*fields: Any) -> bytes:
    """Encode these fields as one message."""
    return msgspec.msgpack.encode(fields)


def from_wire(decoder: msgspec.msgpack.Decoder[T], data: object, most_bytes: int) -> T:
    """Decode the fields of a message.

    Args:
        decoder: msgspec's decoder of a tuple of bounded types
        data: the message
        most_bytes: size of the message at most

    Raises:
        ValueError: it is too long, or a field is missing, of another type or out of bounds
    """
    if not isinstance(data, bytes) or len(data) > most_bytes:
        raise ValueError(f"it has to be at most {most_bytes} bytes")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"it cannot be read: {error}") from error
