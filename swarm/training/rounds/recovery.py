"""What a peer does after a round that gave no average."""

from __future__ import annotations

from hivemind.utils import get_logger

from swarm.protocol.messages import Behind, OtherOrders, Refused, RoundEnded, RoundFailed, ShortBatch, WentBack
from swarm.runtime.async_utils import POLL_SECONDS
from swarm.training.joining.attester import Attester
from swarm.training.joining.catch_up import CatchUp
from swarm.training.joining.healers import Healers
from swarm.training.own_peer import OwnPeer
from swarm.training.rounds.own_round import OwnRound
from swarm.training.rounds.step_orders import StepOrders
from swarm.training.undo.going_back import GoingBack

IF_IT_RISES_AGAIN = (
    ". If it rises again, lower the learning rate (swarm control learning-rate 0.5), or remove the member whose "
    "gradients are far from those of the other members"
)
NEWS_SECONDS = 5 * POLL_SECONDS
"""Longest wait for records that were written after a round ended."""

logger = get_logger(__name__)


class Recovery:
    """Recovers from a round that has ended without an average: the peer tries again, goes back, or catches up.

    Args:
        own: this peer
        own_round: the round
        step_orders: the organiser's orders for the step for which the peer computes
        going_back: restores an earlier state
        attester: attests what the peer holds after it has gone back
        catching_up: catches up with peers that have gone on
        healers: judges a leader that says it averages another model
    """

    def __init__(
        self,
        own: OwnPeer,
        own_round: OwnRound,
        step_orders: StepOrders,
        going_back: GoingBack,
        attester: Attester,
        catching_up: CatchUp,
        healers: Healers,
    ):
        self._version, self._gradients, self._attendance = own.version, own.gradients, own.attendance
        self._tracker, self._averager, self._control = own.tracker, own.averager, own.control
        self._should_stop = own.should_stop
        self._round, self._step_orders, self._going_back = own_round, step_orders, going_back
        self._attester, self._catching_up, self._healers = attester, catching_up, healers

    def recover(self, error: RoundEnded) -> None:
        """Recover from the round, which has ended with this error."""
        match error:
            case ShortBatch():
                self._compute_on(error)
            case WentBack():
                self._go_back_if_convinced(error)
            case RoundEnded():
                self._give_up(error)

    def _compute_on(self, short: ShortBatch) -> None:
        """Go on with the step: the group had too few samples, because a pace was overestimated or samples were lost."""
        self._round.note_failure(short)
        self._round.take_back()
        self._tracker.recount(short.group)
        self._round.resume()

    def _go_back_if_convinced(self, back: WentBack) -> None:
        """Go back to an earlier state with the group, if this peer has a reason as well."""
        if self._going_back.is_convinced(back):
            self._round.note_failure(back)
            self._go_back(back)
        else:  # if the others do go back, they are ahead then, and this peer catches up
            self._tracker.blame(back.blamed)
            self._give_up(RoundFailed(f"most of the group goes back to step {back.step} and shows no reason"))

    def _go_back(self, back: WentBack) -> None:
        """Make an earlier state that of the next step, as the group does; drop what was computed on the spoilt one."""
        self._tracker.met(back.group.peer_ids, ())
        self._control.met(back.group)
        with self._version.lock:
            has_gone = self._going_back.go(back)
            if has_gone:
                self._gradients.adopt()  # with local steps, this sets the anchors, which others download and compare
                self._attester.note_update()
                self._averager.took_over()  # nothing is owed any more
        if not has_gone:
            self._round.take_back()
            self._catching_up.begin(is_told=True)
            return
        advice = "" if back.liars else IF_IT_RISES_AGAIN
        logger.warning(f"Step {self._version.step}: the group {self._tracker.why(back)}{advice}")
        self._round.begin_step(frozenset(back.group.peer_ids))

    def _give_up(self, error: RoundEnded) -> None:
        """Take back what the round was given, and try again with the next micro-batch, or take over another state."""
        self._round.note_failure(error)
        self._attendance.note_failed(error.group_id)
        self._round.take_back()
        if isinstance(error, OtherOrders):
            self._control.take(error.signed)
            return self._step_orders.follow()
        if isinstance(error, Refused):
            return self._healers.refused_by(error.leader)
        if isinstance(error, RoundFailed) and not self._should_stop():
            self._tracker.missed(error.lost)
            logger.warning(
                f"The round of step {self._version.step} failed and is tried again: {self._tracker.why(error)}"
            )
        # With lost members, the rest of the group is still there and tries again at once: no records are needed.
        if not (isinstance(error, RoundFailed) and error.lost):
            self._tracker.exchange.wait_refreshed(NEWS_SECONDS)
        if isinstance(error, Behind):
            corroboration = self._attendance.corroboration_for(error.leader, self._tracker)
            self._catching_up.begin(is_told=True, corroboration=corroboration)
