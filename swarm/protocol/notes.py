"""Notes in progress records about a peer's rounds, tests and machine. They are for people: no peer acts on them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from swarm.protocol.wire import MAX_STEP, Step

MAX_WHY_LETTERS, MAX_WHY_BYTES = 200, 320
MAX_TIMES = 10**6
MAX_DEVICE_LETTERS, MAX_DEVICE_BYTES, MAX_VERSION_LETTERS = 40, 64, 24
MAX_UPLOAD = 1.25e11  # bytes per second
MAX_TRAFFIC_BYTES = 2**60
PUBLIC, FORWARDED, LOCAL = "public address", "forwarded port", "local network"
REACHED = ("", PUBLIC, FORWARDED, LOCAL)
"""How other peers can call a peer; empty if it does not say."""

_Why = Annotated[str, Meta(min_length=1, max_length=MAX_WHY_LETTERS)]
Failed = tuple[Step, Annotated[int, Meta(ge=1, le=MAX_TIMES)], _Why] | None
"""A failed round as it travels; None if none has failed."""
Scored = tuple[Step, Annotated[float, Meta(ge=0, le=1)], Annotated[float, Meta(ge=0)]] | None
"""The result of a test as it travels; None if there was no test."""
_Traffic = Annotated[int, Meta(ge=0, le=MAX_TRAFFIC_BYTES)]
Profiled = (
    tuple[
        Annotated[str, Meta(max_length=MAX_DEVICE_LETTERS)],
        Annotated[str, Meta(max_length=MAX_VERSION_LETTERS)],
        Annotated[int, Meta(ge=0, lt=len(REACHED))],
        Annotated[float, Meta(ge=0, le=MAX_UPLOAD)] | None,
        _Traffic,
        _Traffic,
    ]
    | None
)
"""The profile of a peer's machine as it travels; None if it says nothing."""


def shortened(text: str, most_letters: int, most_bytes: int) -> str:
    """The printable characters of a text, cut to so many letters and bytes of UTF-8."""
    printable = "".join(letter for letter in text[:most_letters] if letter.isprintable())
    return printable.encode()[:most_bytes].decode(errors="ignore")


@dataclass(frozen=True)
class FailedRound:
    """The last round that gave a peer no average.

    Args:
        step: the update that it was to make
        times: rounds of that step that have failed so far, for this peer
        why: why it failed, as the end of a sentence, with the names of lost or blamed members
    """

    step: int
    times: int
    why: str

    def to_wire(self) -> Failed:
        """As a field of a message."""
        return self.step, self.times, self.why

    @classmethod
    def after(cls, before: FailedRound | None, step: int, why: str) -> FailedRound:
        """The note about one more failed round.

        Args:
            before: the note so far
            step: the update that the round was to make
            why: why it failed; cut if it is too long
        """
        times = before.times + 1 if before is not None and before.step == step else 1
        short = shortened(why, MAX_WHY_LETTERS, MAX_WHY_BYTES)
        return cls(min(step, MAX_STEP), min(times, MAX_TIMES), short or "it is not known why")

    @classmethod
    def from_wire(cls, failed: Failed) -> FailedRound | None:
        """The note in a field that was read with the bounds of `Failed`.

        Raises:
            ValueError: its reason is not printable, or has too many bytes
        """
        if failed is None:
            return None
        step, times, why = failed
        if not why.isprintable() or len(why.encode()) > MAX_WHY_BYTES:
            raise ValueError("a reason that is not printable, or too long")
        return cls(step, times, why)


@dataclass(frozen=True)
class Score:
    """A peer's result on the test samples.

    Args:
        step: global updates that the weights have seen
        accuracy: fraction of the samples, 0 to 1
        loss: mean loss over the samples
    """

    step: int
    accuracy: float
    loss: float

    def to_wire(self) -> Scored:
        """As a field of a message."""
        return self.step, float(self.accuracy), float(self.loss)

    @classmethod
    def from_wire(cls, tested: Scored) -> Score | None:
        """The result in a field that was read with the bounds of `Scored`.

        Raises:
            ValueError: a number is not finite
        """
        if tested is None:
            return None
        if not all(map(math.isfinite, tested)):
            raise ValueError("a test result that is not finite")
        return cls(*tested)


@dataclass(frozen=True)
class Profile:
    """What a peer says of its machine and its line. All of it is unproven, and the peer may withhold each part.

    Args:
        device: devices on which it computes, such as "4 × NVIDIA H100"; empty if it does not say
        version: version of its software; empty if it does not say
        reached: how other peers can call it, one of `REACHED`
        upload: bytes per second that it has sent in the fastest of its latest averages, so that its line carries at
            least that; None if it does not know, or does not say
        sent: bytes sent for rounds, states and ledgers since it started
        received: the same, received
    """

    device: str = ""
    version: str = ""
    reached: str = ""
    upload: float | None = None
    sent: int = 0
    received: int = 0

    def to_wire(self) -> Profiled:
        """As a field of a message; texts that are too long are cut."""
        return (
            shortened(self.device, MAX_DEVICE_LETTERS, MAX_DEVICE_BYTES),
            shortened(self.version, MAX_VERSION_LETTERS, MAX_VERSION_LETTERS),
            REACHED.index(self.reached),
            None if self.upload is None else float(min(self.upload, MAX_UPLOAD)),
            min(self.sent, MAX_TRAFFIC_BYTES),
            min(self.received, MAX_TRAFFIC_BYTES),
        )

    @classmethod
    def from_wire(cls, profiled: Profiled) -> Profile | None:
        """The profile in a field that was read with the bounds of `Profiled`.

        Raises:
            ValueError: a text is not printable, or has too many bytes
        """
        if profiled is None:
            return None
        device, version, reached, upload, sent, received = profiled
        if not device.isprintable() or len(device.encode()) > MAX_DEVICE_BYTES:
            raise ValueError("a device that is not printable, or too long")
        if not version.isprintable() or not version.isascii():
            raise ValueError("a version that is not printable ASCII")
        return cls(device, version, REACHED[reached], upload, sent, received)
