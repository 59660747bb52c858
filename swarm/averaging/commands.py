"""Commands of the trainer to its averaging process. They cross a pipe in their order, and none waits for another."""

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
    """Meet other peers, and average with them.

    Args:
        ticket: what this peer brings
        members: peers that are expected, this peer included
        target: target of this step, which the organiser may change; a group with fewer samples disperses
        sound: steps of the states to which this peer can go back
        work: what this peer has computed, where members check each other's work
        left_out: peers that this peer does not follow, even if other peers do
        patience_seconds: how long a leader waits for missing peers
        timeout_seconds: seconds after which the round is given up
        compute_seconds: seconds that this peer has computed for it; a wait for a member is too long only against these
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
    """Change the peers that a leader waits for, as peers come and go."""

    peer_ids: Sequence[PeerID]


@dataclass(frozen=True)
class SetStep:
    """Note that this peer works on this step, with weights of this lineage."""

    step: int
    lineage: bytes | None


@dataclass(frozen=True)
class Followed:
    """Note that this peer has made an update after other peers, which gave weights of this lineage."""

    lineage: bytes


@dataclass(frozen=True)
class KeepAverage:
    """Keep a copy of the vector for other peers: it holds the average of an update that this peer makes alone."""

    step: int
    before: bytes
    after: bytes
    future: MPFuture


@dataclass(frozen=True)
class DownloadState:
    """Download the state, or averages, from the first of some donors that has it.

    Args:
        donors: peers that may have it, the best first
        request: what is asked for
        future: becomes a Downloaded, or raises a NoState
    """

    donors: Sequence[PeerID]
    request: DownloadRequest
    future: MPFuture


@dataclass(frozen=True)
class TookOver:
    """Forget what rounds have left out: the trainer holds other weights than those of these rounds."""


@dataclass(frozen=True)
class CancelDownload:
    """Give up the download that is running, if any."""


@dataclass(frozen=True)
class SetAdmission:
    """Take over the certificate that this peer shows from now on, and the organiser's lists.

    Args:
        certificate: this peer's certificate, as it was signed
        lists: the organiser's lists by kind, as they were signed
    """

    certificate: bytes
    lists: Mapping[str, bytes]


@dataclass(frozen=True)
class CompareOrders:
    """Compare the organiser's orders with a peer that seems to follow other ones; afterwards both know all of them.

    Args:
        peer: the peer to call; None: no peer is called
        ticket: a listener's ticket for the step in question
        future: becomes the list of orders that this process has then, as it was signed
    """

    peer: PeerID | None
    ticket: Ticket
    future: MPFuture


@dataclass(frozen=True)
class Finish:
    """Tell when no peer reads from this one any more."""

    future: MPFuture
