"""A peer's progress record: what it tells all other peers about itself. Readers do not trust it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

import msgspec
from hivemind.p2p import PeerID
from msgspec import Meta

from swarm.protocol.attestation import Attestation
from swarm.protocol.notes import Failed, FailedRound, Profile, Profiled, Score, Scored
from swarm.protocol.wire import LINEAGE_BYTES, Lineage, Samples, Step, from_wire, to_wire
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS

TOLERATED_SECONDS = 1.0  # a clock may be off by this much: records are as old anyway
MAX_OFF_SECONDS = 3.5  # the DHT admits clocks that are 3 s off; a greater difference is the age of the record
FUTURE_SECONDS = 5.0  # clocks agree within 3 s (the DHT checks that); a record from later than this is refused
MAX_RATE = 1e7  # samples per second
MAX_NAME_LENGTH = 64
MAX_GRANULARITY = 1e6

JOINING, WAITING, TRAINING = "joining", "waiting for peers", "training"
AVERAGING, VALIDATING, PAUSED = "averaging", "validating", "paused"
PHASES = (JOINING, WAITING, TRAINING, AVERAGING, VALIDATING, PAUSED)
HELPING = "helping"  # shown for a helper while the other peers train; not on the wire

MAX_RECORD_BYTES = 1024
Peer = TypeVar("Peer")
_Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
_Rate = Annotated[float, Meta(ge=0, le=MAX_RATE)]
_Phase = Annotated[int, Meta(ge=0, lt=len(PHASES))]
_RECORD = msgspec.msgpack.Decoder(
    tuple[
        _Name,
        Step,
        Samples,
        _Rate,
        float,
        float,
        bool,
        _Phase,
        float,
        float,
        bool,
        Lineage,
        Attestation | None,
        bool,
        Failed,
        Scored,
        float,
        Profiled,
    ]
)


@dataclass(frozen=True)
class PeerProgress:
    """One peer's record.

    Args:
        name: public name
        step: global updates that its weights have seen
        ahead: the next update is on its way, and the peer computes for the one after
        samples: samples that it has accumulated for the update it computes for
        rate: samples per second while it computes
        joined: DHT time in seconds when it joined, or came back after the swarm had gone on without it
        time: DHT time in seconds of this record
        client_mode: the peer cannot be dialled
        phase: what the peer is doing, one of `PHASES`
        loss: mean training loss of its last step, nan if it has none
        accuracy: its last validation accuracy between 0 and 1, nan if it has none
        lineage: names the history of updates that its weights came out of, or at step 0 the weights themselves
        attested: digest and sketch of the state that it held at this step or shortly before; None if it has none
        helps: the peer is a helper, which trains nothing
        failed: its last round that gave no average, for people to read; None if there was none
        tested: its last result on the test samples, None if it tests nothing
        granularity: seconds of computing for its last update over those of the average, nan if it has none
        profile: describes its machine and its line, for people to read; None if it has none
    """

    name: str
    step: int
    samples: int
    rate: float
    joined: float
    time: float
    client_mode: bool
    phase: str
    loss: float = math.nan
    accuracy: float = math.nan
    ahead: bool = False
    lineage: bytes = bytes(LINEAGE_BYTES)
    attested: Attestation | None = None
    helps: bool = False
    failed: FailedRound | None = None
    tested: Score | None = None
    granularity: float = math.nan
    profile: Profile | None = None

    @property
    def round(self) -> int:
        """Number of updates before the one that the peer computes for."""
        return self.step + self.ahead

    @property
    def is_in_round(self) -> bool:
        """Whether an update is on its way."""
        return self.ahead or self.phase == AVERAGING

    @property
    def shown_phase(self) -> str:
        """What the peer is doing, for people to read."""
        return HELPING if self.helps and self.phase == TRAINING else self.phase

    def to_bytes(self) -> bytes:
        return to_wire(
            self.name,
            self.step,
            self.samples,
            float(self.rate),
            float(self.joined),
            float(self.time),
            self.client_mode,
            PHASES.index(self.phase),
            float(self.loss),
            float(self.accuracy),
            self.ahead,
            self.lineage,
            self.attested,
            self.helps,
            self.failed and self.failed.to_wire(),
            self.tested and self.tested.to_wire(),
            float(self.granularity),
            self.profile and self.profile.to_wire(),
        )

    @classmethod
    def from_bytes(cls, data: bytes, now: float) -> PeerProgress:
        """Decode and check a record.

        Raises:
            ValueError: for everything that no honest peer can send
        """
        fields = from_wire(_RECORD, data, MAX_RECORD_BYTES)
        name, step, samples, rate, joined, at, client_mode, phase, loss, accuracy, ahead, lineage, *rest = fields
        attested, helps, failed, tested, granularity, profiled = rest
        if not name.isprintable():
            raise ValueError("a name that is not printable")
        if not (math.isnan(accuracy) or 0 <= accuracy <= 1) or math.isinf(loss):
            raise ValueError("a loss or an accuracy out of bounds")
        if not (math.isnan(granularity) or 0 <= granularity <= MAX_GRANULARITY):
            raise ValueError("a granularity out of bounds")
        if not 0 <= joined <= at <= now + FUTURE_SECONDS:
            raise ValueError("a time out of bounds")
        if helps and (samples or rate):
            raise ValueError("a helper that computes")
        return cls(
            *(name, step, samples, rate, joined, at, client_mode, PHASES[phase], loss, accuracy, ahead, lineage),
            attested,
            helps,
            FailedRound.from_wire(failed),
            Score.from_wire(tested),
            granularity,
            Profile.from_wire(profiled),
        )

    def samples_by(self, now: float, round: int, computing_since: float, in_last_group: bool) -> float:
        """Samples that the peer probably has by `now` for the update after `round`. Records are always a little old.

        Args:
            computing_since: since when the reading peer computes without a pause; other peers pause when it does
            in_last_group: the peer finished the last round with the reading peer, whatever its record says
        """
        since = max(self.time, computing_since)
        if self.round == round:
            # Peers of one group validate at the same step. When the reading peer computes again, they probably do, too.
            computes = self.phase == TRAINING or (self.phase == VALIDATING and in_last_group)
            return self.samples + (self._samples_in(now - since) if computes else 0.0)
        return self._samples_in(now - computing_since) if in_last_group and self.round < round else 0.0

    def _samples_in(self, seconds: float) -> float:
        longest_seconds = 2 * DEFAULT_TIMEOUTS.report_seconds  # the peer's own time limits are not known here
        return self.rate * min(max(0.0, seconds), longest_seconds)


class Clocks:
    """Estimates how far the clocks of other peers are off. The DHT admits peers whose clocks are up to 3 s off.

    A record is never read before it was written, and now and then it is read at once. So the least age that a peer's
    records ever seemed to have is the difference of the two clocks.
    """

    def __init__(self) -> None:
        self._least_ages: dict[PeerID, float] = {}

    def corrected(self, records: Mapping[PeerID, PeerProgress], now: float) -> dict[PeerID, PeerProgress]:
        """Return the records, with times by this peer's clock where the other peer's clock is clearly off."""
        ages = {peer: min(now - record.time, self._least_ages.get(peer, math.inf)) for peer, record in records.items()}
        self._least_ages = ages
        return {
            peer: replace(record, time=record.time + age) if TOLERATED_SECONDS < abs(age) < MAX_OFF_SECONDS else record
            for (peer, record), age in zip(records.items(), ages.values(), strict=True)
        }


class OwnClock:
    """Notices when the clock of this machine is set, as opposed to time that passes.

    It compares the wall clock with the monotonic clock. On Linux that is `CLOCK_BOOTTIME`, which also counts while a
    laptop sleeps.
    """

    def __init__(self) -> None:
        self._ahead = self._ahead_now()

    @staticmethod
    def _ahead_now() -> float:
        return time.time() - time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))

    def set_by_seconds(self) -> float:
        """Seconds by which the clock was set since the last call; 0.0 if it is no more than `TOLERATED_SECONDS`."""
        before, self._ahead = self._ahead, self._ahead_now()
        seconds = self._ahead - before
        return seconds if abs(seconds) > TOLERATED_SECONDS else 0.0


def under_way(peers: Iterable[Peer]) -> list[Peer]:
    """The peers whose steps tell how far the run is: all but those that join or wait, or all if there are only these.

    A joiner says that it is at step 0 until it has the state.

    Args:
        peers: records, or other objects with a `phase`
    """
    peers = list(peers)
    return [peer for peer in peers if peer.phase not in (JOINING, WAITING)] or peers


def step_of_most(steps: Sequence[int]) -> int:
    """The step that most peers say they have reached: the lower median, so that one high claim changes nothing."""
    return sorted(steps)[(len(steps) - 1) // 2]
