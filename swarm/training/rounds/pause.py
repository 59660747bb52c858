"""What a peer does while the organiser has paused the run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import Future

from swarm.membership.progress_record import AVERAGING, PAUSED, TRAINING
from swarm.protocol.messages import Ticket
from swarm.runtime.async_utils import POLL_SECONDS
from swarm.training.joining.catch_up import CatchUp
from swarm.training.own_peer import OwnPeer
from swarm.training.rounds.own_round import OwnRound
from swarm.training.rounds.step_orders import StepOrders

ASK_SECONDS = 1.0
"""Seconds from one answer until a paused peer again asks a peer that trains for its orders."""
END_SECONDS = 30.0
"""Time for other peers to learn that a paused run has ended. A client-mode peer looks for orders every 15 s."""
QUIET_SECONDS = 2.0
"""Time without a paused peer in fresh records until none is believed to be paused. A record may still be on its way."""


class Pause:
    """The wait of this peer in a paused run: it keeps up with the swarm, and looks for newer orders.

    Args:
        own: this peer
        step_orders: the organiser's orders for the step for which the peer computes
        own_round: the round of that step
        catching_up: catches up with peers that have gone on
        may_wait: called often while this peer waits; false when the peer is to leave, also by its owner's limits
    """

    def __init__(
        self,
        own: OwnPeer,
        step_orders: StepOrders,
        own_round: OwnRound,
        catching_up: CatchUp,
        may_wait: Callable[[], bool],
    ):
        self._tracker, self._averager, self._control = own.tracker, own.averager, own.control
        self._contribution, self._step_orders, self._round = own.contribution, step_orders, own_round
        self._catching_up, self._may_wait = catching_up, may_wait
        self._asked: Future | None = None
        self._asked_at = self._ask_at = 0.0

    def wait(self) -> None:
        """Wait until the run goes on or ends. Where a round is under way, do not wait: it has to end first.

        Raises:
            InputError: the averaging process has been dead for some time
        """
        while self._step_orders.is_paused and not self._round.is_running and self._may_wait():
            is_new = self._tracker.own.phase != PAUSED
            self._tracker.report(urgent=is_new, phase=PAUSED, samples=self._contribution.samples)
            self._catching_up.keep_up()
            self._compare_orders()
            time.sleep(POLL_SECONDS)
            self._step_orders.follow()
        if self._step_orders.is_over:
            self._let_others_hear()
        self._round.resume()

    def _compare_orders(self) -> None:
        """Exchange orders with a peer that trains while this one is paused, so that both know the newer list.

        Does not wait: a later call takes the answer.

        Raises:
            InputError: the averaging process has been dead for some time
        """
        self._averager.check_alive()
        now = time.monotonic()
        if self._asked is not None and now > self._asked_at + self._averager.timeouts.hangs_seconds:
            self._asked = None  # the question or its answer was lost
        if self._asked is None and now >= self._ask_at:
            self._asked, self._asked_at = self._ask_one(), now
        if self._asked is not None and self._asked.done():
            self._control.take(self._asked.result())
            self._asked, self._ask_at = None, time.monotonic() + ASK_SECONDS

    def _ask_one(self) -> Future:
        own, records = self._tracker.own, self._tracker.swarm.records
        others = [peer for peer, record in records.items() if record.phase in (TRAINING, AVERAGING)]
        others = [peer for peer in others if records[peer].round >= own.round and not records[peer].client_mode]
        ticket = Ticket.of_listener(own.round, own.client_mode, self._control.orders.digest(own.round))
        return self._averager.compare_orders(random.choice(others) if others else None, ticket)

    def _let_others_hear(self) -> None:
        """Stay for a while after a paused run was ended: client-mode peers learn of the end only by calling a peer."""
        began = quiet_since = time.monotonic()
        while time.monotonic() < min(began + END_SECONDS, quiet_since + QUIET_SECONDS) and self._may_wait():
            self._tracker.report(urgent=self._tracker.own.phase != TRAINING, phase=TRAINING)
            is_fresh = self._tracker.exchange.wait_refreshed(1.0)
            if self._num_paused or not is_fresh:
                quiet_since = time.monotonic()
            time.sleep(POLL_SECONDS)

    @property
    def _num_paused(self) -> int:
        """Number of other peers that are paused at this step."""
        records = self._tracker.swarm.records.values()
        return sum(record.phase == PAUSED and record.round == self._tracker.own.round for record in records)
