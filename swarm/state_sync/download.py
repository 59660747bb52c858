"""A download of a state or of averages from one donor: what has arrived, how fast, and whether it is sound."""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2

from swarm.protocol.messages import RoundFailed
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts
from swarm.state_sync.download_messages import PIECE_BYTES, SLICE_BYTES, Offer, piece_of
from swarm.state_sync.download_window import Window
from swarm.state_sync.serialization import Layout, unpack
from swarm.state_sync.squeeze import unsqueeze

SLOWEST_BYTES_PER_SECOND = 32_000.0
"""A donor with a lower mean rate is given up: a line of 0.25 Mbit/s carries no training."""
USUAL_BYTES_PER_SECOND = 250_000.0
"""A peer that trains on meanwhile gives up a download that is slower than this, 2 Mbit/s, after `follow_seconds`."""


class NoState(RoundFailed):
    """No donor has handed over what was asked for.

    Args:
        reasons: what was wrong, for each donor that is to blame
        why: what was wrong, as the end of a sentence, if no donor is to blame
        busy_seconds: seconds after which the first of the busy donors has time; 0.0 if none is busy
        has_begun: something arrived
    """

    def __init__(
        self, reasons: Mapping[PeerID, str], why: str = "", busy_seconds: float = 0.0, has_begun: bool = False
    ):
        reasons = dict(reasons)
        super().__init__("; ".join(reasons.values()) or why or "no peer has it")
        self.reasons, self.busy_seconds, self.has_begun = reasons, busy_seconds, has_begun

    def __reduce__(self):
        return type(self), (self.reasons, self.args[0], self.busy_seconds, self.has_begun)


class Busy(RoundFailed):
    """The donor hands over its state to other peers first."""

    def __init__(self, seconds: float):
        super().__init__("it hands over its state to others first")
        self.seconds = seconds


class DownloadProgress(NamedTuple):
    """How far a download is.

    Args:
        donor: place of its donor among the donors that were asked
        num_bytes: bytes of the state that have arrived
        total_bytes: bytes of the state; 0 if no donor has offered anything yet
        seconds_left: estimated seconds until it is complete; infinite if that is not known
    """

    donor: int = 0
    num_bytes: int = 0
    total_bytes: int = 0
    seconds_left: float = math.inf


@dataclass(frozen=True)
class DownloadRequest:
    """What a peer wants to download: the state of another peer, or averages that a donor has kept.

    Args:
        max_bytes: an offer of more bytes is refused
        average_of: the step that the first average ended; None for the state
        is_awaited: this peer does nothing else meanwhile, so any progress is better than none
        waits: if the donor is making the average now, wait for it
    """

    max_bytes: int
    average_of: int | None = None
    is_awaited: bool = False
    waits: bool = False


@dataclass(frozen=True)
class Downloaded:
    """A state that has arrived, or averages.

    Args:
        donor: the peer that has sent it
        description: of a state, as `StateVersion.export` makes it; of averages, (the first one's step, the lineage
            before it, the lineages after each of them). It is not checked yet
        layout: of the tensors in `content`
        content: bytes of the tensors
    """

    donor: PeerID
    description: Any
    layout: Layout
    content: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """Unpack the content.

        Raises:
            RoundFailed: the layout does not fit the content
        """
        return unpack(self.layout, self.content)


class Download:
    """A state, or averages, on the way from a donor, with what has arrived.

    Args:
        donor: the peer that sends it
        request: what was asked for
    """

    def __init__(self, donor: PeerID, request: DownloadRequest, timeouts: Timeouts = DEFAULT_TIMEOUTS):
        self.donor, self.request, self.timeouts = donor, request, timeouts
        self.is_sound = True
        """Whether all that the donor has sent can be read and matches its offer."""
        self.forget()

    def forget(self) -> None:
        """Drop all that has arrived, and the offer."""
        self.offer: Offer | None = None
        self.window = Window(PIECE_BYTES)
        self.content = torch.empty(0, dtype=torch.uint8)
        self.missing: deque[int] = deque()
        self._pieces_left: list[int] = []
        """Pieces of each slice that have not arrived."""
        self.pieces_to_come = 0
        self.on_their_way = 0
        """Bytes that were asked for and have not arrived."""
        self.wire_bytes = 0
        self.began: float | None = None
        """Monotonic seconds when the first piece arrived."""
        self._began_with = 0
        self.heard = time.monotonic()
        """Monotonic seconds when the donor sent something last."""

    def accept(self, offer: Offer) -> None:
        """Take the offer that the first stream brings.

        Raises:
            Busy: the donor serves other peers first
            RoundFailed: nothing is offered
        """
        if offer.busy_seconds:
            raise Busy(offer.busy_seconds)
        if not offer.snapshot:
            raise RoundFailed(f"{self.donor} does not have it")
        if offer.num_bytes and not offer.digests:
            raise RoundFailed(f"{self.donor} offers a state without digests")
        self.offer, self.pieces_to_come = offer, offer.num_pieces
        self.content = torch.empty(offer.num_bytes, dtype=torch.uint8)
        self.missing = deque(range(offer.num_pieces))
        left = [SLICE_BYTES // PIECE_BYTES] * len(offer.digests)
        if left:
            left[-1] = offer.num_pieces - (len(left) - 1) * (SLICE_BYTES // PIECE_BYTES)
        self._pieces_left = left

    def begin_again(self) -> None:
        """Go on with the pieces that are missing. The donor is judged by what comes from now on."""
        self.window, self.on_their_way = Window(PIECE_BYTES), 0
        self.began, self.wire_bytes, self._began_with = None, 0, self.num_bytes
        self.heard = time.monotonic()

    def put_back(self, indices: Iterable[int]) -> None:
        """Mark pieces as missing again: they were asked for over a line that has broken down."""
        for index in indices:
            self.on_their_way -= self.size_of(index)
            self.missing.appendleft(index)

    def next_piece(self) -> int | None:
        """The index of the piece to ask for now; None if enough are on their way, or none is missing."""
        if not self.missing or not self.window.has_room(self.on_their_way):
            return None
        index = self.missing.popleft()
        self.on_their_way += self.size_of(index)
        return index

    @property
    def is_complete(self) -> bool:
        return self.offer is not None and self.pieces_to_come == 0

    @property
    def num_bytes(self) -> int:
        """Bytes that have arrived: a lower bound, since each missing piece counts as a full one."""
        return 0 if self.offer is None else max(0, self.offer.num_bytes - self.pieces_to_come * PIECE_BYTES)

    def size_of(self, index: int) -> int:
        """Bytes of a piece."""
        return min(PIECE_BYTES, self.offer.num_bytes - index * PIECE_BYTES)

    def take(self, index: int, message: averaging_pb2.DownloadData, round_trip_seconds: float) -> None:
        """Take in a piece that has arrived.

        Args:
            index: index of the piece
            message: the donor's message
            round_trip_seconds: from the request to its arrival

        Raises:
            RoundFailed: it cannot be read, or is not what the donor has offered
        """
        self.heard = time.monotonic()
        self.began = self.began or self.heard
        self.wire_bytes += message.ByteSize()
        try:
            piece = unsqueeze(message.tensor_part)
        except RoundFailed:
            self.is_sound = False
            raise
        if len(piece) != self.size_of(index):
            self.is_sound = False
            raise RoundFailed(f"{self.donor} sent a piece of another size")
        self.content.numpy()[piece_of(index)] = np.frombuffer(piece, np.uint8)
        self.on_their_way -= len(piece)
        self.window.arrived(round_trip_seconds, len(piece))
        self.pieces_to_come -= 1
        number = index * PIECE_BYTES // SLICE_BYTES
        self._pieces_left[number] -= 1
        if self._pieces_left[number] == 0:
            whole = self.content[number * SLICE_BYTES : (number + 1) * SLICE_BYTES].numpy()
            if hashlib.sha256(whole).digest() != self.offer.digests[number]:
                self.is_sound = False
                raise RoundFailed(f"what arrived from {self.donor} is not what it has: the digests differ")

    def judge(self) -> None:
        """Judge the donor.

        Raises:
            RoundFailed: it has fallen silent, or sends too slowly
        """
        now = time.monotonic()
        is_copying = self.offer is None and self.request.average_of is None
        patience = self.timeouts.offer_seconds if is_copying else self.timeouts.stream_seconds
        if now - self.heard > patience:
            raise RoundFailed(f"{self.donor} sent nothing for {patience:.0f} s")
        if self.began is None:
            return
        seconds = now - self.began
        if seconds > self.timeouts.judge_seconds and self.wire_bytes < seconds * SLOWEST_BYTES_PER_SECOND:
            raise RoundFailed(f"{self.donor} sends {self.wire_bytes / seconds / 1000:.0f} kB/s")
        if (
            not self.request.is_awaited
            and seconds > self.timeouts.follow_seconds + self.offer.num_bytes / USUAL_BYTES_PER_SECOND
        ):
            share = self.num_bytes / self.offer.num_bytes
            raise RoundFailed(f"{self.donor} has sent {share:.0%} of it in {seconds:.0f} s")

    @property
    def bytes_per_second(self) -> float:
        """Bytes of the state per second since it began to arrive."""
        seconds = time.monotonic() - self.began if self.began is not None else 0.0
        return (self.num_bytes - self._began_with) / seconds if seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float:
        """Seconds until it is complete at the present rate; infinite before anything has arrived."""
        rate = self.bytes_per_second
        return (self.offer.num_bytes - self.num_bytes) / rate if rate > 0 else math.inf
