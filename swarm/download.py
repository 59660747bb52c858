"""What arrives of a state, or of an average that makes the next one: from whom, how fast, and how much of it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time

from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2

from swarm.rounds import RoundFailed
from swarm.squeeze import NUMBER_BYTES, unsqueeze

STREAM_SECONDS = 10.0  # longest silence within a stream before the other side counts as gone
SLOWEST_BYTES_PER_SECOND = 20_000.0  # a donor that sends less in the mean is given up
JUDGE_SECONDS = 5.0  # of a donor's sending, before it is judged
NUM_SLICES = 8
MAX_DESCRIPTION_BYTES = 2**20  # names and shapes of tensors
TOKEN_BYTES, STEP_BYTES = 16, 4


class TooSlow(RoundFailed):
    """A donor sends so few bytes per second that another one is worth a try."""

    def __init__(self, bytes_per_second: float):
        super().__init__("too slow")
        self.args = (bytes_per_second,)  # so that it can be pickled
        self.bytes_per_second = bytes_per_second

    def __str__(self) -> str:
        return f"it sends {self.bytes_per_second / 1000:.0f} kB/s"


class Download:
    """A state that is on its way in, or an average: what has arrived of it.

    :param donor: who sends it
    :param max_bytes: refuse to take more than this
    :param min_bytes_per_second: give the donor up if it sends less in the mean
    :param average_of: the step that the average ended; None for the state
    """

    def __init__(
        self,
        donor: PeerID,
        max_bytes: int,
        min_bytes_per_second: float = SLOWEST_BYTES_PER_SECOND,
        average_of: int | None = None,
    ):
        self.donor, self.max_bytes, self.min_bytes_per_second = donor, max_bytes, min_bytes_per_second
        self.average_of = average_of
        self.token = os.urandom(TOKEN_BYTES)
        self.description = b""
        self.slices = [bytearray() for _ in range(NUM_SLICES)]
        self._digests = [hashlib.sha256() for _ in range(NUM_SLICES)]
        self.missing = NUM_SLICES
        self.received_bytes = 0
        self.began: float | None = None
        self.heard = time.monotonic()
        self.complete = asyncio.Event()

    def request(self, index: int) -> averaging_pb2.DownloadData:
        """Asks for a slice; :func:`parse_request` reads it."""
        step = b"" if self.average_of is None else self.average_of.to_bytes(STEP_BYTES, "big")
        return averaging_pb2.DownloadData(metadata=self.token + bytes([index]) + step)

    def take(self, index: int, message: averaging_pb2.DownloadData) -> bool:
        """Of a slice, which the digest of its bytes ends.

        :returns: whether that was all
        :raises RoundFailed: it is too much, cannot be read, or is not what the donor has
        """
        self.heard = time.monotonic()
        self.began = self.began or self.heard
        self.received_bytes += message.ByteSize()
        if self.received_bytes > self.max_bytes:
            raise RoundFailed(f"{self.donor} sent more than the {self.max_bytes} bytes that this model can need")
        if not message.HasField("tensor_part") and (index > 0 or self.description):
            if message.metadata != self._digests[index].digest():
                raise RoundFailed(f"what arrived from {self.donor} is not what it has: the digests differ")
            self._end_slice()
            return True
        if len(message.metadata) > MAX_DESCRIPTION_BYTES:
            raise RoundFailed(f"{self.donor} sent a description that is longer than that of any model")
        self.description = self.description or message.metadata
        chunk = unsqueeze(message.tensor_part)
        self._digests[index].update(chunk)
        self.slices[index] += chunk
        return False

    def judge(self) -> None:
        """:raises RoundFailed: the donor has fallen silent, or sends too slowly"""
        now = time.monotonic()
        if now - self.heard > STREAM_SECONDS:
            raise RoundFailed(f"{self.donor} sent nothing for {STREAM_SECONDS:.0f} s")
        seconds = now - (self.began or now)
        if seconds > JUDGE_SECONDS and self.received_bytes < seconds * self.min_bytes_per_second:
            raise TooSlow(self.received_bytes / seconds)

    def _end_slice(self) -> None:
        self.missing -= 1
        if not self.missing:
            self.complete.set()


def parse_request(request: averaging_pb2.DownloadData) -> tuple[bytes, int, int | None]:
    """What a stranger asks for.

    :returns: (token of the download, slice, step whose average is asked for or None)
    :raises ValueError: it is no request
    """
    token, index, step = (
        request.metadata[:TOKEN_BYTES],
        request.metadata[TOKEN_BYTES : TOKEN_BYTES + 1],
        request.metadata[TOKEN_BYTES + 1 :],
    )
    if len(index) != 1 or index[0] >= NUM_SLICES or len(step) not in (0, STEP_BYTES):
        raise ValueError("no slice of a state or an average")
    return token, index[0], int.from_bytes(step, "big") if step else None


def slice_of(num_bytes: int, index: int) -> slice:
    """Of a state of so many bytes; no fp32 number is divided."""
    begin, end = (num_bytes * i // NUM_SLICES // NUMBER_BYTES * NUMBER_BYTES for i in (index, index + 1))
    return slice(begin, num_bytes if index == NUM_SLICES - 1 else end)
