"""What the organiser has ordered, as one peer's trainer follows it: asked at the start of each step."""

from __future__ import annotations

import math
import random
import time
from concurrent.futures import Future

from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from swarm.averaging.averager import SwarmAverager
from swarm.membership.progress_record import AVERAGING, TRAINING
from swarm.membership.progress_tracker import ProgressTracker
from swarm.protocol.admission import Admission
from swarm.protocol.auto_mode import Pace
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.certificates import NotSigned
from swarm.protocol.messages import Group, Ticket
from swarm.protocol.orders import Orders
from swarm.protocol.round_report import RoundReport
from swarm.protocol.signed_lists import ORDERS
from swarm.state_sync.state_version import StateVersion
from swarm.training.auto_averaging import AutoAveraging

ASK_SECONDS = 1.0
"""How often a peer that is paused asks one that trains why."""

logger = get_logger(__name__)


class RunControl:
    """The orders that this peer follows; all of them are the recipe's, as long as nobody has ordered anything.

    Other threads and processes hear of a newer list; it counts when `look` has seen it.

    Args:
        admission: of the trainer
        target_batch_size, total_steps: what the recipe says
        auto: with `--averaging auto`, how many of these updates one update of the swarm is
    """

    def __init__(
        self, admission: Admission, target_batch_size: int, total_steps: int, auto: AutoAveraging | None = None
    ):
        self._admission, self._target, self._total, self.auto = admission, target_batch_size, total_steps, auto
        self._orders = admission.lists.orders

    def look(self, step: int) -> bool:
        """Follow the newest list from now on.

        Args:
            step: that is under way

        Returns:
            whether this peer has made updates without orders that counted for them
        """
        before, newest = self._orders, self._admission.lists.orders
        if newest == before:  # not by number: where there are too many deputies, an older one takes another's place
            return False
        self._orders, is_late = newest, False
        news = [(order, "The organiser has ordered") for order in newest.given if order not in before.given]
        gone = [order for order in before.given if order not in newest.given]
        news += [(order, "An order of a deputy who was revoked does not count") for order in gone]
        for order, said in news:
            is_late |= order.at_step < step
            late = f", and this peer hears of it at step {step} only" if order.at_step < step else ""
            logger.warning(f"{said}{late}: {order}")
        return is_late

    def take(self, signed: bytes) -> None:
        """A list has come with a round, or an empty one; it counts when `look` has seen it."""
        try:
            if signed:
                self._admission.lists.take(ORDERS, signed)
        except NotSigned as error:
            logger.warning(f"Orders that came with a round are not followed: the list {error}")

    @property
    def orders(self) -> Orders:
        """The orders that this peer follows now."""
        return self._orders

    def is_paused(self, step: int) -> bool:
        """Whether nobody computes for this step."""
        return self._orders.is_paused(step)

    def is_over(self, step: int) -> bool:
        """Whether the run has ended at this step."""
        return step >= self.total_steps(step)

    def target(self, step: int) -> BatchTarget:
        """Samples over all peers for the update that ends this step."""
        target = BatchTarget(self._orders.target_batch_size(step, self._target))
        return target if self.auto is None else target.in_mode(self.auto.local_steps(step))

    def total_steps(self, step: float) -> int:
        """Steps of the run, as far as that is decided at this step; infinity: by all orders."""
        total = self._orders.total_steps(step, self._total)
        if self.auto is None or step == math.inf or self._orders.ends_by_order(step):
            return total
        return self.auto.step_at(total)

    @property
    def is_steered(self) -> bool:
        """Whether the learning rate may be another one than the recipe says for this number of updates."""
        return bool(self._orders.given) or self.auto is not None

    def evaluate_every(self, step: int) -> int:
        """Updates after which one of the peers tests the weights; 0: nobody does."""
        return self._orders.evaluate_every(step)

    def digest(self, step: int) -> bytes:
        """What all members of this step's round have to follow."""
        return self._orders.digest(step)

    def pace(self, step: int) -> Pace | None:
        """What this peer says in its ticket of its measurements."""
        return None if self.auto is None else self.auto.pace(step)

    def begin(self, step: int) -> None:
        """This peer begins with the weights that it has."""
        if self.auto is not None:
            self.auto.begin(step)

    def join(self) -> None:
        """This peer takes over the weights of others before it begins."""
        if self.auto is not None:
            self.auto.join()

    def met(self, group: Group) -> None:
        """A group was closed, with or without an average."""
        if self.auto is not None and len(group.peer_ids) > 1:
            self.auto.met(group)

    def note(self, report: RoundReport, computing_seconds: float) -> None:
        """A round has ended well."""
        if self.auto is not None and len(report.group.peer_ids) > 1:
            self.auto.note(report, computing_seconds)

    def learning_rate_factor(self, step: int) -> float:
        """The factor on the learning rate of the update that ends this step."""
        return self._orders.learning_rate_factor(step)

    def schedule_position(self, step: int) -> float:
        """Where in the schedule that update is."""
        if self.auto is None or self._orders.ends_by_order(step):
            return self._orders.schedule_position(step, self._total)
        return self.auto.position(step)


class OthersOrders:
    """Which orders the others follow, where they and this peer do not follow the same, it seems.

    Args:
        control: what this peer follows
        tracker: knows who does what
        averager: can call others
    """

    def __init__(self, control: RunControl, tracker: ProgressTracker, averager: SwarmAverager):
        self._control, self._tracker, self._averager = control, tracker, averager
        self._asked: Future | None = None
        self._ask_at = 0.0

    def compare(self) -> None:
        """Ask who trains where this peer stands: then both know what either of them knew. It waits for nothing."""
        if self._asked is None and time.monotonic() >= self._ask_at:
            self._asked = self._ask_one()
        if self._asked is not None and self._asked.done():
            self._control.take(self._asked.result())
            self._asked, self._ask_at = None, time.monotonic() + ASK_SECONDS

    def _ask_one(self) -> Future:
        own, records = self._tracker.own, self._tracker.swarm.records
        others = [peer for peer, record in records.items() if record.phase in (TRAINING, AVERAGING)]
        others = [peer for peer in others if records[peer].round >= own.round and not records[peer].client_mode]
        ticket = Ticket.of_listener(own.round, own.client_mode, self._control.digest(own.round))
        return self._averager.compare_orders(random.choice(others) if others else None, ticket)

    def find_donor(self, step: int) -> PeerID | None:
        """Whose weights came out of other updates, as those of who followed the orders in time; None if nobody's."""
        swarm, own = self._tracker.swarm, self._tracker.own
        donors = swarm.donors(min_step=step)
        return next((donor for donor in donors if swarm.records[donor].lineage != own.lineage), None)


class StepOrders:
    """What the organiser has ordered for the step for which this peer computes.

    Args:
        control: what this peer follows
        version: the weights that it has
        tracker: knows for which step it computes, and who does what
        averager: can call others
    """

    def __init__(self, control: RunControl, version: StateVersion, tracker: ProgressTracker, averager: SwarmAverager):
        self._control, self._version, self._tracker = control, version, tracker
        self._others = OthersOrders(control, tracker, averager)
        self._has_missed_some = False
        self.target = control.target(version.step)
        """Samples over all peers for the update that ends this step."""

    def follow(self) -> None:
        """Look at the newest orders: this peer, and what it tells the others, go by them from now on."""
        self._has_missed_some |= self._control.look(self._version.step)
        self.target = self._control.target(self._tracker.own.round)
        self._tracker.aim(self.target, self._control.total_steps(math.inf))

    @property
    def is_paused(self) -> bool:
        """Whether peers wait at this step; where the run has been ended meanwhile, there is nothing to wait for."""
        return self._control.is_paused(self._tracker.own.round) and not self._is_over

    @property
    def has_nothing_to_compute(self) -> bool:
        """Whether the run is paused, or over."""
        return self.is_paused or self._is_over

    @property
    def _is_over(self) -> bool:
        return self._control.is_over(self._tracker.own.round)

    def donor_of_missed(self) -> PeerID | None:
        """Once after orders came too late: whose weights came out of updates that followed them; None if nobody's."""
        has_missed, self._has_missed_some = self._has_missed_some, False
        return self._others.find_donor(self._version.step) if has_missed else None

    def compare(self) -> None:
        """Ask who trains where this peer is paused, as `OthersOrders` does."""
        self._others.compare()
