"""The update that this peer makes of an average: what is said of it, and which weights it leads to."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from hivemind.p2p import PeerID

from swarm.membership.progress_record import MAX_GRANULARITY
from swarm.protocol.messages import Ticket
from swarm.protocol.round_report import RoundReport, StepReport
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.training.joining.probation import Probation
from swarm.training.own_peer import OwnPeer
from swarm.training.undo.breaker import Breaker


class OwnUpdate:
    """The update that comes next, from the average on until it is made, and then the last one.

    Args:
        own: this peer
        breaker: looks whether the loss has risen for good
        probation: learns whether this peer's weights are those of its group
        tell: called with each average that is applied, before the weights count as those of the next step
    """

    def __init__(self, own: OwnPeer, *, breaker: Breaker, probation: Probation, tell: Callable[[StepReport], None]):
        self._version, self._gradients = own.version, own.gradients
        self._tracker, self._averager = own.tracker, own.averager
        self._breaker, self._probation, self._tell = breaker, probation, tell
        self.last_step: StepReport | None = None
        self.healer: PeerID | None = None
        """Donor whose state replaces this peer's weights after the update, because they differ from the group's."""
        self._is_shown = False
        """Whether the average of this peer alone is kept for others."""

    def show(self) -> None:
        """Who follows this peer finds the average that it has made alone."""
        self._is_shown = self._averager.transfers.is_followed
        if self._is_shown:
            self._gradients.show()

    def prepare(
        self,
        ticket: Ticket,
        computed_seconds: float,
        blocked_seconds: float,
        report: RoundReport | None,
        last_donor: PeerID | None,
    ) -> None:
        """An average is there, and the optimizer makes a step of it next.

        Args:
            ticket: what this peer brought
            computed_seconds: from micro-batch to micro-batch
            blocked_seconds: while nothing was computed because the round had to end first
            report: of the round; None without one
            last_donor: whose state this peer has taken over last
        """
        self.healer = self._version.strayed_from(ticket, report.group, last_donor) if report else None
        if self.healer is not None:
            self._probation.note_stray()
        self.last_step = StepReport.of(ticket, computed_seconds, blocked_seconds, report)
        if ticket.samples:
            granularity = min(self.last_step.granularity, MAX_GRANULARITY)
            self._tracker.report(loss=ticket.loss, granularity=granularity)

    def applied(self, apply_seconds: float) -> None:
        """The weights have been updated; whoever calls holds their lock.

        Args:
            apply_seconds: from the average to updated weights
        """
        self.last_step = replace(self.last_step, apply_seconds=apply_seconds)
        self._tell(self.last_step)
        report, own = self.last_step.round, self.last_step.ticket
        if own.samples:
            self._breaker.note(own.loss)
        lineage = report.group.group_id if report else os.urandom(LINEAGE_BYTES)
        is_alone = report is None or len(report.group.peer_ids) == 1
        if is_alone and self._is_shown:
            self._averager.keep_average(self._version.step, self._version.lineage, lineage)
        self._version.advance(lineage)

    @property
    def group(self) -> frozenset[PeerID]:
        """Who has made the last update together with this peer, which is one of them."""
        report = self.last_step.round
        return frozenset(report.group.peer_ids if report else [self._tracker.peer_id])
