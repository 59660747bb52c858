"""What the organiser has ordered, as one peer's trainer follows it: asked at the start of each step."""

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
        self.orders = admission.lists.orders
        """Those that this peer follows now."""

    def look(self, step: int) -> bool:
        """Follow the newest list from now on.

        Args:
            step: that is under way

        Returns:
            whether this peer has made updates without orders that counted for them
        """
        before, newest = self.orders, self._admission.lists.orders
        if newest == before:  # not by number: where there are too many deputies, an older one takes another's place
            return False
        self.orders, is_late = newest, False
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

    def is_over(self, step: int) -> bool:
        """Whether the run has ended at this step."""
        return step >= self.total_steps(step)

    def target(self, step: int) -> BatchTarget:
        """Samples over all peers for the update that ends this step."""
        target = BatchTarget(self.orders.target_batch_size(step, self._target))
        return target if self.auto is None else target.in_mode(self.auto.local_steps(step))

    def total_steps(self, step: float) -> int:
        """Steps of the run, as far as that is decided at this step; infinity: by all orders."""
        total = self.orders.total_steps(step, self._total)
        if self.auto is None or step == math.inf or self.orders.ends_by_order(step):
            return total
        return self.auto.step_at(total)

    @property
    def is_steered(self) -> bool:
        """Whether the learning rate may be another one than the recipe says for this number of updates."""
        return bool(self.orders.given) or self.auto is not None

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

    def schedule_position(self, step: int) -> float:
        """Where in the schedule that update is."""
        if self.auto is None or self.orders.ends_by_order(step):
            return self.orders.schedule_position(step, self._total)
        return self.auto.position(step)
