"""Passes the organiser's orders on where peers meet: all members of a group have to follow the same orders."""

from __future__ import annotations

from collections.abc import Callable

from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_logger

from swarm.averaging.meeting.matchmaking_messages import orders_reply
from swarm.protocol.admission import Admission
from swarm.protocol.certificates import NotSigned
from swarm.protocol.messages import OtherOrders, Ticket
from swarm.protocol.signed_lists import ORDERS
from swarm.runtime.once import Once

logger = get_logger(__name__)


class OrderExchange:
    """Compares the orders that this process knows with those that other peers follow, and takes over newer ones.

    Args:
        admission: keeps the orders
        on_change: called when there is an order that this process did not know
    """

    def __init__(self, admission: Admission, on_change: Callable[[], None]):
        self._admission, self._on_change = admission, on_change
        self._complaints = Once()

    @property
    def signed(self) -> bytes:
        """All orders that this process knows, as they were signed; empty if it knows none."""
        return self._admission.lists.signed(ORDERS)

    def digest(self, step: int) -> bytes:
        """The name of the orders that count for the update after this step, as far as this process knows."""
        return self._admission.lists.orders.digest(step)

    def reply(self) -> averaging_pb2.MessageFromLeader:
        """The answer to a peer that follows other orders: the ones that this peer knows."""
        return orders_reply(self.signed)

    def check(self, ticket: Ticket) -> None:
        """Check that a ticket follows the orders that this process knows.

        Raises:
            OtherOrders: the trainer has to follow other ones before it can come to a round
        """
        if ticket.orders != self.digest(ticket.step):
            raise OtherOrders(self.signed)

    def take(self, signed: bytes, peer: PeerID) -> bool:
        """Take over orders that a member has passed on; returns whether this process did not know one of them."""
        try:
            is_newer = bool(signed) and self._admission.lists.take(ORDERS, signed)
        except NotSigned as error:
            if self._complaints.first("orders"):
                logger.warning(f"The orders that {peer} passes on are not followed: the list {error} (said once)")
            return False
        if is_newer:
            self._on_change()
        return is_newer
