"""What the organiser orders while a run is under way: each order counts from a step on, on all peers alike.

An order is never carried out when it arrives. It names the step from which it counts, and what follows from a list of
orders at a step is a function of these two alone. So who has the list makes the same updates as all others who have it,
whenever it came, and also the updates of earlier steps that it makes up for. Who has given them, and how they get
around, is the matter of `swarm/protocol/order_book.py`.
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
"""Of a run, by the organiser's own key, and by each deputy's."""
MAX_ORDER_BYTES = 64
LATEST_MS = 2**42
"""The year 2109: no order is given later."""
DIGEST_BYTES = 8
MIN_FACTOR, MAX_FACTOR = 0.01, 100.0
"""Of a learning rate."""
MAX_TARGET = 2**20
MAX_TOTAL_STEPS = 10**7
"""As in a recipe."""
MAX_EVERY = 10**6
"""Updates between two tests."""


class What(StrEnum):
    """What is ordered."""

    PAUSE = "pause"
    """Nobody computes for this step or a later one."""
    RESUME = "resume"
    """All compute again."""
    END = "end"
    """The run is over at this step."""
    EXTEND = "extend"
    """The run has so many updates in all; the rest of the learning rate's schedule is stretched over what is left."""
    LEARNING_RATE = "learning-rate"
    """It is so many times what the recipe says."""
    TARGET = "target-batch-size"
    """An update takes so many samples."""
    EVALUATE = "evaluate"
    """After so many updates one of the peers measures the weights on the test samples; 0: nobody does."""


_KINDS = tuple(What)
_BOUNDS = {
    What.LEARNING_RATE: (MIN_FACTOR, MAX_FACTOR),
    What.TARGET: (1, MAX_TARGET),
    What.EXTEND: (1, MAX_TOTAL_STEPS),
    What.EVALUATE: (0, MAX_EVERY),
}
"""Of the value; of all others it is 0."""

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
    """One order.

    Args:
        at_step: it counts for the update that follows this many finished ones, and all later ones
        what: is ordered
        value: a factor, samples or updates; 0 where there is nothing to be said
        given_at: milliseconds since 1970; of two that count from the same step on, the later one counts

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
                return f"from step {self.at_step} on nobody tests the weights"
            case What.EVALUATE:
                return f"from step {self.at_step} on the weights are tested every {self.value:,.0f} updates"

    def to_bytes(self) -> bytes:
        """As it is signed."""
        return to_wire(self.at_step, _KINDS.index(self.what), float(self.value), self.given_at)

    @classmethod
    def from_bytes(cls, data: bytes) -> Order:
        """Raises NotSigned: it is none"""
        try:
            at_step, kind, value, given_at = from_wire(_ORDER, data, MAX_ORDER_BYTES)
            return cls(at_step, _KINDS[kind], value, given_at)
        except ValueError:
            raise NotSigned("cannot be read") from None


@dataclass(frozen=True)
class Orders:
    """All orders of a run.

    Args:
        run: start of the run's keys: of which run and recipe
        number: the greater, the more is known
        given: in the order in which they were given
        revoked: keys of deputies who may not order any more
    """

    run: str
    number: int = field(default=0, compare=False)
    given: tuple[Order, ...] = ()
    revoked: frozenset[bytes] = frozenset()

    def with_order(self, order: Order) -> Orders:
        """The same with another one, which is given now."""
        last = max((other.given_at for other in self.given), default=0)
        stamped = replace(order, given_at=max(last + 1, int(1000 * time.time())))
        return replace(self, given=(*self.given, stamped))

    def signed_by(self, signer: Signer) -> bytes:
        """All of them, signed with this key, as members pass them on; `order_book.merged` reads it."""
        kind, contents = ORDER.format(self.run), [order.to_bytes() for order in self.given]
        return to_wire([], [(signer.warrant, [(content, signer.signature(kind, content)) for content in contents])])

    # ---- what follows from it ---------------------------------------------------------------------------------------

    @cached_property
    def _by_step(self) -> list[Order]:
        """Of two that count from the same step on, the one that was given later comes later."""
        return sorted(self.given, key=lambda order: order.at_step)

    def _last(self, step: float, *kinds: What) -> Order | None:
        found = [order for order in self._by_step if order.at_step <= step and order.what in kinds]
        return found[-1] if found else None

    def is_paused(self, step: int) -> bool:
        """Whether nobody computes for the update that follows this many."""
        last = self._last(step, What.PAUSE, What.RESUME)
        return last is not None and last.what is What.PAUSE

    def learning_rate_factor(self, step: int) -> float:
        """By which the schedule's learning rate is multiplied for that update."""
        last = self._last(step, What.LEARNING_RATE)
        return 1.0 if last is None else last.value

    def target_batch_size(self, step: int, recipe: int) -> int:
        """Samples of that update.

        Args:
            recipe: what the recipe says
        """
        last = self._last(step, What.TARGET)
        return recipe if last is None else int(last.value)

    def evaluate_every(self, step: int) -> int:
        """Updates after which one of the peers tests the weights; 0: nobody does."""
        last = self._last(step, What.EVALUATE)
        return 0 if last is None else int(last.value)

    def total_steps(self, step: float, recipe: int) -> int:
        """Updates of the run, as far as it is decided at this step; infinity: by all orders."""
        last = self._last(step, What.END, What.EXTEND)
        if last is None:
            return recipe
        return last.at_step if last.what is What.END else int(last.value)

    def ends_by_order(self, step: float) -> bool:
        """Whether it is ordered after how many updates the run is over."""
        return self._last(step, What.END, What.EXTEND) is not None

    def schedule_position(self, step: int, recipe: int) -> float:
        """The step whose learning rate counts, in a schedule of as many updates as the recipe has.

        Where a run is extended, what is left of the schedule is stretched over what is left of the run.
        """
        position, since, total = 0.0, 0, None
        for order in self._by_step:
            if order.what is What.EXTEND and order.at_step <= step:
                position = _stretched(order.at_step, position, since, total, recipe)
                since, total = order.at_step, int(order.value)
        return _stretched(step, position, since, total, recipe)

    def coming(self, step: int) -> list[Order]:
        """Those that do not count yet at this step."""
        return [order for order in self._by_step if order.at_step > step]

    def digest(self, step: int) -> bytes:
        """Names the orders that count for this update and the next one; empty if there are none.

        Whoever averages together has to know them: a round before they count, since the last update of a run and the
        one before a pause have to be the last on all peers.
        """
        fields = [(order.at_step, order.what.value, float(order.value)) for order in self._by_step]
        counting = [order for order in fields if order[0] <= step + 1]
        return hashlib.sha256(to_wire(*counting)).digest()[:DIGEST_BYTES] if counting else b""


def _stretched(step: int, position: float, since: int, total: int | None, recipe: int) -> float:
    """Where the schedule is, which was at a position at the step `since` and has to end with the run."""
    if total is None:
        return step
    return position + (step - since) * max(0.0, recipe - position) / (total - since)
