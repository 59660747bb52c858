"""Lists that the organiser signs and all members pass on: the newest one of the removed, and all orders together."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from hivemind.utils import get_dht_time

from swarm.protocol.certificates import MAX_REMOVALS_BYTES, Authority, NotSigned, Removals
from swarm.protocol.order_book import MAX_BOOK_BYTES, OrderBook, merged
from swarm.protocol.orders import Orders

REMOVED, ORDERS = "removed", "orders"
"""Kinds of lists: who may not take part any more, and what is ordered. These are the last parts of their keys, too."""
MOST_BYTES = {REMOVED: MAX_REMOVALS_BYTES, ORDERS: MAX_BOOK_BYTES}
"""Of a list as it was signed."""


class SignedLists:
    """What this process has heard of each kind.

    Args:
        authority: whose word counts; None: in this run nobody signs anything
    """

    def __init__(self, authority: Authority | None):
        run_id, run = ("", "") if authority is None else (authority.run_id, authority.run)
        self._authority = authority
        self.removals, self.book = Removals(run_id, 0, {}), OrderBook(run)
        self._signed: dict[str, bytes] = {}
        self._removed_since: dict[int, float] = {}

    @property
    def orders(self) -> Orders:
        """Those that count."""
        return self.book.orders

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

    def seconds_removed(self, serial: int) -> float:
        """How long this process has known that this member was removed."""
        return time.monotonic() - self._removed_since.get(serial, math.inf)

    def take(self, kind: str, signed: bytes) -> bool:
        """Whether there is something new in this list; then it counts from now on.

        Raises:
            NotSigned: it is no list of this run
        """
        if self._authority is None:
            raise NotSigned("is of no use: the run is open to everybody")
        if signed and signed == self.signed(kind):  # as most that come
            return False
        if kind == REMOVED:
            removals = Removals.read(signed, self._authority, get_dht_time())
            if removals.number <= self.removals.number:
                return False
            now = time.monotonic()
            self._removed_since = {serial: self._removed_since.get(serial, now) for serial in removals.removed}
            self.removals = removals
        else:
            book = merged(self.book, signed, self._authority, get_dht_time())
            if book == self.book:
                return False
            self.book, signed = book, book.to_bytes()
        self._signed[kind] = signed
        return True

    def take_all(self, lists: Mapping[str, bytes]) -> list[str]:
        """The kinds of those in which there was something new.

        Raises:
            NotSigned: as `take`
        """
        return [kind for kind, signed in lists.items() if signed and self.take(kind, signed)]
