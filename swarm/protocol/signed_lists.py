"""Lists that the organiser signs and all members pass on: of each kind the newest counts, for each process."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from hivemind.utils import get_dht_time

from swarm.protocol.certificates import MAX_REMOVALS_BYTES, Authority, NotSigned, Removals
from swarm.protocol.orders import MAX_ORDERS_BYTES, Orders

REMOVED, ORDERS = "removed", "orders"
"""Kinds of lists: who may not take part any more, and what is ordered. These are the last parts of their keys, too."""
MOST_BYTES = {REMOVED: MAX_REMOVALS_BYTES, ORDERS: MAX_ORDERS_BYTES}
"""Of a list as it was signed."""


class SignedLists:
    """The newest list of each kind that this process has heard of.

    Args:
        authority: whose word counts; None: in this run nobody signs anything
    """

    def __init__(self, authority: Authority | None):
        run_id = "" if authority is None else authority.run_id
        self._authority = authority
        self.removals, self.orders = Removals(run_id, 0, {}), Orders(run_id)
        self._signed: dict[str, bytes] = {}
        self._taken_at: dict[str, float] = {}

    def signed(self, kind: str) -> bytes:
        """As it was signed; empty as long as there is none."""
        return self._signed.get(kind, b"")

    @property
    def all_signed(self) -> dict[str, bytes]:
        """By kind, those that there are; for another process."""
        return dict(self._signed)

    def number(self, kind: str) -> int:
        """Of the list; 0 as long as there is none."""
        return (self.removals if kind == REMOVED else self.orders).number

    def seconds_known(self, kind: str) -> float:
        """Since when this process has it."""
        return time.monotonic() - self._taken_at.get(kind, -math.inf)

    def take(self, kind: str, signed: bytes, step: int = 0) -> bool:
        """Whether this list is newer than the one that was known; then it counts from now on.

        Args:
            step: that is under way on this peer; 0 where nobody trains

        Raises:
            NotSigned: it is no list of this run, or contradicts what has been done by the one that was known
        """
        if self._authority is None:
            raise NotSigned("is of no use: the run is open to everybody")
        if signed and signed == self.signed(kind):  # as most that come
            return False
        if kind == REMOVED:
            removals = Removals.read(signed, self._authority, get_dht_time())
            if removals.number <= self.removals.number:
                return False
            self.removals = removals
        else:
            orders = Orders.read(signed, self._authority, get_dht_time())
            if orders.number <= self.orders.number:
                return False
            orders.check_follows(self.orders, step)
            self.orders = orders
        self._signed[kind], self._taken_at[kind] = signed, time.monotonic()
        return True

    def take_all(self, lists: Mapping[str, bytes], step: int = 0) -> list[str]:
        """The kinds of those that are newer than what was known.

        Raises:
            NotSigned: as `take`
        """
        return [kind for kind, signed in lists.items() if signed and self.take(kind, signed, step)]
