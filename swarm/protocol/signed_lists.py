"""Lists that the organiser signs and all members pass on: the newest list of removed members, and all orders."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from hivemind.utils import get_dht_time

from swarm.protocol.certificates import MAX_REMOVALS_BYTES, Authority, NotSigned, Removals
from swarm.protocol.order_book import MAX_BOOK_BYTES, OrderBook, merged
from swarm.protocol.orders import Orders

REMOVED, ORDERS = "removed", "orders"
"""Kinds of lists: removed members, and orders. They are also the last parts of the lists' DHT keys."""
MOST_BYTES = {REMOVED: MAX_REMOVALS_BYTES, ORDERS: MAX_BOOK_BYTES}
"""Size of a signed list of each kind."""


class SignedLists:
    """The newest lists that this process has heard of, one of each kind.

    Args:
        authority: the organiser of the run; None in an open run, where no lists are signed
    """

    def __init__(self, authority: Authority | None):
        run_id, run = ("", "") if authority is None else (authority.run_id, authority.run)
        self._authority = authority
        self.removals, self.book = Removals(run_id, 0, {}), OrderBook(run)
        self._signed: dict[str, bytes] = {}
        self._removed_since: dict[int, float] = {}

    @property
    def orders(self) -> Orders:
        """The orders that count."""
        return self.book.orders

    def signed(self, kind: str) -> bytes:
        """The newest list of this kind, as it was signed; empty as long as there is none."""
        return self._signed.get(kind, b"")

    @property
    def all_signed(self) -> dict[str, bytes]:
        """All known lists by kind, as they were signed, for another process."""
        return dict(self._signed)

    def number(self, kind: str) -> int:
        """Number of the newest list of this kind; 0 as long as there is none."""
        return (self.removals if kind == REMOVED else self.orders).number

    def seconds_removed(self, serial: int) -> float:
        """How long this process has known that this member was removed; negative infinity if it was not."""
        return time.monotonic() - self._removed_since.get(serial, math.inf)

    def take(self, kind: str, signed: bytes) -> bool:
        """Take what is new in a list, which counts from now on; return whether there was anything new.

        Raises:
            NotSigned: it is no list of this run
        """
        if self._authority is None:
            raise NotSigned("is of no use: the run is open to everybody")
        if signed and signed == self.signed(kind):  # most lists that come are known
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
        """Take several lists; return the kinds of those in which there was something new.

        Raises:
            NotSigned: as `take`
        """
        return [kind for kind, signed in lists.items() if signed and self.take(kind, signed)]
