"""What a history is made of: peers as they were seen last, points of the curves, tests of the weights, and events."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from swarm.membership.progress_record import JOINING, PAUSED, WAITING, PeerProgress
from swarm.protocol.notes import MAX_TRAFFIC_BYTES, FailedRound, Profile, Score

LOST_SECONDS = 5.0
"""Time without a new record after which a peer counts as lost. A peer writes one record a second."""
CLOCK_DRIFT = 0.05
"""Seconds by which two clocks may drift apart in a second. So the desk also follows a clock that was set a little."""
MOST_BYTES_A_SECOND = 1.25e9
"""Most bytes per second that a peer is believed to send: 10 Gbit/s."""
MAX_LOSS = 1e6

State = Literal["here", "lost", "left"]


@dataclass
class PeerSeen:
    """A peer, as its last record describes it.

    Args:
        name: public name
        step: updates that its weights have seen
        rate: samples per second while it computes, as it claims
        client_mode: other peers cannot call it
        phase: what it does
        joined: DHT time in seconds when it joined, or came back
        record_time: DHT time in seconds of its last record
        seen_at: when that record was written, by this machine's clock, seconds since 1970
        loss: of its last step; None if it has none
        accuracy: of its last validation, 0 to 1; None if it has none
        state: here; lost: it fell silent; left: it took its record away
        samples: that it gave to all updates so far, by the pace that it claims
        least_age: smallest age that a record of it seemed to have lately, in seconds: the difference of the two clocks
        missed: looks in a row at which it had no record
        helps: it is a helper, which trains nothing
        failed: its last round that gave no average
        tested: its last result on the test samples
        profile: what it says of its machine and its line; None if it has never said anything
        sent: bytes that it says it has sent, also before it was started again
        received: bytes that it says it has received, also before it was started again
    """

    name: str
    step: int
    rate: float
    client_mode: bool
    phase: str
    joined: float
    record_time: float
    seen_at: float
    loss: float | None = None
    accuracy: float | None = None
    state: State = "here"
    samples: float = 0.0
    least_age: float | None = None
    missed: int = 0
    helps: bool = False
    failed: FailedRound | None = None
    tested: Score | None = None
    profile: Profile | None = None
    sent: int = 0
    received: int = 0

    @property
    def computes(self) -> bool:
        """Whether the peer takes part in the next update."""
        return self.state == "here" and self.phase not in (JOINING, WAITING, PAUSED)

    def read(self, record: PeerProgress, now: float) -> bool:
        """Take over a record. Returns whether it is a new one.

        Args:
            now: seconds since 1970
        """
        self.missed = 0
        if record.time <= self.record_time:
            return False
        self.name, self.step, self.rate, self.phase = record.name, record.step, record.rate, record.shown_phase
        self.client_mode, self.joined, self.helps = record.client_mode, record.joined, record.helps
        self.loss, self.accuracy = _finite(record.loss), _finite(record.accuracy)
        self.failed, self.tested = record.failed, record.tested
        seconds, seen_before = record.time - self.record_time, self.seen_at
        age = now - record.time
        self.least_age = self._least_age(age, seconds)
        self.record_time, self.seen_at = record.time, now - (age - self.least_age)
        if math.isfinite(seconds):  # the peer sets both times: they are believed as far as this machine's clock allows
            seconds = min(seconds, max(0.0, self.seen_at - seen_before))
        if record.profile is not None:
            self._count(record.profile, seconds)
            self.profile = record.profile
        return True

    def _least_age(self, age: float, seconds: float) -> float:
        """The new smallest age of a record, which is how far the two clocks differ.

        A living peer's record is never much older than usual. If one is, a clock was set, and its age counts.

        Args:
            age: of the new record by this machine's clock, in seconds
            seconds: since the record before
        """
        if self.least_age is None:
            return age
        expected = self.least_age + CLOCK_DRIFT * seconds
        return age if age - expected > LOST_SECONDS else min(age, expected)

    def _count(self, told: Profile, seconds: float) -> None:
        """Add what the peer has sent and received since its record before.

        A peer counts from its own start on, so its numbers begin at 0 again when it is started again. What it says it
        has sent before its first record counts as it is: the desk has not seen how long that took.

        Args:
            seconds: since the record before; infinite if this is the first one
        """
        last = self.profile or Profile()
        sent = told.sent - last.sent if told.sent >= last.sent else told.sent
        received = told.received - last.received if told.received >= last.received else told.received
        most = int(min(MOST_BYTES_A_SECOND * seconds, MAX_TRAFFIC_BYTES))
        self.sent = min(self.sent + min(sent, most), MAX_TRAFFIC_BYTES)
        self.received = min(self.received + min(received, most), MAX_TRAFFIC_BYTES)


@dataclass
class Point:
    """The swarm at one moment.

    Args:
        time: seconds since 1970
        step: updates made
        loss: median of the peers; None if none of them has one
        accuracy: median of the peers, 0 to 1; None before one is known
        samples_per_second: of all peers together
        updates_per_minute: None as long as too few have been seen
        peers: number of peers that are there
        bytes_per_second: that the peers send, together; None as long as no peer says
    """

    time: float
    step: int
    loss: float | None
    accuracy: float | None
    samples_per_second: float
    updates_per_minute: float | None
    peers: int
    bytes_per_second: float | None = None


@dataclass
class Test:
    """The result of a test of the weights on the test samples, as one peer states it.

    Args:
        step: global updates that the weights had seen
        accuracy: 0 to 1
        loss: mean over the samples
        peer_id: of the peer that says so
        name: of that peer
    """

    step: int
    accuracy: float
    loss: float
    peer_id: str
    name: str


@dataclass
class Event:
    """Something that happened, at a time in seconds since 1970."""

    time: float
    text: str


def _finite(value: float) -> float | None:
    """A loss or an accuracy; None for a number that cannot be one, such as nan."""
    return value if 0 <= value < MAX_LOSS else None
