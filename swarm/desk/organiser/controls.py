"""Orders that the organiser can give on the page, those that were given, and how the desk passes an order on."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipe.errors import InputError
from swarm.membership.control.giving import give_order, newest_lists, situation
from swarm.protocol.certificates import Signer
from swarm.protocol.orders import MAX_EVERY, MAX_FACTOR, MAX_TARGET, MAX_TOTAL_STEPS, MIN_FACTOR, Order, Orders, What
from swarm.protocol.signed_lists import SignedLists

if TYPE_CHECKING:
    from swarm.membership.run_manifest import RunManifest
    from swarm.network.dht_process import SwarmDHT

LOOK_SECONDS = 4.0
"""Time between two looks at the list of orders."""


@dataclass(frozen=True)
class Command:
    """An order that the page offers.

    Args:
        what: kind of the order
        title: text of the button
        meaning: what the order does, in one sentence
        label: of the field for the value; empty if the order has no value
        least, most: bounds of the value
        is_whole: the value is a whole number
    """

    what: What
    title: str
    meaning: str
    label: str = ""
    least: float = 0
    most: float = 0
    is_whole: bool = True


COMMANDS = (
    Command(What.PAUSE, "Pause", "No peer computes from that update on, until you resume the run."),
    Command(What.RESUME, "Resume", "All peers compute again, as before the pause."),
    Command(What.END, "End", "The run is over at that update, and its peers end."),
    Command(
        What.EXTEND,
        "Extend",
        "This becomes the run's number of updates.",
        "Updates in all",
        1,
        MAX_TOTAL_STEPS,
    ),
    Command(
        What.LEARNING_RATE,
        "Change the learning rate",
        "The learning rate becomes the recipe's, times this factor.",
        "Factor",
        MIN_FACTOR,
        MAX_FACTOR,
        is_whole=False,
    ),
    Command(
        What.TARGET, "Change the batch", "This becomes the target batch size.", "Samples of an update", 1, MAX_TARGET
    ),
    Command(
        What.EVALUATE,
        "Test the weights",
        "Each time this many updates are made, one peer tests the weights, in turn; 0 ends the tests.",
        "Updates between two tests",
        0,
        MAX_EVERY,
    ),
)


class SwarmControls:
    """Gives orders to a swarm, and knows the orders that were given.

    Args:
        dht: a running DHT, from `start_dht`
        manifest: of a run that has an organiser
        signer: a deputy's key; None: no orders can be given here
    """

    def __init__(self, dht: SwarmDHT, manifest: RunManifest, signer: Signer | None = None):
        self._dht, self._manifest, self._signer = dht, manifest, signer
        self._lists, self._taking = SignedLists(manifest.authority), threading.Lock()
        self._looked_at = -LOOK_SECONDS
        dht.take_part(manifest.key_prefix, manifest.authority, b"")

    @property
    def orders(self) -> Orders:
        """The orders that are known, and count."""
        return self._lists.orders

    @property
    def can_order(self) -> bool:
        """Whether there is a key whose warrant has not ended, and that the organiser has not revoked."""
        if self._signer is None or time.time() > self._manifest.authority.end_of(self._signer):
            return False
        return self._signer.public_key not in self.orders.revoked

    def look(self) -> Orders:
        """The orders that are known, and count. Asks the swarm for new ones every 4 s at most."""
        if time.monotonic() - self._looked_at >= LOOK_SECONDS:
            self._looked_at = time.monotonic()
            self._ask_the_swarm()
        return self.orders

    def plan(self, what: What, value: float) -> Order:
        """The order that would be given now, with the step from which it would count. This may take seconds.

        Raises:
            InputError: this cannot be ordered now
        """
        return situation(self._dht, self._manifest).order(what, value)

    def give(self, what: What, value: float, at_step: int) -> Order:
        """Give an order. This may take seconds.

        Args:
            at_step: step from which it counts; if that is too near by now, it counts from the next possible step on

        Returns:
            the order as it was signed

        Raises:
            InputError: this cannot be ordered now, or no peer has taken it
        """
        if self._signer is None:
            raise InputError("This desk has no key to sign orders with: start it with --deputy FILE.")
        nearest = situation(self._dht, self._manifest).nearest
        given = give_order(self._dht, self._manifest, self._signer, what, value, max(at_step, nearest))
        self._ask_the_swarm()
        return given.order

    def _ask_the_swarm(self) -> None:
        with contextlib.suppress(InputError):  # the swarm does not answer: a later look asks it again
            found = newest_lists(self._dht, self._manifest).all_signed
            with self._taking:  # a person's order is given in another thread than that of the looks
                self._lists.take_all(found)
