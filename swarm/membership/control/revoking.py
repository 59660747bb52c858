"""How the organiser revokes a deputy whose warrant has not ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipe.errors import InputError
from swarm.membership.control.giving import hand_over, newest_lists, situation
from swarm.membership.run_manifest import RunManifest
from swarm.protocol.certificates import NotSigned, Signer
from swarm.protocol.order_book import MAX_REVOKED, revoke
from swarm.protocol.orders import Order

if TYPE_CHECKING:
    from swarm.network.dht_process import SwarmDHT


@dataclass(frozen=True)
class Revoked:
    """What became of a deputy's orders.

    Args:
        kept: orders that have begun, or begin within two updates; they still count
        dropped: the other orders
        num_peers: peers that have taken the list
    """

    kept: tuple[Order, ...]
    dropped: tuple[Order, ...]
    num_peers: int


def revoke_deputy(dht: SwarmDHT, manifest: RunManifest, organiser: Signer, key: bytes) -> Revoked:
    """Revoke a deputy: it can give no more orders, and can admit no more members at the desk.

    The peers of the run pass the revocation on.

    Args:
        dht: DHT that knows the run (`SwarmDHT.take_part`)
        organiser: the organiser's own key
        key: public key of the deputy

    Raises:
        InputError: it is not the organiser's own key, no peer trains, no peer has taken the list, or too many deputies
            are revoked
    """
    now, book = situation(dht, manifest), newest_lists(dht, manifest).book
    given, known = book.given_by(key), [one.key for one in book.revocations]
    kept = [order for order in given if order.order.at_step <= now.nearest]
    if key not in known:
        if len(known) >= MAX_REVOKED:
            raise InputError(
                f"This run has {MAX_REVOKED} revoked deputies, the most that it can have: start another run."
            )
        try:
            book = book.with_all(revoke(key, kept, organiser, manifest.authority))
        except NotSigned as error:
            raise InputError(f"This key cannot revoke a deputy: what it signs {error}.") from None
    can_be_called = [peer_id for peer_id, record in now.records.items() if not record.client_mode]
    num_peers = hand_over(dht, manifest, book.to_bytes(), can_be_called)
    if not num_peers:
        raise InputError("No peer has taken the list: try again.")
    dropped = [order for order in given if order not in kept]
    return Revoked(*(tuple(order.order for order in orders) for orders in (kept, dropped)), num_peers)
