"""What the organiser can order from the page, what was ordered, and how the desk passes an order on."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipe.errors import InputError
from swarm.membership.control.giving import give_order, newest_orders, situation
from swarm.protocol.certificates import Signer
from swarm.protocol.orders import MAX_EVERY, MAX_FACTOR, MAX_TARGET, MAX_TOTAL_STEPS, MIN_FACTOR, Order, Orders, What

if TYPE_CHECKING:
    from swarm.membership.run_manifest import RunManifest
    from swarm.network.dht_process import SwarmDHT

LOOK_SECONDS = 4.0
"""Between two looks at the list of orders."""


@dataclass(frozen=True)
class Command:
    """An order that the page offers.

    Args:
        what: is ordered
        title: what a button says
        meaning: one sentence
        label: of the field for its value; empty if it has none
        least, most: bounds of that value
        is_whole: it is a whole number
    """

    what: What
    title: str
    meaning: str
    label: str = ""
    least: float = 0
    most: float = 0
    is_whole: bool = True


COMMANDS = (
    Command(What.PAUSE, "Pause", "Nobody computes from that update on, until you resume."),
    Command(What.RESUME, "Resume", "All compute again, as if nothing had happened."),
    Command(What.END, "End", "The run is over at that update, and its peers end."),
    Command(What.EXTEND, "Extend", "The run gets so many updates in all.", "Updates in all", 1, MAX_TOTAL_STEPS),
    Command(
        What.LEARNING_RATE,
        "Change the learning rate",
        "It becomes so many times what the recipe says.",
        "Times what the recipe says",
        MIN_FACTOR,
        MAX_FACTOR,
        is_whole=False,
    ),
    Command(What.TARGET, "Change the batch", "An update takes so many samples.", "Samples of an update", 1, MAX_TARGET),
    Command(
        What.EVALUATE,
        "Test the weights",
        "After so many updates one of the peers tests the weights, another one each time; 0 ends that.",
        "Updates between two tests",
        0,
        MAX_EVERY,
    ),
)


class SwarmControls:
    """Gives orders to a swarm, and knows those that were given.

    Args:
        dht: a running DHT, of `start_dht`
        manifest: of a run that has an organiser
        signer: a deputy's key; None: nothing can be ordered here
    """

    def __init__(self, dht: SwarmDHT, manifest: RunManifest, signer: Signer | None = None):
        self._dht, self._manifest, self._signer = dht, manifest, signer
        self.orders = Orders(manifest.key_prefix)
        """The newest list."""
        self._looked_at = -LOOK_SECONDS
        dht.take_part(manifest.key_prefix, manifest.authority, b"")

    @property
    def can_order(self) -> bool:
        """There is a key whose time is not over, and the organiser has not revoked it."""
        if self._signer is None or time.time() > self._manifest.authority.end_of(self._signer):
            return False
        return self._signer.public_key not in self.orders.revoked

    def look(self) -> Orders:
        """The newest list, as far as it is known."""
        if time.monotonic() - self._looked_at >= LOOK_SECONDS:
            self._looked_at = time.monotonic()
            with contextlib.suppress(InputError):  # nobody answers: what was ordered counts on
                self._take(newest_orders(self._dht, self._manifest))
        return self.orders

    def plan(self, what: What, value: float) -> Order:
        """What would be ordered now, with the step from which it counts. It may take seconds.

        Raises:
            InputError: it cannot be ordered
        """
        now = situation(self._dht, self._manifest)
        self._take(now.orders)
        return now.order(what, value)

    def give(self, what: What, value: float, at_step: int) -> Order:
        """Order it, from that step on or, if that is too near by now, a little later. It may take seconds.

        Raises:
            InputError: it cannot be ordered
        """
        if self._signer is None:
            raise InputError("This desk has no key to sign orders with: start it with --deputy FILE.")
        nearest = situation(self._dht, self._manifest).nearest
        given = give_order(self._dht, self._manifest, self._signer, what, value, max(at_step, nearest))
        with contextlib.suppress(InputError):  # it is shown a little later
            self._take(newest_orders(self._dht, self._manifest))
        return given.order

    def _take(self, orders: Orders) -> None:
        if orders.number > self.orders.number:
            self.orders = orders
