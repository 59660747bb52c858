"""The organiser's orders while a run is under way. Each order counts from a step on, on all peers alike.

An order is never carried out when it arrives: it names the step from which it counts. The effect of a list of orders at
a step is a function of these two alone. So all peers that have the list make the same updates, whenever it arrived, and
also when they make up for earlier updates. Signatures and the merging of lists are in
`swarm/protocol/order_book.py`.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import Meta

from swarm.protocol.certificates import ORDER, NotSigned, Signer
from swarm.protocol.wire import MAX_STEP, from_wire, to_wire

MAX_ORDERS, MAX_OF_DEPUTY = 200, 40
"""Orders of a run that are signed by the organiser's own key, and by each deputy's."""
MAX_ORDER_BYTES = 64
LATEST_MS = 2**42
"""The year 2109, in milliseconds since 1970. No order may be given later."""
DIGEST_BYTES = 8
MIN_FACTOR, MAX_FACTOR = 0.01, 100.0
"""Factors of a learning rate."""
MAX_TARGET = 2**20
"""Target batch size, in samples."""
MAX_TOTAL_STEPS = 10**7
"""Updates of a run; the same limit as in a recipe."""
MAX_EVERY = 10**6
"""Updates between two tests."""


class What(StrEnum):
    """The kinds of orders."""

    PAUSE = "pause"
    """No peer computes for this step or a later one."""
    RESUME = "resume"
    """All peers compute again."""
    END = "end"
    """The run is over at this step."""
    EXTEND = "extend"
    """The run has so many updates in all. The rest of the learning rate's schedule is stretched over those left."""
    LEARNING_RATE = "learning-rate"
    """The learning rate is so many times what the recipe says."""
    TARGET = "target-batch-size"
    """An update takes so many samples."""
    EVALUATE = "evaluate"
    """Every so many updates one of the peers measures the weights on the test samples; 0 if none does."""


_KINDS = tuple(What)
_BOUNDS = {
    What.LEARNING_RATE: (MIN_FACTOR, MAX_FACTOR),
    What.TARGET: (1, MAX_TARGET),
    What.EXTEND: (1, MAX_TOTAL_STEPS),
    What.EVALUATE: (0, MAX_EVERY),
}
"""Least and greatest value, by kind; the value of all other kinds is 0."""

_ORDER = msgspec.msgpack.Decoder(
    tuple[
        Annotated[int, Meta(ge=1, le=MAX_STEP)],
        Annotated[int, Meta(ge=0, lt=len(_KINDS))],
        Annotated[float, Meta(ge=0, le=MAX_TOTAL_STEPS)],
        Annotated[int, Meta(ge=0, lt=LATEST_MS)],
    ]
)


@dataclass(frozen=True)
class Order:
    """One order of the organiser or a deputy.

    Args:
        at_step: the order counts for the update that follows this many finished ones, and for all later ones
        what: kind of the order
        value: a factor, a number of samples or of updates; 0 for kinds that need none
        given_at: when it was given, milliseconds since 1970; of two orders for the same step, the later one counts

    Raises:
        ValueError: it makes no sense; the text is a sentence
    """

    at_step: int
    what: What
    value: float = 0.0
    given_at: int = field(default=0, compare=False)

    def __post_init__(self):
        least, most = _BOUNDS.get(self.what, (0, 0))
        if not 1 <= self.at_step <= MAX_STEP:
            raise ValueError(f"An order counts from step 1 on at the earliest, and this one from {self.at_step}.")
        if not (math.isfinite(self.value) and least <= self.value <= most):
            raise ValueError(f"The value of {self.what} is {self.value:g}: give {least:g} to {most:g}.")
        if self.what is not What.LEARNING_RATE and self.value != int(self.value):
            raise ValueError(f"The value of {self.what} is {self.value:g}: give a whole number.")
        if self.what is What.EXTEND and self.value <= self.at_step:
            raise ValueError(f"A run cannot have {self.value:g} updates from step {self.at_step} on: give more.")

    def __str__(self) -> str:
        match self.what:
            case What.PAUSE:
                return f"pause at step {self.at_step}"
            case What.RESUME:
                return f"go on at step {self.at_step}"
            case What.END:
                return f"end at step {self.at_step}"
            case What.EXTEND:
                return f"from step {self.at_step} on the run has {self.value:,.0f} updates"
            case What.LEARNING_RATE:
                return f"from step {self.at_step} on the learning rate is {self.value:g} × the recipe's"
            case What.TARGET:
                return f"from step {self.at_step} on an update takes {self.value:,.0f} samples"
            case What.EVALUATE if self.value == 0:
                return f"from step {self.at_step} on no peer tests the weights"
            case What.EVALUATE:
                return f"from step {self.at_step} on the weights are tested every {self.value:,.0f} updates"

    def to_bytes(self) -> bytes:
        """The order as it is signed."""
        return to_wire(self.at_step, _KINDS.index(self.what), float(self.value), self.given_at)

    @classmethod
    def from_bytes(cls, data: bytes) -> Order:
        """Read an order.

        Raises:
            NotSigned: it is none
        """
        try:
            at_step, kind, value, given_at = from_wire(_ORDER, data, MAX_ORDER_BYTES)
            return cls(at_step, _KINDS[kind], value, given_at)
        except ValueError:
            raise NotSigned("cannot be read") from None


@dataclass(frozen=True)
class Orders:
    """All orders of a run that count, and what follows from them.

    Args:
        run: prefix of the run's keys, which names run and recipe
        number: number of the list, which grows with what is known
        given: the orders, in the order in which they were given
        revoked: public keys of deputies that may give no more orders
    """

    run: str
    number: int = field(default=0, compare=False)
    given: tuple[Order, ...] = ()
    revoked: frozenset[bytes] = frozenset()

    def with_order(self, order: Order) -> Orders:
        """These orders and another one, which is given now."""
        last = max((other.given_at for other in self.given), default=0)
        stamped = replace(order, given_at=max(last + 1, int(1000 * time.time())))
        return replace(self, given=(*self.given, stamped))

    def signed_by(self, signer: Signer) -> bytes:
        """All orders, each signed with this key, as members pass them on. `order_book.merged` reads it."""
        kind, contents = ORDER.format(self.run), [order.to_bytes() for order in self.given]
        return to_wire([], [(signer.warrant, [(content, signer.signature(kind, content)) for content in contents])])

    # ---- what follows from it ---------------------------------------------------------------------------------------

    @cached_property
    def _by_step(self) -> list[Order]:
        """The orders by step. Of two for the same step, the one that was given later comes later."""
        return sorted(self.given, key=lambda order: order.at_step)

    def _last(self, step: float, *kinds: What) -> Order | None:
        found = [order for order in self._by_step if order.at_step <= step and order.what in kinds]
        return found[-1] if found else None

    def is_paused(self, step: int) -> bool:
        """Whether peers pause before the update that follows this many."""
        last = self._last(step, What.PAUSE, What.RESUME)
        return last is not None and last.what is What.PAUSE

    def learning_rate_factor(self, step: int) -> float:
        """The factor of the schedule's learning rate for the update that follows this many."""
        last = self._last(step, What.LEARNING_RATE)
        return 1.0 if last is None else last.value

    def target_batch_size(self, step: int, recipe: int) -> int:
        """Samples of the update that follows this many.

        Args:
            step: number of finished updates
            recipe: target batch size of the recipe
        """
        last = self._last(step, What.TARGET)
        return recipe if last is None else int(last.value)

    def evaluate_every(self, step: int) -> int:
        """Number of updates between two tests of the weights by one of the peers; 0 if none tests them."""
        last = self._last(step, What.EVALUATE)
        return 0 if last is None else int(last.value)

    def total_steps(self, step: float, recipe: int) -> int:
        """Updates of the run, by the orders that count at this step.

        Args:
            step: number of finished updates; infinity for all orders
            recipe: updates of the recipe
        """
        last = self._last(step, What.END, What.EXTEND)
        if last is None:
            return recipe
        return last.at_step if last.what is What.END else int(last.value)

    def ends_by_order(self, step: float) -> bool:
        """Whether an order that counts at this step says after how many updates the run ends."""
        return self._last(step, What.END, What.EXTEND) is not None

    def schedule_position(self, step: int, recipe: int) -> float:
        """The step of the recipe's schedule whose learning rate counts.

        Where a run is extended, the rest of the schedule is stretched over the rest of the run.

        Args:
            step: number of finished updates
            recipe: updates of the recipe
        """
        position, since, total = 0.0, 0, None
        for order in self._by_step:
            if order.what is What.EXTEND and order.at_step <= step:
                position = _stretched(order.at_step, position, since, total, recipe)
                since, total = order.at_step, int(order.value)
        return _stretched(step, position, since, total, recipe)

    def coming(self, step: int) -> list[Order]:
        """The orders that do not count yet at this step."""
        return [order for order in self._by_step if order.at_step > step]

    def digest(self, step: int) -> bytes:
        """A digest of the orders that count for this update or the next one; empty if there are none.

        All members of a group have to know the same ones. They have to know them a round before they count: the last
        update of a run, or before a pause, has to be the last on all peers.
        """
        fields = [(order.at_step, order.what.value, float(order.value)) for order in self._by_step]
        counting = [order for order in fields if order[0] <= step + 1]
        return hashlib.sha256(to_wire(*counting)).digest()[:DIGEST_BYTES] if counting else b""


def _stretched(step: int, position: float, since: int, total: int | None, recipe: int) -> float:
    """The position in a schedule that was at `position` at the step `since`, and that ends when the run ends.

    Args:
        step: number of finished updates
        position: position at the step `since`
        since: step from which the schedule is stretched
        total: updates of the run; None if the schedule is not stretched
        recipe: updates of the recipe, at which the schedule ends
    """
    if total is None:
        return step
    return position + (step - since) * max(0.0, recipe - position) / (total - since)
