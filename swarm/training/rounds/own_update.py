"""The update that this peer makes from an average: its report, and the lineage of the weights that come out of it."""

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
    """The latest update of this peer, from when its average is there.

    Args:
        own: this peer
        breaker: detects whether the loss has risen for good
        probation: is told when this peer's weights differ from its group's
        tell: called with the report of each average that is applied, before the weights count as those of the next step
    """

    def __init__(self, own: OwnPeer, *, breaker: Breaker, probation: Probation, tell: Callable[[StepReport], None]):
        self._version, self._gradients = own.version, own.gradients
        self._tracker, self._averager = own.tracker, own.averager
        self._breaker, self._probation, self._tell = breaker, probation, tell
        self.last_step: StepReport | None = None
        self.healer: PeerID | None = None
        """Donor whose state replaces this peer's weights after the update, because they differ from the group's."""
        self._is_shown = False
        """Whether an average that this peer has made alone is kept for other peers."""

    def show(self) -> None:
        """Put the average that this peer has made alone onto the wire, if other peers follow its updates."""
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
        """Prepare an update from an average that is there; the optimizer step comes next.

        Args:
            ticket: the ticket that this peer brought
            computed_seconds: seconds of computing micro-batches
            blocked_seconds: seconds in which nothing was computed because the round had to end first
            report: the report of the round; None if there was none
            last_donor: the donor whose state this peer took over last
        """
        self.healer = self._version.strayed_from(ticket, report.group, last_donor) if report else None
        if self.healer is not None:
            self._probation.note_stray()
        self.last_step = StepReport.of(ticket, computed_seconds, blocked_seconds, report)
        if ticket.samples:
            granularity = min(self.last_step.granularity, MAX_GRANULARITY)
            self._tracker.report(loss=ticket.loss, granularity=granularity)

    def applied(self, apply_seconds: float) -> None:
        """Note that the weights have been updated. The caller holds their lock.

        Args:
            apply_seconds: seconds from the average to updated weights
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
        """The peers that made the last update together, this peer among them."""
        report = self.last_step.round
        return frozenset(report.group.peer_ids if report else [self._tracker.peer_id])
