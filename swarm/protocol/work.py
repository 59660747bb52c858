"""The list of what a member has computed for an update, so that another member can compute a part of it again.

The list has lines of micro-batches: which samples of the member's own order they had, and the values of their gradient
at a few places. A hash of the list is in the ticket of the round, so it cannot be changed afterwards. The list itself
is sent only on request.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated

import msgspec
from hivemind.p2p import PeerID
from msgspec import Meta

from recipe.data.sampler import stable_seed
from swarm.protocol.wire import LINEAGE_BYTES, MAX_SAMPLES, from_wire, to_wire

NUM_PLACES = 32
"""Places at which the gradient of each micro-batch is listed."""
MAX_LINES = 4096
"""Lines of one peer for one update. A peer with more micro-batches puts neighbours into one line."""
FEWEST_SHORTENED = MAX_LINES // 4
"""Lines that a list with several micro-batches in one line has at least. Otherwise a short list could have many tiny
micro-batches in a line, each of which costs the checking member a pass."""
MAX_MICRO_BATCHES = 64
"""Micro-batches in one line. The checking member makes a pass for each of them."""
MAX_SPAN = 2
"""How far a list may stretch in a peer's order: this many times its samples, and one line more. Samples that were
dropped in between leave gaps. Without a limit, an image could be computed once and listed for every pass over the
data."""
OUTSIZED = 8.0
"""A line is outsized if the numbers of its gradient, per sample, are this many times the list's mean. Few honest
gradients are."""
MAX_POSITION = 2**53
"""Latest position of a sample in a peer's order."""
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

    On the wire, `numbers` are `4 * NUM_PLACES` bytes of little-endian float32.

    Args:
        first_position: position of its first sample, in the order of the peer that has computed it
        samples: number of its samples
        micro_batches: number of micro-batches that it was computed in
        numbers: sum of the samples' gradients at the places of this step, `NUM_PLACES` numbers
    """

    first_position: int
    samples: int
    micro_batches: int = field(default=1, kw_only=True)
    numbers: tuple[float, ...]

    def with_next(self, other: Line) -> Line | None:
        """This line and the next in one; None if they are not adjacent, differ in micro-batch size, or are too many."""
        follows = other.first_position == self.first_position + self.samples
        if not follows or self.samples * other.micro_batches != other.samples * self.micro_batches:
            return None
        numbers = tuple(one + more for one, more in zip(self.numbers, other.numbers, strict=True))
        micro_batches = self.micro_batches + other.micro_batches
        if micro_batches > MAX_MICRO_BATCHES:
            return None
        return Line(self.first_position, self.samples + other.samples, numbers, micro_batches=micro_batches)


@dataclass(frozen=True)
class WorkList:
    """What one member has computed for one round.

    Args:
        kind: kind of device, where other kinds draw other numbers for dropout; empty where that does not matter
        num_before: number of the first lines that were computed on the weights before the latest update
        lines: its lines, in the order in which they were computed
    """

    kind: str
    num_before: int = field(default=0, kw_only=True)
    lines: Sequence[Line]

    @property
    def samples(self) -> int:
        """Samples of all lines."""
        return sum(line.samples for line in self.lines)

    @property
    def is_dense(self) -> bool:
        """Whether its samples follow each other in the peer's order, except for gaps within `MAX_SPAN`."""
        first, last = self.lines[0], self.lines[-1]
        span = last.first_position + last.samples - first.first_position
        return span <= MAX_SPAN * self.samples + max(line.samples for line in self.lines)

    @property
    def outsized(self) -> list[int]:
        """Indices of the lines whose gradients are far too large for their samples (`OUTSIZED`)."""
        sizes = [sum(map(abs, line.numbers)) for line in self.lines]
        of_a_sample = sum(sizes) / self.samples
        return [n for n, line in enumerate(self.lines) if sizes[n] > OUTSIZED * line.samples * of_a_sample]

    def to_bytes(self) -> bytes:
        """The list as it travels."""
        lines = [
            (line.first_position, line.samples, line.micro_batches, _NUMBERS.pack(*line.numbers)) for line in self.lines
        ]
        return to_wire(self.kind, self.num_before, lines)

    @classmethod
    def from_bytes(cls, data: bytes, name: bytes, samples: int, largest: int = MAX_SAMPLES) -> WorkList:
        """Read the list of another member.

        Args:
            data: the list as it travels
            name: name of the list in the member's ticket
            samples: samples that the ticket claims
            largest: samples that a line may have in this run

        Raises:
            ValueError: it is not the list of the ticket, or not one that an honest peer can have
        """
        kind, num_before, lines = from_wire(_LIST, data, MAX_LIST_BYTES)
        if name_of(data) != name:
            raise ValueError("another list than the one of its ticket")
        found = cls(
            kind,
            [
                Line(first, count, _NUMBERS.unpack(numbers), micro_batches=times)
                for first, count, times, numbers in lines
            ],
            num_before=num_before,
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
    """Put neighbours into one line until there are at most `most` lines, or no two neighbours fit together."""
    shorter, before = list(lines), []
    while len(shorter) > most and len(shorter) != len(before):
        before, shorter = shorter, []
        for line in before:
            # A line takes in only a line of as many micro-batches as itself, so that all lines grow alike.
            last = shorter[-1] if shorter and shorter[-1].micro_batches == line.micro_batches else None
            both = None if last is None else last.with_next(line)
            if both is None:
                shorter.append(line)
            else:
                shorter[-1] = both
    return shorter


def largest_micro_batch(target_batch_size: int) -> int:
    """Samples that a micro-batch may have in a run with this target: as many as an update, or 2 for BatchNorm.

    Args:
        target_batch_size: target at the start of the run; 0 where any number of samples makes an update
    """
    return max(target_batch_size, 2) if target_batch_size else MAX_SAMPLES


def places(sizes: Sequence[int], lineage: bytes) -> list[tuple[int, int]]:
    """The places of a gradient at which its numbers are compared: pairs (index of the tensor, place in it).

    They are spread over as many tensors as possible. Otherwise a large embedding, most rows of which no micro-batch
    touches, could take all of them. No peer knows them before the end of the round that has made these weights.

    Args:
        sizes: number of elements of each tensor
        lineage: lineage of the weights
    """
    seed, filled = lineage.hex(), [number for number, size in enumerate(sizes) if size]
    if not filled:
        return []
    tensors = sorted(filled, key=lambda number: stable_seed(seed, "tensor", number))
    chosen = [tensors[number % len(tensors)] for number in range(NUM_PLACES)]
    return [(tensor, stable_seed(seed, "place", number) % sizes[tensor]) for number, tensor in enumerate(chosen)]


def places_in_vector(sizes: Sequence[int], lineage: bytes) -> list[int]:
    """The same places as indices into the concatenation of all these tensors."""
    offsets = [0, *accumulate(sizes)]
    return [offsets[tensor] + place for tensor, place in places(sizes, lineage)]


def name_of(data: bytes) -> bytes:
    """The name of a list in tickets: a hash of the list as it travels."""
    return hashlib.sha256(data).digest()[:LINEAGE_BYTES]


@dataclass(frozen=True)
class Assignment:
    """A line of another member's list that this peer has drawn to compute again.

    Args:
        peer: the member
        line: the line, as the member has listed it
        is_before: whether it was computed on the weights before the latest update
    """

    peer: PeerID
    line: Line
    is_before: bool = False


@dataclass(frozen=True)
class WorkVerdict:
    """The result of computing a member's line again.

    Args:
        peer: the member
        holds: whether it gave the same numbers; None if this peer cannot tell
    """

    peer: PeerID
    holds: bool | None


@dataclass(frozen=True)
class OwnWork:
    """What a trainer tells its averaging process before a round.

    Args:
        listed: its own list, as it travels; empty if it has none
        chance: probability with which it computes a micro-batch of another member again
        largest: samples of its largest micro-batch
        has_slices: whether it can compute larger micro-batches of other members in slices, with the same result
        kind: kind of its device, as in `WorkList`
        verdict: result of its last `Assignment`; None if there was none
        has_earlier: whether members also compute on the weights before the latest update, and keep these
    """

    listed: bytes = b""
    chance: float = 0.0
    largest: int = 0
    has_slices: bool = False
    kind: str = ""
    verdict: WorkVerdict | None = None
    has_earlier: bool = False
