"""What a member says that it has computed for an update, so that another one can compute a part of it again.

The list has lines of micro-batches: which samples of the member's own order they were, and what their gradient was
at a few places. A hash of it is in the ticket of the round, so it cannot be changed afterwards; the list itself is
shown only to who asks for it.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

import msgspec
from hivemind.p2p import PeerID
from msgspec import Meta

from recipe.data.sampler import stable_seed
from swarm.protocol.wire import LINEAGE_BYTES, MAX_SAMPLES, from_wire, to_wire

NUM_PLACES = 32
"""At which the gradient of each micro-batch is noted."""
MAX_LINES = 4096
"""Of one peer for one update; who computes more micro-batches puts neighbours into one line."""
FEWEST_SHORTENED = MAX_LINES // 4
"""Lines that a list has at least after that. In fewer, many tiny micro-batches would cost who computes them again."""
MAX_MICRO_BATCHES = 64
"""In one line: who computes it again makes a pass for each of them."""
MAX_SPAN = 2
"""Times its samples over which a list may stretch in a peer's order, and one line more: what was dropped in between
leaves gaps. Without a limit a single image could be computed once and listed for every pass over the data."""
OUTSIZED = 8.0
"""Times as large as those of a usual sample: few honest gradients are."""
MAX_POSITION = 2**53
MAX_KIND_BYTES = 64
MAX_LIST_BYTES = MAX_LINES * (4 * NUM_PLACES + 32) + 2 * MAX_KIND_BYTES

_Line = tuple[
    Annotated[int, Meta(ge=0, le=MAX_POSITION)],
    Annotated[int, Meta(ge=1, le=MAX_SAMPLES)],
    Annotated[int, Meta(ge=1, le=MAX_MICRO_BATCHES)],
    Annotated[bytes, Meta(min_length=4 * NUM_PLACES, max_length=4 * NUM_PLACES)],
]
_LIST = msgspec.msgpack.Decoder(
    tuple[
        Annotated[str, Meta(max_length=MAX_KIND_BYTES)],
        Annotated[int, Meta(ge=0, le=MAX_LINES)],
        Annotated[list[_Line], Meta(min_length=1, max_length=MAX_LINES)],
    ]
)
_NUMBERS = struct.Struct(f"<{NUM_PLACES}f")


@dataclass(frozen=True)
class Line:
    """A micro-batch, or several of equal size that follow each other.

    Args:
        first_position: of its samples, in the order of the peer that has computed them
        samples: how many they are
        numbers: the sum of their gradients at the places of this step, `NUM_PLACES` of them
        micro_batches: how many it was computed in
    """

    first_position: int
    samples: int
    numbers: tuple[float, ...]
    micro_batches: int = 1

    def with_next(self, other: Line) -> Line | None:
        """Both in one; None if they do not follow each other, are of micro-batches of other sizes, or too many."""
        follows = other.first_position == self.first_position + self.samples
        if not follows or self.samples * other.micro_batches != other.samples * self.micro_batches:
            return None
        numbers = tuple(one + more for one, more in zip(self.numbers, other.numbers, strict=True))
        micro_batches = self.micro_batches + other.micro_batches
        if micro_batches > MAX_MICRO_BATCHES:
            return None
        return Line(self.first_position, self.samples + other.samples, numbers, micro_batches)


@dataclass(frozen=True)
class WorkList:
    """Of one member, for one round.

    Args:
        kind: of device, where others draw otherwise what dropout leaves out; empty where that does not matter
        lines: in the order in which they were computed
        num_before: how many of them, the first ones, were computed on the weights before the latest update
    """

    kind: str
    lines: Sequence[Line]
    num_before: int = 0

    @property
    def samples(self) -> int:
        """In all of them."""
        return sum(line.samples for line in self.lines)

    @property
    def is_dense(self) -> bool:
        """Whether its samples follow each other in the peer's order, but for a few gaps."""
        first, last = self.lines[0], self.lines[-1]
        span = last.first_position + last.samples - first.first_position
        return span <= MAX_SPAN * self.samples + max(line.samples for line in self.lines)

    @property
    def outsized(self) -> list[int]:
        """Numbers of the lines that have far more of all numbers than of all samples."""
        sizes = [sum(map(abs, line.numbers)) for line in self.lines]
        of_a_sample = sum(sizes) / self.samples
        return [n for n, line in enumerate(self.lines) if sizes[n] > OUTSIZED * line.samples * of_a_sample]

    def to_bytes(self) -> bytes:
        """As it travels."""
        lines = [
            (line.first_position, line.samples, line.micro_batches, _NUMBERS.pack(*line.numbers)) for line in self.lines
        ]
        return to_wire(self.kind, self.num_before, lines)

    @classmethod
    def from_bytes(cls, data: bytes, name: bytes, samples: int, largest: int = MAX_SAMPLES) -> WorkList:
        """The list of another member.

        Args:
            name: that its ticket gives
            samples: that its ticket claims
            largest: samples that a line may have in this run

        Raises:
            ValueError: it is not what the ticket says, or no list that an honest peer has
        """
        kind, num_before, lines = from_wire(_LIST, data, MAX_LIST_BYTES)
        if name_of(data) != name:
            raise ValueError("another list than the one of its ticket")
        found = cls(
            kind,
            [Line(first, count, _NUMBERS.unpack(numbers), times) for first, count, times, numbers in lines],
            num_before,
        )
        if found.samples != samples:
            raise ValueError("a list of other samples than its ticket claims")
        is_short = len(lines) < FEWEST_SHORTENED
        next_position = 0
        for line in found.lines:
            if line.first_position < next_position:  # else the same samples could count twice
                raise ValueError("samples that come twice")
            if line.samples % line.micro_batches or line.samples > largest or (is_short and line.micro_batches > 1):
                raise ValueError("micro-batches of sizes that cannot be")
            if not all(map(math.isfinite, line.numbers)):
                raise ValueError("numbers that are not finite")
            next_position = line.first_position + line.samples
        if not found.is_dense:
            raise ValueError("samples that are too far apart")
        return found


def shortened(lines: Sequence[Line], most: int) -> list[Line]:
    """At most so many, where neighbours can go into one line; unchanged if they are few enough already."""
    shorter, before = list(lines), []
    while len(shorter) > most and len(shorter) != len(before):
        before, shorter = shorter, []
        for line in before:
            # A line takes in one that has taken in as many as itself, so that all grow alike.
            last = shorter[-1] if shorter and shorter[-1].micro_batches == line.micro_batches else None
            both = None if last is None else last.with_next(line)
            if both is None:
                shorter.append(line)
            else:
                shorter[-1] = both
    return shorter


def largest_micro_batch(target_batch_size: int) -> int:
    """Samples that one may have in a run that begins with this target: as many as an update, and 2 for BatchNorm.

    Args:
        target_batch_size: 0 where any number of samples makes an update
    """
    return max(target_batch_size, 2) if target_batch_size else MAX_SAMPLES


def places(sizes: Sequence[int], lineage: bytes) -> list[tuple[int, int]]:
    """Of the numbers of a gradient that are compared: (number of the tensor, place in it).

    They are in as many tensors as possible, so that a large embedding, most rows of which no micro-batch touches, does
    not take all of them. Nobody knows them before the round that has made these weights.

    Args:
        sizes: numbers in each tensor
        lineage: of the weights
    """
    seed, filled = lineage.hex(), [number for number, size in enumerate(sizes) if size]
    if not filled:
        return []
    tensors = sorted(filled, key=lambda number: stable_seed(seed, "tensor", number))
    chosen = [tensors[number % len(tensors)] for number in range(NUM_PLACES)]
    return [(tensor, stable_seed(seed, "place", number) % sizes[tensor]) for number, tensor in enumerate(chosen)]


def places_in_vector(sizes: Sequence[int], lineage: bytes) -> list[int]:
    """The same, in the vector of all these tensors."""
    offsets = [0, *accumulate(sizes)]
    return [offsets[tensor] + place for tensor, place in places(sizes, lineage)]


def name_of(data: bytes) -> bytes:
    """Of a list as it travels, for the ticket."""
    return hashlib.sha256(data).digest()[:LINEAGE_BYTES]


@dataclass(frozen=True)
class Assignment:
    """What a peer is to compute again, by its own lot.

    Args:
        peer: whose work it is
        line: as that peer has said it
        is_before: whether it was computed on the weights before the latest update
    """

    peer: PeerID
    line: Line
    is_before: bool = False


@dataclass(frozen=True)
class WorkVerdict:
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
        has_slices: whether it computes a larger one of another member in slices, which give the same
        kind: of its device, as of `WorkList`
        verdict: on what it was to compute last; None if there was nothing
        has_earlier: whether members compute on the weights before the latest update, too, and keep them
    """

    listed: bytes = b""
    chance: float = 0.0
    largest: int = 0
    has_slices: bool = False
    kind: str = ""
    verdict: WorkVerdict | None = None
    has_earlier: bool = False
