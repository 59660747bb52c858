"""What the trainer lets its averaging process do. Each crosses a pipe, in this order, and none waits for another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hivemind.p2p import PeerID
from hivemind.utils import MPFuture

from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.messages import Member, Ticket
from swarm.protocol.work import OwnWork
from swarm.state_sync.download import DownloadRequest


@dataclass(frozen=True)
class RunRound:
    """Meet others, and average with them.

    Args:
        ticket: what this peer brings
        members: who is expected, this peer included
        target: a group with fewer samples disperses; of this step, since the organiser may change it
        sound: steps of the states to which this peer can go back
        work: what this peer has computed, where members check each other's
        left_out: who does not lead this peer, whoever else follows it
        patience_seconds: how long a leader waits for those who are missing
        timeout_seconds: after which the round is given up
        compute_seconds: that this peer has computed for it; a member may be slow as long as that is slower
        future: becomes a RoundReport, or raises a RoundEnded
    """

    ticket: Ticket
    members: Sequence[Member]
    target: BatchTarget
    sound: Sequence[int] = ()
    work: OwnWork | None = None
    left_out: frozenset[PeerID] = frozenset()
    patience_seconds: float = 0.0
    timeout_seconds: float = 0.0
    compute_seconds: float = 0.0
    future: MPFuture = field(default_factory=MPFuture)


@dataclass(frozen=True)
class CancelRound:
    """Give up the round that is running, if any."""


@dataclass(frozen=True)
class Expect:
    """Wait for these, as peers come and go."""

    peer_ids: Sequence[PeerID]


@dataclass(frozen=True)
class SetStep:
    """This peer works on this step, with weights of this lineage."""

    step: int
    lineage: bytes | None


@dataclass(frozen=True)
class Followed:
    """This peer has made an update after others, out of which came weights of this lineage."""

    lineage: bytes


@dataclass(frozen=True)
class KeepAverage:
    """The vector holds the average of an update that this peer makes alone: others may want it."""

    step: int
    before: bytes
    after: bytes
    future: MPFuture


@dataclass(frozen=True)
class DownloadState:
    """Take over the state, or averages, from the first of these who has it.

    Args:
        donors: the best first
        request: what is asked for
        future: becomes a Downloaded, or raises a NoState
    """

    donors: Sequence[PeerID]
    request: DownloadRequest
    future: MPFuture


@dataclass(frozen=True)
class TookOver:
    """The trainer holds other weights: what rounds of the old ones have left out is forgotten."""


@dataclass(frozen=True)
class CancelDownload:
    """Nobody waits for it any more."""


@dataclass(frozen=True)
class SetAdmission:
    """What this peer shows others from now on, and what the organiser has decided.

    Args:
        certificate: of this peer, as it was signed
        lists: by kind, as they were signed
    """

    certificate: bytes
    lists: Mapping[str, bytes]


@dataclass(frozen=True)
class CompareOrders:
    """Compare the organiser's orders with somebody who does not follow the same ones, it seems: then both know all.

    Args:
        peer: whom to call; None: nobody
        ticket: of a listener, for the step in question
        future: becomes the list that this process has then, as it was signed
    """

    peer: PeerID | None
    ticket: Ticket
    future: MPFuture


@dataclass(frozen=True)
class Finish:
    """Tell when nobody reads from this peer any more."""

    future: MPFuture
