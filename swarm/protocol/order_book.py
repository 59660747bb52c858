"""All orders of a run as one peer knows them. Each order is signed by itself, and peers merge what they know.

So two people can give orders at the same moment: both orders count, on all peers, in whatever order they arrive. No
signer can take back another's order, except that the organiser can revoke a deputy. Then only those of the deputy's
orders count that she names. Orders that it signs later with an earlier time do not count either.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta

from swarm.protocol.certificates import (
    CLOCK_SECONDS,
    KEY_BYTES,
    MAX_WARRANT_BYTES,
    ORDER,
    REVOCATION,
    SIGNATURE_BYTES,
    Authority,
    NotSigned,
    Right,
    Signer,
)
from swarm.protocol.orders import LATEST_MS, MAX_OF_DEPUTY, MAX_ORDERS, Order, Orders
from swarm.protocol.wire import from_wire, to_wire

MAX_DEPUTIES = 8
"""Deputies whose orders a run takes. Of more, those count whose warrants begin first."""
MAX_REVOKED = 16
"""Revocations of a run."""
MAX_SIGNED_BYTES = 512
"""Size of one order or revocation, without its signature."""
MAX_BOOK_BYTES = 2**16
"""Size of a list of orders and revocations as members pass it on."""
ID_BYTES = 8
"""Size of the hash by which a revocation names an order."""
MAX_PROVEN = 2048
"""Orders, and revocations, that are remembered because their signatures were checked. A list has 520 orders at most."""
_REVOCATION_COUNTS = LATEST_MS * 1024
"""What a revocation adds to the number of a book: more than all orders together can add."""

_Content = Annotated[bytes, Meta(max_length=MAX_SIGNED_BYTES)]
_Signature = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
_Pair = tuple[_Content, _Signature]
_BOOK = msgspec.msgpack.Decoder(
    tuple[
        Annotated[list[_Pair], Meta(max_length=MAX_REVOKED)],
        Annotated[
            list[
                tuple[
                    Annotated[bytes, Meta(max_length=MAX_WARRANT_BYTES)],
                    Annotated[list[_Pair], Meta(max_length=MAX_ORDERS)],
                ]
            ],
            Meta(max_length=MAX_DEPUTIES + 1),
        ],
    ]
)
_Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_Id = Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
_REVOKED = msgspec.msgpack.Decoder(tuple[_Key, Annotated[list[_Id], Meta(max_length=MAX_OF_DEPUTY)]])


@dataclass(frozen=True)
class SignedOrder:
    """An order with its signature.

    Args:
        content: the order as it travels
        signature: its signature as it travels
        warrant: the deputy's warrant; empty if the organiser has signed
        order: the order itself
        key: public key of the signer
        since: time from which that key may sign, seconds since 1970
    """

    content: bytes
    signature: bytes
    warrant: bytes
    order: Order = field(compare=False)
    key: bytes = field(compare=False)
    since: int = field(compare=False)

    @property
    def id(self) -> bytes:
        """The hash by which a revocation names it."""
        return _id_of(self.signature)

    @property
    def place(self) -> tuple[int, bytes]:
        """Sort key: orders come in the order in which they were given. Equal times have the same order on all peers."""
        return self.order.given_at, self.signature

    @classmethod
    def read(cls, content: bytes, signature: bytes, warrant: bytes, authority: Authority, now: float) -> SignedOrder:
        """Read an order and check its signature.

        Args:
            content: the order as it travels
            signature: its signature as it travels
            warrant: the deputy's warrant; empty for the organiser
            authority: the organiser of the run
            now: seconds since 1970

        Raises:
            NotSigned: it is no order of this run, is dated in the future, or at a time at which its signer had no right
                to order
        """
        found = _proven_order(content, signature, warrant, authority)
        if found.order.given_at / 1000 > now + CLOCK_SECONDS:
            raise NotSigned("was made in the future: are both clocks right?")
        return found


@dataclass(frozen=True)
class Revocation:
    """The organiser's signed statement that a deputy may give no more orders.

    Args:
        content: the statement as it travels: MessagePack of `key` and a list of `kept`
        signature: its signature as it travels
        key: public key of the deputy
        kept: hashes that name those of the deputy's orders that still count
    """

    content: bytes
    signature: bytes
    key: bytes = field(compare=False)
    kept: frozenset[bytes] = field(compare=False)

    @classmethod
    def read(cls, content: bytes, signature: bytes, authority: Authority) -> Revocation:
        """Read a revocation and check its signature.

        Raises:
            NotSigned: the organiser has not signed it for this run
        """
        return _proven_revocation(content, signature, authority)


def _id_of(signature: bytes) -> bytes:
    """The hash by which a revocation names the order with this signature."""
    return hashlib.sha256(signature).digest()[:ID_BYTES]


@lru_cache(maxsize=MAX_PROVEN)
def _proven_order(content: bytes, signature: bytes, warrant: bytes, authority: Authority) -> SignedOrder:
    """As `SignedOrder.read`, without the check of the clock. Results are cached: lists repeat the same orders.

    Orders that do not count are cached as well.
    """
    data = to_wire(content, signature, warrant)
    signed = authority.read(ORDER.format(authority.run), data, 2 * MAX_SIGNED_BYTES, Right.CONTROL)
    order = Order.from_bytes(content)
    signed.check_time(order.given_at / 1000)
    return SignedOrder(content, signature, warrant, order, signed.key, signed.begin)


@lru_cache(maxsize=MAX_PROVEN)
def _proven_revocation(content: bytes, signature: bytes, authority: Authority) -> Revocation:
    data = to_wire(content, signature, b"")
    authority.read(REVOCATION.format(authority.run_id), data, 2 * MAX_SIGNED_BYTES, None)
    try:
        key, kept = from_wire(_REVOKED, content, MAX_SIGNED_BYTES)
    except ValueError:
        raise NotSigned("cannot be read") from None
    return Revocation(content, signature, key, frozenset(kept))


@dataclass(frozen=True)
class OrderBook:
    """All orders and revocations that one peer knows.

    Args:
        run: start of the run's keys, which names run and recipe
        given: orders that count, in the order in which they were given
        revocations: revocations of deputies
    """

    run: str
    given: tuple[SignedOrder, ...] = ()
    revocations: tuple[Revocation, ...] = ()

    def to_bytes(self) -> bytes:
        """The list as members pass it on, at most 64 KiB; empty if there is nothing in it.

        Peers that know the same orders and revocations have the same bytes.
        """
        if not self.given and not self.revocations:
            return b""
        groups: defaultdict[bytes, list[tuple[bytes, bytes]]] = defaultdict(list)
        for order in self.given:
            groups[order.warrant].append((order.content, order.signature))
        told = [(revocation.content, revocation.signature) for revocation in self.revocations]
        return to_wire(told, sorted(groups.items()))

    def with_all(self, other: OrderBook) -> OrderBook:
        """A book with everything from this one and another one that counts."""
        return _bounded(self.run, [*self.given, *other.given], [*self.revocations, *other.revocations])

    def has(self, given: Iterable[SignedOrder], revocations: Iterable[Revocation]) -> bool:
        """Whether all these orders and revocations are in it."""
        return self._all_given.issuperset(given) and set(self.revocations).issuperset(revocations)

    @cached_property
    def _all_given(self) -> frozenset[SignedOrder]:
        return frozenset(self.given)

    @cached_property
    def orders(self) -> Orders:
        """The orders that count, without signatures."""
        return Orders(
            self.run,
            self._number,
            tuple(order.order for order in self.given),
            frozenset(revocation.key for revocation in self.revocations),
        )

    @property
    def _number(self) -> int:
        """A number that changes with the orders and revocations in the book; it nearly always grows."""
        # An order adds more if its time is earlier. So the number also grows where, at a limit, an earlier order takes
        # the place of a later one. A revocation adds more than it removes. The number shrinks in one case: a deputy
        # with an earlier warrant takes the place of another deputy, which has given more orders.
        earliness = sum(LATEST_MS - order.order.given_at for order in self.given)
        return earliness + _REVOCATION_COUNTS * len(self.revocations)

    def given_by(self, key: bytes) -> list[SignedOrder]:
        """The orders that were signed with this key."""
        return [order for order in self.given if order.key == key]

    def number_left(self, signer: Signer) -> int:
        """How many more orders this key can give."""
        most = MAX_OF_DEPUTY if signer.warrant else MAX_ORDERS
        deputies = {order.key for order in self.given if order.warrant}
        if signer.warrant and signer.public_key not in deputies and len(deputies) >= MAX_DEPUTIES:
            return 0
        return most - len(self.given_by(signer.public_key))


def revoke(key: bytes, kept: Collection[SignedOrder], organiser: Signer, authority: Authority) -> OrderBook:
    """A book with the revocation of a deputy, signed now.

    Args:
        key: public key of the deputy
        kept: those of its orders that still count
        organiser: the organiser's own key
        authority: the organiser of the run

    Raises:
        NotSigned: the key is a deputy's, or not that of this run's organiser
    """
    content = to_wire(key, sorted(order.id for order in kept))
    signature = organiser.signature(REVOCATION.format(authority.run_id), content)
    if organiser.warrant:
        raise NotSigned("was signed by a deputy, and only the organiser's own key can revoke one")
    return OrderBook(authority.run, (), (Revocation.read(content, signature, authority),))


def _bounded(run: str, given: Iterable[SignedOrder], revocations: Iterable[Revocation]) -> OrderBook:
    """A book of these, each once, without those that do not count. Of too many, all peers keep the same ones."""
    revoked = _bounded_revocations(revocations)
    by_key: defaultdict[bytes, list[SignedOrder]] = defaultdict(list)
    for order in sorted(set(given), key=lambda order: (order.place, order.since, order.warrant)):
        if not all(order.id in one.kept for one in revoked if one.key == order.key):
            continue
        earlier = by_key[order.key]
        if not earlier or earlier[-1].signature != order.signature:  # it may come under two warrants of one deputy
            earlier.append(order)
    deputies = sorted({(order.since, order.key) for orders in by_key.values() for order in orders if order.warrant})
    allowed = {key for _, key in deputies[:MAX_DEPUTIES]}
    kept = [
        order
        for orders in by_key.values()
        for order in orders[: MAX_OF_DEPUTY if orders[0].warrant else MAX_ORDERS]
        if not order.warrant or order.key in allowed
    ]
    return OrderBook(run, tuple(sorted(kept, key=lambda order: order.place)), tuple(revoked))


def _bounded_revocations(revocations: Iterable[Revocation]) -> list[Revocation]:
    return sorted(set(revocations), key=lambda revocation: (revocation.key, revocation.signature))[:MAX_REVOKED]


def merged(known: OrderBook, data: bytes, authority: Authority, now: float | None = None) -> OrderBook:
    """What is known, merged with a list that another peer has passed on.

    A liar may have composed the list of anything that the organiser and her deputies have ever signed. So no more of it
    is checked than can count, and nothing twice.

    Args:
        known: what this peer knows
        data: the other peer's list
        authority: the organiser of the run
        now: seconds since 1970; None for this machine's time

    Raises:
        NotSigned: something in it was not signed by the organiser or a deputy, or it has more than any peer passes on
    """
    now = time.time() if now is None else now
    try:
        told, groups = from_wire(_BOOK, data, MAX_BOOK_BYTES)
    except ValueError:
        raise NotSigned("cannot be read") from None
    if len({warrant for warrant, _ in groups}) < len(groups):
        raise NotSigned("has the orders of one key in two places")
    if any(len(pairs) > (MAX_OF_DEPUTY if warrant else MAX_ORDERS) for warrant, pairs in groups):
        raise NotSigned("has more orders of one key than count")
    revocations = [Revocation.read(*pair, authority) for pair in dict.fromkeys(told)]
    counting = _bounded_revocations([*known.revocations, *revocations])
    given: list[SignedOrder] = []
    for warrant, pairs in groups:
        key = authority.read_warrant(warrant)[0] if warrant else authority.organiser
        left = [one.kept for one in counting if one.key == key]
        for content, signature in dict.fromkeys(pairs):
            if all(_id_of(signature) in kept for kept in left):
                given.append(SignedOrder.read(content, signature, warrant, authority, now))
    if known.has(given, revocations):
        return known
    return known.with_all(OrderBook(known.run, tuple(given), tuple(revocations)))


def revocations_in(data: bytes) -> bytes:
    """A list without its orders. A revocation counts in every run that is begun under the run's id.

    Raises:
        NotSigned: it cannot be read
    """
    try:
        return to_wire(from_wire(_BOOK, data, MAX_BOOK_BYTES)[0], [])
    except ValueError:
        raise NotSigned("cannot be read") from None
