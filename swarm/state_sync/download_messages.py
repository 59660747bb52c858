"""Messages by which a state or an average goes from one peer to another. Neither side trusts what it reads.

The downloading peer asks for pieces, and a donor sends nothing that was not asked for. So the downloading peer decides
how much is on its way (`download_window`). A stream begins with a *wish*, which an *offer* answers. Then each message
asks for a piece, and the pieces come in that order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from swarm.protocol.wire import from_wire, to_wire
from swarm.state_sync.squeeze import CHUNK_BYTES

PIECE_BYTES = CHUNK_BYTES
SLICE_BYTES = 16 * PIECE_BYTES
"""Bytes that one digest covers."""
DIGEST_BYTES = 32
SNAPSHOT_BYTES = 16
MAX_DESCRIPTION_BYTES = 2**20
"""Bytes for names and shapes of tensors."""
MAX_BUSY_SECONDS = 600.0
MAX_WISH_BYTES = 64

_Snapshot = Annotated[bytes, Meta(max_length=SNAPSHOT_BYTES)]
_Busy = Annotated[float, Meta(ge=0, le=MAX_BUSY_SECONDS)]
_NumBytes = Annotated[int, Meta(ge=0)]
_Description = Annotated[bytes, Meta(max_length=MAX_DESCRIPTION_BYTES)]
_WISH = msgspec.msgpack.Decoder(tuple[Annotated[int, Meta(ge=0)] | None, _Snapshot, bool])
_OFFER = msgspec.msgpack.Decoder(tuple[_Busy, _Snapshot, _NumBytes, bytes, _Description])


@dataclass(frozen=True)
class Wish:
    """The first message of a stream: what the downloading peer wants.

    Args:
        average_of: the step that the average ended; None for the state
        snapshot: name of the snapshot that the donor has offered already, or empty
        waits: if the donor is making the average now, it is to answer when it has it
    """

    average_of: int | None = None
    snapshot: bytes = b""
    waits: bool = False

    def to_bytes(self) -> bytes:
        return to_wire(self.average_of, self.snapshot, self.waits)

    @classmethod
    def from_bytes(cls, data: bytes) -> Wish:
        """Decode a wish.

        Raises:
            ValueError: it is none
        """
        average_of, snapshot, waits = from_wire(_WISH, data, MAX_WISH_BYTES)
        _check_snapshot(snapshot)
        return cls(average_of, snapshot, waits)


@dataclass(frozen=True)
class Offer:
    """The donor's answer to a wish.

    Args:
        busy_seconds: seconds for which other peers come first; 0.0 if the donor is not busy, else nothing is offered
        snapshot: name of what is offered; empty if there is nothing, or no longer
        num_bytes: bytes of the snapshot
        digests: SHA-256 of each slice of it
        description: describes the content for the downloading peer; read with the averager's serializer
    """

    busy_seconds: float = 0.0
    snapshot: bytes = b""
    num_bytes: int = 0
    digests: tuple[bytes, ...] = ()
    description: bytes = b""

    @property
    def num_pieces(self) -> int:
        return math.ceil(self.num_bytes / PIECE_BYTES)

    def to_bytes(self) -> bytes:
        return to_wire(self.busy_seconds, self.snapshot, self.num_bytes, b"".join(self.digests), self.description)

    @classmethod
    def from_bytes(cls, data: bytes, max_bytes: int) -> Offer:
        """Decode an offer.

        Raises:
            ValueError: it is none, or more than `max_bytes` are offered
        """
        fields = from_wire(_OFFER, data, 2 * MAX_DESCRIPTION_BYTES)
        busy_seconds, snapshot, num_bytes, digests, description = fields
        _check_snapshot(snapshot)
        if num_bytes > max_bytes:
            raise ValueError(f"more than the {max_bytes} bytes that this model can need")
        if len(digests) not in (0, DIGEST_BYTES * math.ceil(num_bytes / SLICE_BYTES)):
            raise ValueError("another number of digests")
        each = tuple(digests[begin : begin + DIGEST_BYTES] for begin in range(0, len(digests), DIGEST_BYTES))
        return cls(busy_seconds, snapshot, num_bytes, each, description)


def _check_snapshot(name: bytes) -> None:
    """Raises ValueError: it is neither a name nor empty."""
    if len(name) not in (0, SNAPSHOT_BYTES):
        raise ValueError("no name of a snapshot")


def piece_of(index: int) -> slice:
    """The bytes of a piece. The last piece can be shorter."""
    return slice(index * PIECE_BYTES, (index + 1) * PIECE_BYTES)


def ask_for(index: int) -> bytes:
    """The message that asks for a piece; `asked_for` reads it."""
    return index.to_bytes(4, "big")


def asked_for(data: bytes) -> int:
    """The index of the piece that a message asks for. It may be beyond the last piece.

    Raises:
        ValueError: the message asks for no piece
    """
    if len(data) != 4:
        raise ValueError("no piece")
    return int.from_bytes(data, "big")


def digests_of(content: np.ndarray) -> tuple[bytes, ...]:
    """Digests of each slice of the content, shape [n], uint8."""
    return tuple(
        hashlib.sha256(content[begin : begin + SLICE_BYTES]).digest() for begin in range(0, len(content), SLICE_BYTES)
    )


def name_of_snapshot(description: bytes, digests: Sequence[bytes]) -> bytes:
    """The name of a snapshot: a hash, so equal states have equal names."""
    return hashlib.sha256(description + b"".join(digests)).digest()[:SNAPSHOT_BYTES]
