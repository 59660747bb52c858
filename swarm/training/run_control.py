"""The organiser's orders, as one peer's trainer follows them: it looks at them before each micro-batch."""

from __future__ import annotations

import math

from hivemind.utils import get_logger

from swarm.protocol.admission import Admission
from swarm.protocol.auto_mode import Pace
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.certificates import NotSigned
from swarm.protocol.messages import Group
from swarm.protocol.round_report import RoundReport
from swarm.protocol.signed_lists import ORDERS
from swarm.training.auto_averaging import AutoAveraging

logger = get_logger(__name__)


class RunControl:
    """The orders that this peer follows. Without any order, the recipe's values count.

    Other threads and processes receive newer lists of orders. A list counts once `look` has seen it.

    Args:
        admission: the trainer's admission, which holds the newest list
        target_batch_size, total_steps: the recipe's values
        auto: with `--averaging auto`, tells how many updates of the recipe one update of the swarm is worth
    """

    def __init__(
        self, admission: Admission, target_batch_size: int, total_steps: int, auto: AutoAveraging | None = None
    ):
        self._admission, self._target, self._total, self.auto = admission, target_batch_size, total_steps, auto
        self.orders = admission.lists.orders
        """The orders that this peer follows now."""
        self._has_missed_some = False

    def look(self, step: int) -> None:
        """Follow the newest list from now on.

        Args:
            step: the present step
        """
        before, newest = self.orders, self._admission.lists.orders
        if newest == before:  # not by number: where there are too many deputies, an older one takes another's place
            return
        self.orders = newest
        news = [(order, "The organiser has ordered") for order in newest.given if order not in before.given]
        gone = [order for order in before.given if order not in newest.given]
        news += [
            (order, "An order is cancelled, because the organiser has revoked the deputy that signed it")
            for order in gone
        ]
        for order, said in news:
            is_late = order.at_step < step
            self._has_missed_some |= is_late
            late = f", and this peer learns of it only at step {step}" if is_late else ""
            logger.warning(f"{said}{late}: {order}")

    def take_missed(self) -> bool:
        """Whether this peer, since the last call, made updates for which an order counted that it did not know."""
        has_missed, self._has_missed_some = self._has_missed_some, False
        return has_missed

    def take(self, signed: bytes) -> None:
        """Store a list of orders that came with a round (or nothing, if it is empty); it counts from `look` on."""
        try:
            if signed:
                self._admission.lists.take(ORDERS, signed)
        except NotSigned as error:
            logger.warning(f"Orders that came with a round are not followed: the list {error}")

    def is_over(self, step: int) -> bool:
        """Whether the run has ended at this step."""
        return step >= self.total_steps(step)

    def target(self, step: int) -> BatchTarget:
        """Samples over all peers for the update that ends this step."""
        target = BatchTarget(self.orders.target_batch_size(step, self._target))
        return target if self.auto is None else target.in_mode(self.auto.local_steps(step))

    def total_steps(self, step: float) -> int:
        """Number of steps of the run by the orders that count at this step; at infinity, by all orders."""
        total = self.orders.total_steps(step, self._total)
        if self.auto is None or step == math.inf or self.orders.ends_by_order(step):
            return total
        return self.auto.step_at(total)

    @property
    def is_steered(self) -> bool:
        """Whether the learning rate may differ from the recipe's for the same number of updates."""
        return bool(self.orders.given) or self.auto is not None

    def pace(self, step: int) -> Pace | None:
        """The plan and the measurements that this peer puts into its ticket; None without `--averaging auto`."""
        return None if self.auto is None else self.auto.pace(step)

    def begin(self, step: int) -> None:
        """Note that this peer begins with the weights that it has."""
        if self.auto is not None:
            self.auto.begin(step)

    def join(self) -> None:
        """Note that this peer takes over another peer's weights before it begins."""
        if self.auto is not None:
            self.auto.join()

    def met(self, group: Group) -> None:
        """Note a group that was closed, whether or not it gave an average."""
        if self.auto is not None and len(group.peer_ids) > 1:
            self.auto.met(group)

    def note(self, report: RoundReport, computing_seconds: float) -> None:
        """Note a round that gave an average."""
        if self.auto is not None and len(report.group.peer_ids) > 1:
            self.auto.note(report, computing_seconds)

    def schedule_position(self, step: int) -> float:
        """The position of this update in the recipe's schedule."""
        if self.auto is None or self.orders.ends_by_order(step):
            return self.orders.schedule_position(step, self._total)
        return self.auto.position(step)
