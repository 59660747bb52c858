"""The organiser's orders for the step for which this peer computes, and the orders that other peers follow there."""

from __future__ import annotations

import math
import random
import time
from concurrent.futures import Future

from hivemind.p2p import PeerID

from swarm.membership.progress_record import AVERAGING, PAUSED, TRAINING
from swarm.protocol.messages import Ticket
from swarm.training.own_peer import OwnPeer

ASK_SECONDS = 1.0
"""Seconds from one answer until a paused peer again asks a peer that trains for its orders."""


class OthersOrders:
    """The orders that other peers follow, where they seem to differ from this peer's.

    Args:
        own: this peer
    """

    def __init__(self, own: OwnPeer):
        self._control, self._tracker, self._averager = own.control, own.tracker, own.averager
        self._asked: Future | None = None
        self._ask_at = 0.0

    def compare(self) -> None:
        """Exchange orders with a peer that trains while this one is paused, so that both know the newer list.

        Does not wait: a later call takes the answer.
        """
        if self._asked is None and time.monotonic() >= self._ask_at:
            self._asked = self._ask_one()
        if self._asked is not None and self._asked.done():
            self._control.take(self._asked.result())
            self._asked, self._ask_at = None, time.monotonic() + ASK_SECONDS

    def _ask_one(self) -> Future:
        own, records = self._tracker.own, self._tracker.swarm.records
        others = [peer for peer, record in records.items() if record.phase in (TRAINING, AVERAGING)]
        others = [peer for peer in others if records[peer].round >= own.round and not records[peer].client_mode]
        ticket = Ticket.of_listener(own.round, own.client_mode, self._control.orders.digest(own.round))
        return self._averager.compare_orders(random.choice(others) if others else None, ticket)

    def find_donor(self, step: int) -> PeerID | None:
        """A donor with a different lineage, as one that followed the orders in time has; None if there is none."""
        swarm, own = self._tracker.swarm, self._tracker.own
        donors = swarm.donors(min_step=step)
        return next((donor for donor in donors if swarm.records[donor].lineage != own.lineage), None)


class StepOrders:
    """The organiser's orders for the step for which this peer computes.

    Args:
        own: this peer
    """

    def __init__(self, own: OwnPeer):
        self._control, self._version, self._tracker = own.control, own.version, own.tracker
        self._others = OthersOrders(own)
        self._has_missed_some = False
        self.target = own.control.target(own.version.step)
        """Samples over all peers for the update that ends this step."""

    def follow(self) -> None:
        """Look at the newest orders, and follow them from now on, also in what this peer reports."""
        self._has_missed_some |= self._control.look(self._version.step)
        self.target = self._control.target(self._tracker.own.round)
        self._tracker.aim(self.target, self._control.total_steps(math.inf))

    @property
    def is_paused(self) -> bool:
        """Whether the run is paused at this step, and has not been ended meanwhile."""
        return self._control.orders.is_paused(self._tracker.own.round) and not self.is_over

    @property
    def has_nothing_to_compute(self) -> bool:
        """Whether the run is paused, or over."""
        return self.is_paused or self.is_over

    @property
    def is_over(self) -> bool:
        """Whether the run ends at this step."""
        return self._control.is_over(self._tracker.own.round)

    @property
    def num_paused(self) -> int:
        """Number of other peers that are paused at this step."""
        records = self._tracker.swarm.records.values()
        return sum(record.phase == PAUSED and record.round == self._tracker.own.round for record in records)

    def donor_of_missed(self) -> PeerID | None:
        """A donor whose updates followed orders that this peer learned of too late; None if there is none.

        Only the first call after such orders returns a donor.
        """
        has_missed, self._has_missed_some = self._has_missed_some, False
        return self._others.find_donor(self._version.step) if has_missed else None

    def compare(self) -> None:
        """Exchange orders with a peer that trains while this one is paused, as `OthersOrders.compare` does."""
        self._others.compare()
