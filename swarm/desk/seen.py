"""What a history is made of: a peer as it was seen last, the swarm at one moment, what a peer has tested, an event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swarm.membership.progress_record import JOINING, PAUSED, WAITING, PeerProgress
from swarm.protocol.notes import MAX_TRAFFIC_BYTES, FailedRound, Profile, Score

LOST_SECONDS = 5.0
"""Without a new record: a peer writes one a second."""
CLOCK_DRIFT = 0.05
"""Seconds that two clocks may drift apart in each second: so one that was set a little is followed, too."""
MOST_BYTES_A_SECOND = 1.25e9
"""That a peer is believed to send: 10 Gbit/s."""
MAX_LOSS = 1e6

State = Literal["here", "lost", "left"]


@dataclass
class PeerSeen:
    """A peer as its last record has it.

    Args:
        joined: DHT time in seconds when it joined, or came back
        record_time: DHT time in seconds of its last record
        seen_at: when it was written, by this machine's clock, seconds since 1970
        least_age: that a record of it seemed to have lately, in seconds: what the two clocks differ by
        state: lost: it fell silent; left: it took its record away
        samples: in all updates so far, by the pace that it claims
        missed: looks at which it had no record
        helps: it is a helper, which trains nothing
        failed: its last round that gave no average
        tested: what it found on the test samples last
        profile: of its machine and its line; None if it has never said anything of them
        sent: bytes, as far as it says, also before it was started again
        received: the same
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
        """Whether it has a part in the next update."""
        return self.state == "here" and self.phase not in (JOINING, WAITING, PAUSED)

    def read(self, record: PeerProgress, now: float) -> bool:
        """Take over a record; whether it is a new one."""
        self.missed = 0
        if record.time <= self.record_time:
            return False
        self.name, self.step, self.rate, self.phase = record.name, record.step, record.rate, record.shown_phase
        self.client_mode, self.joined, self.helps = record.client_mode, record.joined, record.helps
        self.loss, self.accuracy = _finite(record.loss), _finite(record.accuracy)
        self.failed, self.tested = record.failed, record.tested
        if record.profile is not None:
            self._count(record.profile, record.time - self.record_time)
            self.profile = record.profile
        age = now - record.time
        self.least_age = self._least_age(age, record.time - self.record_time)
        self.record_time, self.seen_at = record.time, now - (age - self.least_age)
        return True

    def _least_age(self, age: float, seconds: float) -> float:
        """With a new record of that age, so long after the one before; no living peer's is much older than usual, so
        then a clock was set."""
        if self.least_age is None:
            return age
        expected = self.least_age + CLOCK_DRIFT * seconds
        return age if age - expected > LOST_SECONDS else min(age, expected)

    def _count(self, told: Profile, seconds: float) -> None:
        """It counts from its start on, so it begins at 0 again when it is started again."""
        if (last := self.profile) is None:
            self.sent, self.received = told.sent, told.received
            return
        sent = told.sent - last.sent if told.sent >= last.sent else told.sent
        received = told.received - last.received if told.received >= last.received else told.received
        most = int(MOST_BYTES_A_SECOND * seconds)
        self.sent = min(self.sent + min(sent, most), MAX_TRAFFIC_BYTES)
        self.received = min(self.received + min(received, most), MAX_TRAFFIC_BYTES)


@dataclass
class Point:
    """The swarm at one moment.

    Args:
        time: seconds since 1970
        samples_per_second: of all peers together
        updates_per_minute: None as long as too few have been seen
        peers: who are there
        bytes_per_second: that they send, together; None as long as nobody says
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
    """What one peer says that it has found on the test samples.

    Args:
        step: global updates that the weights had seen
        accuracy: 0 to 1
        peer_id: of who says so
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
    """A loss or an accuracy; what cannot be one is none."""
    return value if 0 <= value < MAX_LOSS else None
