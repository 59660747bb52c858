"""One peer's progress record: what it says about itself to everybody, read as the word of a stranger."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
from hivemind.p2p import PeerID
from msgspec import Meta

from swarm.protocol.attestation import Attestation
from swarm.protocol.notes import Failed, FailedRound, Profile, Profiled, Score, Scored
from swarm.protocol.wire import LINEAGE_BYTES, Lineage, Samples, Step, from_wire, to_wire
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS

TOLERATED_SECONDS = 1.0  # that a clock may be off: records are as old anyway
MAX_OFF_SECONDS = 3.5  # the DHT admits 3 s; a record that is older is nobody's clock
FUTURE_SECONDS = 5.0  # clocks agree within 3 s (the DHT checks that); later than this is nonsense
MAX_RATE = 1e7  # samples per second
MAX_NAME_LENGTH = 64
MAX_GRANULARITY = 1e6

JOINING, WAITING, TRAINING = "joining", "waiting for peers", "training"
AVERAGING, VALIDATING, PAUSED = "averaging", "validating", "paused"
PHASES = (JOINING, WAITING, TRAINING, AVERAGING, VALIDATING, PAUSED)
HELPING = "helping"  # what a helper does while others train; not on the wire

MAX_RECORD_BYTES = 1024
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
        ahead: the next update is on its way, and what it computes is for the one after
        samples: samples it has accumulated for that update
        rate: samples per second while it computes
        joined: DHT time in seconds when it joined, or came back after the swarm had gone on without it
        time: DHT time in seconds of this record
        client_mode: it cannot be dialled
        phase: what it is doing, one of `PHASES`
        loss: mean training loss of its last step, nan if it has none
        accuracy: its last validation accuracy between 0 and 1, nan if it has none
        lineage: of its weights: which history of updates they came out of, or at step 0 which weights they are
        attested: what it says of the state that it held at this step or shortly before; None if it has nothing to say
        helps: it is a helper, which trains nothing
        failed: its last round that gave no average, for people to read; None if there was none
        tested: what it found on the test samples last, None if it tests nothing
        granularity: seconds of computing for its last update over those of the average, nan if it has none
        profile: of its machine and its line, for people to read; None if it says nothing
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
        """Number of updates before the one that it computes for."""
        return self.step + self.ahead

    @property
    def is_in_round(self) -> bool:
        """Whether an update is on its way."""
        return self.ahead or self.phase == AVERAGING

    @property
    def shown_phase(self) -> str:
        """What it is doing, for a person."""
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
        """Raises ValueError: for everything that no honest peer can send"""
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
        """Samples it probably has by `now` for the update after `round`; records are a little old always.

        Args:
            computing_since: since when this peer computes, without a pause; the others pause when it does
            in_last_group: it finished the last round with us, whatever its record says
        """
        since = max(self.time, computing_since)
        if self.round == round:
            # Peers of one group validate at the same step: when we compute again, they probably do.
            computes = self.phase == TRAINING or (self.phase == VALIDATING and in_last_group)
            return self.samples + (self._samples_in(now - since) if computes else 0.0)
        return self._samples_in(now - computing_since) if in_last_group and self.round < round else 0.0

    def _samples_in(self, seconds: float) -> float:
        longest_seconds = 2 * DEFAULT_TIMEOUTS.report_seconds  # its own time limits are not known here
        return self.rate * min(max(0.0, seconds), longest_seconds)


class Clocks:
    """How far the clocks of others are off, as far as their records show: the DHT admits whose is 3 s off.

    A record is never read before it was written, and now and then at once: the least age that it ever seemed to have is
    what the two clocks differ by.
    """

    def __init__(self) -> None:
        self._least_ages: dict[PeerID, float] = {}

    def corrected(self, records: Mapping[PeerID, PeerProgress], now: float) -> dict[PeerID, PeerProgress]:
        """These records with times of this peer's clock, where another one's is clearly off."""
        ages = {peer: min(now - record.time, self._least_ages.get(peer, math.inf)) for peer, record in records.items()}
        self._least_ages = ages
        return {
            peer: replace(record, time=record.time + age) if TOLERATED_SECONDS < abs(age) < MAX_OFF_SECONDS else record
            for (peer, record), age in zip(records.items(), ages.values(), strict=True)
        }


class OwnClock:
    """Notices when the clock of this machine is set, which is not the same as time that passes.

    The other clock also counts while a laptop sleeps, where the system has such a one (Linux).
    """

    def __init__(self) -> None:
        self._ahead = self._ahead_now()

    @staticmethod
    def _ahead_now() -> float:
        return time.time() - time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))

    def set_by_seconds(self) -> float:
        """Since it was asked last; 0.0 for what nobody notices."""
        before, self._ahead = self._ahead, self._ahead_now()
        seconds = self._ahead - before
        return seconds if abs(seconds) > TOLERATED_SECONDS else 0.0


def step_of_most(steps: Sequence[int]) -> int:
    """The step that most peers have reached, by what they say; of two, the lower: who claims more moves nothing."""
    return sorted(steps)[(len(steps) - 1) // 2]
