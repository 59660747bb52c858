"""What a member says that it has computed for an update, so that another one can compute a part of it again.

The list has a line for each micro-batch: which samples of the member's own order they were, and what their gradient was
at a few places. A hash of it is in the ticket of the round, so it cannot be changed afterwards; the list itself is
shown only to who asks for it.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from hivemind.p2p import PeerID
from msgspec import Meta

from swarm.protocol.wire import LINEAGE_BYTES, MAX_SAMPLES, from_wire, to_wire

NUM_PLACES = 32
"""At which the gradient of each micro-batch is noted."""
MAX_MICRO_BATCHES = 4096
"""Of one peer for one update."""
MAX_POSITION = 2**53
MAX_KIND_BYTES = 64
MAX_LIST_BYTES = MAX_MICRO_BATCHES * (4 * NUM_PLACES + 32) + 2 * MAX_KIND_BYTES

_Line = tuple[
    Annotated[int, Meta(ge=0, le=MAX_POSITION)],
    Annotated[int, Meta(ge=1, le=MAX_SAMPLES)],
    Annotated[bytes, Meta(min_length=4 * NUM_PLACES, max_length=4 * NUM_PLACES)],
]
_LIST = msgspec.msgpack.Decoder(
    tuple[
        Annotated[str, Meta(max_length=MAX_KIND_BYTES)],
        Annotated[list[_Line], Meta(min_length=1, max_length=MAX_MICRO_BATCHES)],
    ]
)
_NUMBERS = struct.Struct(f"<{NUM_PLACES}f")


@dataclass(frozen=True)
class MicroBatch:
    """A line of the list.

    Args:
        first_position: of its samples, in the order of the peer that has computed it
        samples: how many they are
        numbers: the sum of their gradients at the places of this step, `NUM_PLACES` of them
    """

    first_position: int
    samples: int
    numbers: tuple[float, ...]


@dataclass(frozen=True)
class WorkList:
    """Of one member, for one round.

    Args:
        kind: of device, where others draw otherwise what dropout leaves out; empty where that does not matter
        micro_batches: in the order in which they were computed
    """

    kind: str
    micro_batches: Sequence[MicroBatch]

    @property
    def samples(self) -> int:
        """In all of them."""
        return sum(micro_batch.samples for micro_batch in self.micro_batches)

    def to_bytes(self) -> bytes:
        """As it travels."""
        lines = [(one.first_position, one.samples, _NUMBERS.pack(*one.numbers)) for one in self.micro_batches]
        return to_wire(self.kind, lines)

    @classmethod
    def from_bytes(cls, data: bytes, name: bytes, samples: int) -> WorkList:
        """The list of another member.

        Args:
            name: that its ticket gives
            samples: that its ticket claims

        Raises:
            ValueError: it is not what the ticket says, or no list that an honest peer has
        """
        kind, lines = from_wire(_LIST, data, MAX_LIST_BYTES)
        if name_of(data) != name:
            raise ValueError("another list than the one of its ticket")
        found = cls(kind, [MicroBatch(first, count, _NUMBERS.unpack(numbers)) for first, count, numbers in lines])
        if found.samples != samples:
            raise ValueError("a list of other samples than its ticket claims")
        next_position = found.micro_batches[0].first_position
        for micro_batch in found.micro_batches:
            if micro_batch.first_position != next_position:  # else the same samples could count twice
                raise ValueError("samples that do not follow each other")
            if not all(map(math.isfinite, micro_batch.numbers)):
                raise ValueError("numbers that are not finite")
            next_position += micro_batch.samples
        return found


def name_of(data: bytes) -> bytes:
    """Of a list as it travels, for the ticket."""
    return hashlib.sha256(data).digest()[:LINEAGE_BYTES]


@dataclass(frozen=True)
class Assignment:
    """What a peer is to compute again, by its own lot.

    Args:
        peer: whose work it is
        micro_batch: as that peer has said it
    """

    peer: PeerID
    micro_batch: MicroBatch


@dataclass(frozen=True)
class Verdict:
    """What came of it.

    Args:
        peer: whose work it was
        holds: whether it gave the same numbers; None if this peer cannot tell
    """

    peer: PeerID
    holds: bool | None


@dataclass(frozen=True)
class OwnWork:
    """What a trainer tells its averaging process before a round.

    Args:
        listed: its own list, as it travels; empty if it has none
        chance: with which it computes a micro-batch of another member again
        largest: samples of its largest micro-batch
        kind: of its device, as of `WorkList`
        verdict: on what it was to compute last; None if there was nothing
    """

    listed: bytes = b""
    chance: float = 0.0
    largest: int = 0
    kind: str = ""
    verdict: Verdict | None = None
