"""The words of a round: who takes part, what each brings, how it ended.

A *round* is the communication that ends a step. Everything here crosses a process or a network boundary, so it is
small, picklable, bounded and checked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
from hivemind.p2p import PeerID

MAX_STEP = 10**9
MAX_SAMPLES = 2**31
MAX_GROUP_SIZE = 1024
LINEAGE_BYTES = 16
MAX_SKETCH = 16


class RoundFailed(Exception):  # noqa: N818 (reads as what happened)
    """The round did not give this peer a complete average; nothing was applied and nothing accumulated is lost.

    :param reason: the end of a sentence
    :param lost: members that are not there any more
    """

    def __init__(self, reason: str, lost: frozenset[PeerID] = frozenset()):
        super().__init__(reason, lost)
        self.lost = lost

    def __str__(self) -> str:
        return self.args[0]


class Behind(Exception):  # noqa: N818
    """The swarm has gone on without this peer: its state has to be downloaded. ``args[0]`` is the swarm's step."""

    def __str__(self) -> str:
        return "the swarm has gone on without this peer"


class ShortBatch(Exception):  # noqa: N818
    """A ``group`` met before it had the samples of an update: all its members compute on."""

    def __init__(self, group: Group):
        super().__init__(group)
        self.group = group

    def __str__(self) -> str:
        return f"{self.group.samples} samples are too few"


class Refused(Exception):  # noqa: N818
    """Another peer will never average with this one (another model, another protocol)."""


@dataclass(frozen=True)
class Member:
    """A peer that is expected in the next round, as its progress record says.

    :param peer_id: libp2p peer id
    :param joined: DHT time in seconds when it joined, or came back; the senior (smallest) full peer leads
    :param client_mode: it cannot be dialled, so it neither leads nor reduces
    :param awaited: a group closes without it if it is not
    :param proven: it has been in a group with this peer since it joined; who has not, may say what it likes
    """

    peer_id: PeerID
    joined: float
    client_mode: bool
    awaited: bool = True
    proven: bool = False

    @property
    def seniority(self) -> tuple[bool, float, bytes]:
        """Sort key that all who have met compute alike: the first full peer in this order leads."""
        return not self.proven, self.joined, self.peer_id.to_bytes()


@dataclass(frozen=True)
class Ticket:
    """What a member brings to a round; every member sees every ticket before any gradient travels.

    :param step: the global update that this peer wants to finish
    :param samples: samples in its gradient, which is its weight in the average; 0 means that it only listens
    :param client_mode: it cannot be dialled
    :param loss: mean training loss over its samples
    :param lineage: name of the round that its weights came out of; equal steps of different histories never mix
    :param sketch: of these weights (:mod:`swarm.sketch`); empty if it is not known
    :param warm: whether its PowerSGD goes on from the round of this lineage
    """

    step: int
    samples: int
    client_mode: bool
    loss: float
    lineage: bytes
    sketch: tuple[float, ...] = ()
    warm: bool = False

    def to_bytes(self) -> bytes:
        return msgpack.packb(tuple(vars(self).values()))

    @classmethod
    def from_bytes(cls, data: bytes) -> Ticket:
        """:raises ValueError: whatever is wrong with it; the sender is not trusted"""
        if len(data) > 256:
            raise ValueError("a ticket of more than 256 bytes")
        try:
            step, samples, client_mode, loss, lineage, sketch, warm = msgpack.unpackb(data)
        except Exception as error:
            raise ValueError(f"not a ticket: {error}") from error
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            raise ValueError("a step out of bounds")
        if type(samples) is not int or not 0 <= samples <= MAX_SAMPLES:
            raise ValueError("a number of samples out of bounds")
        if type(client_mode) is not bool or type(warm) is not bool or type(loss) is not float:
            raise ValueError("a field of the wrong type")
        if type(lineage) is not bytes or len(lineage) != LINEAGE_BYTES:
            raise ValueError("a lineage of the wrong size")
        if type(sketch) is not list or len(sketch) > MAX_SKETCH or any(type(number) is not float for number in sketch):
            raise ValueError("a sketch out of bounds")
        sketch = tuple(sketch) if all(map(math.isfinite, sketch)) else ()
        return cls(step, samples, client_mode, loss if math.isfinite(loss) else math.nan, lineage, sketch, warm)


@dataclass(frozen=True)
class Group:
    """A closed group: the same on all its members.

    :param group_id: random name of this round
    :param peer_ids: members; the i-th reduces the i-th share of the vector (client-mode members: no share)
    :param tickets: one for each member, in the same order
    """

    group_id: bytes
    peer_ids: tuple[PeerID, ...]
    tickets: tuple[Ticket, ...]

    @property
    def samples(self) -> int:
        return sum(ticket.samples for ticket in self.tickets)


@dataclass(frozen=True)
class RoundReport:
    """What one peer saw of one round.

    :param group: who took part, with what weight
    :param parts_expected: parts of the average that this peer should receive from the reducers, itself included
    :param parts_received: parts that it did receive
    :param inputs_expected: parts of other peers' gradients that this peer should have reduced, its own included
    :param inputs_received: parts that it did reduce
    :param meeting_seconds: from entering the round to a closed group
    :param exchange_seconds: from a closed group to the complete average
    :param bytes_sent: of gradients and averages, as messages, before the network's own headers
    :param bytes_received: the same
    :param lost: members that were found not to be there any more
    """

    group: Group
    parts_expected: int
    parts_received: int
    inputs_expected: int
    inputs_received: int
    meeting_seconds: float
    exchange_seconds: float
    bytes_sent: int
    bytes_received: int
    lost: frozenset[PeerID] = frozenset()

    @classmethod
    def of(cls, group: Group, runners: Sequence[Any] = (), **known: Any) -> RoundReport:
        """Of all-reduces that are over; each counts parts and bytes under the names that they have here."""
        counts = ("parts_expected", "parts_received", "inputs_expected", "inputs_received")
        counts += ("bytes_sent", "bytes_received")
        return cls(group, **{name: sum(getattr(runner, name) for runner in runners) for name in counts}, **known)

    @property
    def received_fraction(self) -> float:
        """Of the parts of the average and, as a reducer, of the others' gradients."""
        expected = self.parts_expected + self.inputs_expected
        return (self.parts_received + self.inputs_received) / expected if expected else 1.0

    @property
    def complete(self) -> bool:
        """Every part of the average arrived, and every part that this peer reduced had all its senders."""
        return self.parts_received == self.parts_expected and self.inputs_received == self.inputs_expected

    @property
    def loss(self) -> float:
        """Mean training loss over the samples of the whole group."""
        weighted = [(t.samples, t.loss) for t in self.group.tickets if t.samples and math.isfinite(t.loss)]
        total = sum(samples for samples, _ in weighted)
        return sum(samples * loss for samples, loss in weighted) / total if total else math.nan


@dataclass(frozen=True)
class CollaborationOptions:
    """How patient this peer is; nothing here has to agree with the others.

    :param min_peers: do not begin before so many peers are there
    :param matchmaking_seconds: how long to wait at the end of a step for peers that are missing
    :param averaging_timeout_seconds: give up a round (and try again with those who are left) after so long
    :param join_timeout_seconds: give up joining when nobody hands over the state for so long
    :param overlap: compute for the next update while this one is averaged, on weights that are one update old
    """

    min_peers: int = 1
    matchmaking_seconds: float = 5.0
    averaging_timeout_seconds: float = 60.0
    join_timeout_seconds: float = 120.0
    overlap: bool = False


@dataclass(frozen=True)
class StepReport:
    """How a global update came about.

    :param step: global updates so far, this one included
    :param num_peers: peers whose gradients are in it
    :param samples: samples in it, over all peers
    :param own_samples: samples that this peer put in
    :param loss: mean training loss over all its samples
    :param compute_seconds: from micro-batch to micro-batch; waiting and validating do not count
    :param blocked_seconds: while nothing was computed because the round had to end first
    :param round: what the exchange looked like, None if this peer was alone
    :param apply_seconds: from the average to updated weights
    """

    step: int
    num_peers: int
    samples: int
    own_samples: int
    loss: float
    compute_seconds: float
    blocked_seconds: float
    round: RoundReport | None
    apply_seconds: float = 0.0

    @classmethod
    def of(
        cls, ticket: Ticket, compute_seconds: float, blocked_seconds: float, report: RoundReport | None
    ) -> StepReport:
        """Of a round, or of a ticket that was averaged with nobody's."""
        return cls(
            step=ticket.step + 1,
            num_peers=len(report.group.peer_ids) if report else 1,
            samples=report.group.samples if report else ticket.samples,
            own_samples=ticket.samples,
            loss=report.loss if report else ticket.loss,
            compute_seconds=compute_seconds,
            blocked_seconds=blocked_seconds,
            round=report,
        )


@dataclass(frozen=True)
class RoundEvent:
    """How a round ended for one peer: a line of ``rounds.jsonl``.

    :param step: the global update that it was to make
    :param outcome: "averaged", "alone", or why it failed
    :param members: ids of those who took part, in the order of their shares
    :param samples: of all of them
    :param own_samples: of this peer; after a failure they count for the next round
    :param compute_seconds: from micro-batch to micro-batch; waiting and validating do not count
    :param waiting_seconds: while nothing was computed because the round had to end first
    :param meeting_seconds: matchmaking
    :param exchange_seconds: transfer
    :param apply_seconds: from the average to updated weights
    :param bytes_sent: of gradients and averages
    :param bytes_received: the same
    :param received_fraction: of the parts that this peer should have received
    """

    step: int
    outcome: str
    members: tuple[str, ...]
    samples: int
    own_samples: int
    compute_seconds: float
    waiting_seconds: float
    meeting_seconds: float = 0.0
    exchange_seconds: float = 0.0
    apply_seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    received_fraction: float = 0.0

    @classmethod
    def of_failure(cls, ticket: Ticket, error: Exception, compute_seconds: float, waiting_seconds: float) -> RoundEvent:
        """A round that gave no average."""
        return cls(ticket.step + 1, str(error), (), 0, ticket.samples, compute_seconds, waiting_seconds)

    @classmethod
    def of_update(cls, report: StepReport) -> RoundEvent:
        """The round behind a global update."""
        common = (report.samples, report.own_samples, report.compute_seconds, report.blocked_seconds)
        exchanged = report.round
        if exchanged is None or len(exchanged.group.peer_ids) == 1:
            return cls(report.step, "alone", (), *common, apply_seconds=report.apply_seconds, received_fraction=1.0)
        return cls(
            report.step,
            "averaged",
            tuple(peer_id.to_base58() for peer_id in exchanged.group.peer_ids),
            *common,
            exchanged.meeting_seconds,
            exchanged.exchange_seconds,
            report.apply_seconds,
            exchanged.bytes_sent,
            exchanged.bytes_received,
            exchanged.received_fraction,
        )
