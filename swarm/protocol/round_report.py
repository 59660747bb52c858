"""Reports of how a round ended for one peer, and of the update that it made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hivemind.p2p import PeerID

from swarm.protocol.messages import Blame, Group, RoundEnded, RoundFailed, Ticket
from swarm.protocol.work import Assignment


@dataclass(frozen=True)
class RoundReport:
    """What one peer saw of one round.

    Args:
        group: the members and their weights
        parts_expected: parts of the average that this peer should receive from the reducers, itself included
        parts_received: parts that it did receive
        inputs_expected: parts of the members' gradients that this peer should have reduced, its own included
        inputs_received: parts that it did reduce
        meeting_seconds: from entering the round to a closed group
        exchange_seconds: from a closed group to the complete average
        bytes_sent: bytes of gradients and averages, as messages, before the network's own headers
        bytes_received: the same, received
        lost: members that were found not to be there any more
        blamed: members to blame, each with the reason: it sent what no honest peer sends, is far too slow, or was found
            to lie as a reducer since the last round
        judged: whether this peer has compared the members' gradients, as a reducer
        outside: members whose gradients were far from the other members' in at least half of this peer's share
        codec: how the numbers travelled; empty if none did
        local_steps: local steps of each peer for this update, if all are equally fast; 0 where gradients are averaged
        share: fraction of the vector that this peer reduced
        line_kbps: speed of its line that this peer announced, in kbit/s; 0 if it is not known
        to_check: another member's work that this peer has to compute again before it makes the update
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
    blamed: Mapping[PeerID, Blame] = field(default_factory=dict)
    judged: bool = False
    outside: frozenset[PeerID] = frozenset()
    codec: str = ""
    local_steps: int = 0
    share: float = 0.0
    line_kbps: int = 0
    to_check: Assignment | None = None

    @classmethod
    def of(cls, group: Group, runners: Sequence[Any] = (), **known: Any) -> RoundReport:
        """A report of the all-reduces of one round.

        Args:
            group: the group
            runners: all-reduces that are over, with the counts of parts and bytes under the names of this class
            known: further fields of the report
        """
        counts = ("parts_expected", "parts_received", "inputs_expected", "inputs_received")
        counts += ("bytes_sent", "bytes_received")
        return cls(group, **{name: sum(getattr(runner, name) for runner in runners) for name in counts}, **known)

    @property
    def received_fraction(self) -> float:
        """Fraction of the expected parts that arrived: of the average and, as a reducer, of the members' gradients."""
        expected = self.parts_expected + self.inputs_expected
        return (self.parts_received + self.inputs_received) / expected if expected else 1.0

    @property
    def complete(self) -> bool:
        """Whether all parts of the average arrived, and all senders' parts of what this peer reduced."""
        return self.parts_received == self.parts_expected and self.inputs_received == self.inputs_expected

    @property
    def loss(self) -> float:
        """Mean training loss over the samples of the whole group, without members whose loss is not finite."""
        weighted = [(t.samples, t.loss) for t in self.group.tickets if t.samples and math.isfinite(t.loss)]
        total = sum(samples for samples, _ in weighted)
        return sum(samples * loss for samples, loss in weighted) / total if total else math.nan


@dataclass(frozen=True)
class StepReport:
    """How a global update came about.

    Args:
        step: global updates so far, this one included
        num_peers: peers whose gradients are in it
        samples: samples in it, over all peers
        own_samples: samples of this peer in it
        loss: mean training loss over all its samples
        compute_seconds: time of computing, from micro-batch to micro-batch; waiting and validating do not count
        blocked_seconds: time in which nothing was computed because the round had to end first
        round: the report of its round; None if this peer was alone
        apply_seconds: time from the average to updated weights
        ticket: this peer's ticket
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
    ticket: Ticket | None = None

    @property
    def granularity(self) -> float:
        """Seconds of computing over those of the average; nan without an average. Below 1, devices wait for lines."""
        seconds = self.round.exchange_seconds if self.round else 0.0
        return self.compute_seconds / seconds if seconds > 0 else math.nan

    @classmethod
    def of(
        cls, ticket: Ticket, compute_seconds: float, blocked_seconds: float, report: RoundReport | None
    ) -> StepReport:
        """The report of the update that a round has made, or this peer alone, if `report` is None."""
        return cls(
            step=ticket.step + 1,
            num_peers=len(report.group.peer_ids) if report else 1,
            samples=report.group.samples if report else ticket.samples,
            own_samples=ticket.samples,
            loss=report.loss if report else ticket.loss,
            compute_seconds=compute_seconds,
            blocked_seconds=blocked_seconds,
            round=report,
            ticket=ticket,
        )


@dataclass(frozen=True)
class RoundEvent:
    """How a round ended for one peer: a line of `rounds.jsonl`.

    Args:
        step: the global update that it was to make
        outcome: "averaged"; "alone"; the step to which the group went back, and why; or why the round failed
        members: ids of the members, in the order of their shares
        samples: samples of all members, lost members included: parts of the average contain some of theirs
        own_samples: samples of this peer; after a failure they count for the next round
        compute_seconds: time of computing, from micro-batch to micro-batch; waiting and validating do not count
        waiting_seconds: time in which nothing was computed because the round had to end first
        meeting_seconds: time of matchmaking
        exchange_seconds: time of the transfer
        apply_seconds: time from the average to updated weights
        bytes_sent: bytes of gradients and averages
        bytes_received: the same, received
        received_fraction: fraction of the parts that this peer should have received
        member_samples: samples of each member, as it said
        member_losses: mean training loss of each member, as it said; None where it has no samples
        group_size: number of members; 0 if no group was closed, or the round failed
        lost: ids of members that were found not to be there any more
        blamed: ids of members that sent what no honest peer sends, are far too slow, or were found to lie as reducers
        outside: ids of members whose gradients were far from the others' in at least half of this peer's share
        granularity: seconds of computing over those of the transfer; None where nothing was transferred
        codec: how the numbers travelled; empty where none did
        local_steps: local steps of each peer for this update, if all are equally fast; 0 where gradients are averaged
        share: fraction of the numbers that this peer averaged for all; a slow line gets little or nothing
        line_kbps: speed of this peer's line in kbit/s, as it measured before and told the members; 0 if it is not known
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
    member_samples: tuple[int, ...] = ()
    member_losses: tuple[float | None, ...] = ()
    group_size: int = 0
    lost: tuple[str, ...] = ()
    blamed: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    granularity: float | None = None
    codec: str = ""
    local_steps: int = 0
    share: float = 0.0
    line_kbps: int = 0

    @classmethod
    def of_failure(
        cls, ticket: Ticket, error: RoundEnded, compute_seconds: float, waiting_seconds: float
    ) -> RoundEvent:
        """The event of a round that gave no average. If its samples were too few, it has each member's samples."""
        group: Group | None = getattr(error, "group", None)
        return cls(
            ticket.step + 1,
            str(error),
            _ids(group.peer_ids) if group else (),
            group.samples if group else 0,
            ticket.samples,
            compute_seconds,
            waiting_seconds,
            member_samples=tuple(ticket.samples for ticket in group.tickets) if group else (),
            group_size=len(group.peer_ids) if group else 0,
            lost=_ids(error.lost if isinstance(error, RoundFailed) else ()),
            blamed=_ids(error.blamed),
        )

    @classmethod
    def of_update(cls, report: StepReport) -> RoundEvent:
        """The event of the round that made a global update."""
        common = (report.samples, report.own_samples, report.compute_seconds, report.blocked_seconds)
        exchanged = report.round
        if exchanged is None or len(exchanged.group.peer_ids) == 1:
            own = {"apply_seconds": report.apply_seconds, "received_fraction": 1.0, "group_size": 1}
            return cls(report.step, "alone", (), *common, **own)
        tickets = exchanged.group.tickets
        return cls(
            report.step,
            "averaged",
            _ids(exchanged.group.peer_ids),
            *common,
            exchanged.meeting_seconds,
            exchanged.exchange_seconds,
            report.apply_seconds,
            exchanged.bytes_sent,
            exchanged.bytes_received,
            exchanged.received_fraction,
            tuple(ticket.samples for ticket in tickets),
            tuple(ticket.loss if ticket.samples and math.isfinite(ticket.loss) else None for ticket in tickets),
            group_size=len(tickets),
            lost=_ids(exchanged.lost),
            blamed=_ids(exchanged.blamed),
            outside=_ids(exchanged.outside),
            granularity=report.granularity if math.isfinite(report.granularity) else None,
            codec=exchanged.codec,
            local_steps=exchanged.local_steps,
            share=round(exchanged.share, 4),
            line_kbps=exchanged.line_kbps,
        )


def _ids(peers: Iterable[PeerID]) -> tuple[str, ...]:
    return tuple(peer.to_base58() for peer in peers)
