"""The round of this peer's present step. The peer gives what it has computed, and takes it back if the round fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from swarm.averaging.commands import RunRound
from swarm.membership.far_members import MANY, FarMembers
from swarm.membership.progress_record import AVERAGING
from swarm.protocol.messages import Behind, OtherOrders, Refused, RoundEnded, RoundFailed, ShortBatch, Ticket, WentBack
from swarm.protocol.round_report import RoundEvent, RoundReport
from swarm.training.audit.work_log import with_work_name
from swarm.training.own_peer import OwnPeer
from swarm.training.rounds.inflight_round import InflightRound
from swarm.training.rounds.step_orders import StepOrders
from swarm.training.undo.going_back import GoingBack

logger = get_logger(__name__)


@dataclass(frozen=True)
class Ended:
    """How a round ended: with an average, or with an error that says why there is none.

    Args:
        round: the round, with what this peer gave to it, which is not taken back yet
        report: the report of the average; None if there is none
        error: why there is no average; None if there is one
    """

    round: InflightRound
    report: RoundReport | None = None
    error: RoundEnded | None = None

    @property
    def found_nobody(self) -> bool:
        """Whether no other peer came: the average is this peer's own."""
        return self.report is not None and len(self.report.group.peer_ids) == 1


class OwnRound:
    """The round that runs in the background, at most one. This peer has begun it, or has listened to it as a joiner.

    Args:
        own: this peer
        step_orders: the organiser's orders for the step for which the peer computes
        going_back: says whether the peer wants to go back to an earlier state, and to which states it could
        tell: called with each round that has failed
    """

    def __init__(
        self,
        own: OwnPeer,
        *,
        step_orders: StepOrders,
        going_back: GoingBack,
        tell: Callable[[RoundEvent], None],
    ):
        self._averager, self._tracker, self._version = own.averager, own.tracker, own.version
        self._control, self._step_orders = own.control, step_orders
        self._contribution, self._attendance, self._going_back = own.contribution, own.attendance, going_back
        self._options, self._overlaps, self._should_stop = own.options, own.averaging.overlaps, own.should_stop
        self._tell = tell
        self._far_members = FarMembers()
        self._inflight: InflightRound | None = None

    @property
    def is_running(self) -> bool:
        """Whether a round is under way, or has ended without its result being used yet."""
        return self._inflight is not None

    @property
    def is_done(self) -> bool:
        """Whether the round that is under way has ended, so that `wait` returns at once."""
        return self._inflight.future.done()

    # ---- its beginning ----------------------------------------------------------------------------------------------

    def ticket(self) -> Ticket:
        """The ticket that this peer brings: what it says of itself and of what it has computed."""
        contribution, client_mode = self._contribution, self._tracker.own.client_mode
        ticket = self._version.ticket(contribution.samples, contribution.loss, client_mode)
        ticket = replace(ticket, orders=self._control.orders.digest(ticket.step), pace=self._control.pace(ticket.step))
        return self._going_back.with_wish(ticket)

    def begin(self) -> None:
        """Meet and exchange in the background; `take_back` restores what was accumulated if that fails."""
        self._attendance.go_to_round()
        statement = self._contribution.statement()
        ticket = with_work_name(self.ticket(), statement)
        order = RunRound(
            ticket=ticket,
            members=self._tracker.swarm.members,
            target=self._control.target(ticket.step),
            sound=self._going_back.steps,
            work=statement,
            left_out=self._tracker.trust.left_out_leaders,
        )
        self._inflight = InflightRound(self._averager, order, self._options, self._contribution.give())
        if self._overlaps:
            self._attendance.begin_step()
            self._go_ahead()
        else:
            self._tracker.report(urgent=True, phase=AVERAGING)

    def take_over(self, listened: InflightRound) -> None:
        """Make a round to which this peer has listened its own; it has given nothing to that round."""
        self._inflight = listened
        self._attendance.listen()
        self._go_ahead()

    def _go_ahead(self) -> None:
        """Begin to compute for the next step while the round runs."""
        self._version.settled.clear()
        self._tracker.begin_ahead()
        self._step_orders.follow()

    # ---- its end ----------------------------------------------------------------------------------------------------

    def expect(self) -> None:
        """Tell the round which peers are there now, as peers come and go."""
        self._inflight.expect(self._tracker.swarm.members)

    def wait(self) -> Ended:
        """Wait until the round has ended; note which members came and which have spoilt it."""
        inflight = self._inflight
        try:
            report = inflight.wait(lambda: self._tracker.swarm.members, self._should_stop)
        except ShortBatch as short:
            self._control.met(short.group)
            self._tracker.met(short.group.peer_ids, inflight.expected)
            return Ended(inflight, error=short)
        except (WentBack, Behind, OtherOrders, Refused, RoundFailed) as error:
            return Ended(inflight, error=error)
        if report.group.lineage != inflight.ticket.lineage:  # the peer listened to a round of other weights
            self._tracker.blame(report.blamed)
            return Ended(inflight, error=Behind(self._version.step))
        self._tracker.met(report.group.peer_ids, inflight.expected, report.lost)
        self._tracker.blame(report.blamed)
        self._name_who_is_far(report)
        self._control.note(report, inflight.work.seconds)
        return Ended(inflight, report=report)

    def _name_who_is_far(self, report: RoundReport) -> None:
        for peer in self._far_members.note(report):
            is_own = peer == self._tracker.peer_id
            who = "This peer" if is_own else self._tracker.name_of(peer)
            why = (
                "Check that it has the same images as the other members, and that its machine works."
                if is_own
                else "It may have other images or a far faster machine, be broken, or lie: ask its owner."
            )
            found = f"its gradients were far from those of the other members in {MANY} of its latest rounds"
            logger.warning(f"{who}: {found}, and count for little. {why}")

    def note_failure(self, error: RoundEnded) -> None:
        """Report why the round gave no average, and blame the members that have spoilt it."""
        self._tell(self._inflight.failed(error))
        self._tracker.note_failure(self._inflight.ticket.step + 1, error)
        self._tracker.blame(error.blamed)

    def take_back(self) -> None:
        """Take back what was given to a round that gave no average: it counts for the next round."""
        inflight, self._inflight = self._inflight, None
        self._contribution.take_back(inflight.work)
        self._version.settled.set()
        self._tracker.end_ahead(self._version.step, self._version.lineage, self._contribution.samples)
        self._step_orders.follow()

    def begin_step(self, group: frozenset[PeerID] = frozenset()) -> None:
        """Begin a step on weights that this peer has just got; drop everything computed before.

        Args:
            group: the peers that made the update, this one among them; empty if it made none
        """
        self._contribution.begin()
        self._attendance.begin_step()
        self._attendance.note_update()
        self.forget()
        self._tracker.begin_step(self._version.step, self._version.lineage, group)
        self._step_orders.follow()

    def resume(self) -> None:
        """Go on with the step after a pause (validation, a checkpoint), which counts for no peer's pace."""
        self._contribution.resume()
        self._tracker.resume()

    def forget(self) -> None:
        """Forget the round, because its average is in the weights or other weights are here: the state is settled."""
        self._inflight = None
        self._version.settled.set()
        self._averager.set_step(self._version.step, self._version.lineage)

    def leave(self) -> None:
        """Give a round that is nearly done the time to end before this peer leaves, for the other members' sake."""
        if self._inflight is not None:
            self._inflight.settle()
