"""The leader's side of a meeting: peers that come to it wait in its lobby until it closes its group."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field

from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_logger

from swarm.averaging.meeting.joiner_grace import JoinerGrace
from swarm.averaging.meeting.matchmaking_messages import (
    group_reply,
    parse_knock,
    read_ticket,
    redirect,
    refusal,
    step_reply,
)
from swarm.averaging.meeting.order_exchange import OrderExchange
from swarm.membership.backoff import Backoff
from swarm.membership.failure_detector import FailureDetector, PeerMonitor
from swarm.network.acquaintances import Acquaintances
from swarm.protocol.admission import Admission
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.messages import MAX_GROUP_SIZE, Group, Ticket
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.runtime.timeouts import Timeouts

logger = get_logger(__name__)

HOLD_SHARE = 0.3
"""Share of a usual exchange for which a group is held open for a peer that lacks only the last average, and fetches
it."""
MAX_PURSUERS = 16
"""Most peers for which the next group is held until they have the average that they lack: so many that have averaged
with this peer, and as many strangers."""


@dataclass
class Guest:
    """A peer in the lobby that waits for the group to close.

    Args:
        shown: the ticket as the guest has shown it
    """

    ticket: Ticket
    shown: bytes
    answer: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def is_waiting(self) -> bool:
        """Whether it has no answer yet."""
        return not self.answer.done()

    def reply(self, message: averaging_pb2.MessageFromLeader) -> None:
        """Answer it, if it still waits."""
        if self.is_waiting:
            self.answer.set_result(message)


class Lobby:
    """Lets peers in that send join requests (guests) or turns them away, and closes a group of those that wait.

    Args:
        me: this peer
        namespace: run and recipe
        schema_hash: shapes of the averaged vector
        orders: compares the orders that guests follow
        monitor: tells which peers are not there any more
        news: set when a guest comes or leaves, or has to follow other orders
        detector: tells how long an exchange usually takes
        shunned: peers that are not let in
        timeouts: how long a group is held open
        admission: tells which peers may take part
        known: peers that have averaged with this one; all others are strangers
    """

    def __init__(
        self,
        *,
        me: PeerID,
        namespace: str,
        schema_hash: bytes,
        orders: OrderExchange,
        monitor: PeerMonitor,
        news: asyncio.Event,
        detector: FailureDetector,
        shunned: Backoff,
        timeouts: Timeouts,
        admission: Admission,
        known: Acquaintances,
    ):
        self._me, self._namespace, self._schema_hash, self._orders = me, namespace, schema_hash, orders
        self._monitor, self._news, self._detector = monitor, news, detector
        self._shunned, self._timeouts, self._admission, self._known = shunned, timeouts, admission, known
        self._guests: dict[PeerID, Guest] = {}
        self.step = 0
        """The step that this peer works on."""
        self._lineage: bytes | None = None
        """Lineage of this peer's weights."""
        self._closed_step, self._closed_with = -1, frozenset[PeerID]()
        self._leader: PeerID | None = None
        """The leader that this peer follows and waits for."""
        self._pursuers: set[PeerID] = set()
        """Peers with this one's weights that came after the group closed. They need its average to join the next."""
        self.grace = JoinerGrace(known, timeouts)

    # ---- before a meeting -------------------------------------------------------------------------------------------

    def set_step(self, step: int, lineage: bytes | None) -> None:
        """Set the step that this peer works on: early guests wait for it, late ones are told that they are behind.

        Args:
            lineage: of this peer's weights; if it is None, guests with other weights are refused only when the group is
                closed
        """
        if step > self.step:
            for peer in self._pursuers:
                self.grace.hold(peer, self.hold_seconds)
            self._pursuers.clear()
        self.step, self._lineage = step, lineage
        for peer, guest in self._guests.items():
            if not guest.is_waiting:
                continue
            if guest.ticket.step < step:
                guest.reply(step_reply(step))
                if peer not in self._monitor.lost:
                    self.grace.hold(peer)
            elif self._has_other_weights(guest.ticket):
                guest.reply(refusal(averaging_pb2.BAD_GROUP_KEY))

    @property
    def hold_seconds(self) -> float:
        """Most seconds for which a group is held open."""
        return max(self._timeouts.hold_seconds, HOLD_SHARE * self._detector.usual_seconds)

    def _has_other_weights(self, ticket: Ticket) -> bool:
        """Whether a ticket's sender is at this peer's step in another history."""
        if self._lineage is None or ticket.listens:
            return False
        return ticket.step == self.step and ticket.lineage != self._lineage

    def waits_for(self, step: int) -> bool:
        """Whether a guest has already come with samples to finish this step.

        Strangers do not count if this peer knows others.
        """

        def counts(peer: PeerID, guest: Guest) -> bool:
            is_at = guest.ticket.step == step and guest.ticket.samples > 0 and guest.is_waiting
            return is_at and (peer in self._known or not len(self._known))

        return any(counts(peer, guest) for peer, guest in self._guests.items())

    # ---- while guests wait ------------------------------------------------------------------------------------------

    def orders_changed(self) -> None:
        """Tell guests that follow other orders which ones this peer follows, and wake a leader that waits for them."""
        for guest in self._guests.values():
            if guest.ticket.orders != self._orders.digest(guest.ticket.step):
                guest.reply(self._orders.reply())
        self._news.set()

    def turn_away_removed(self) -> None:
        """Turn away guests that were removed from the run: they do not wait for the next group any more."""
        for peer in self._admission.removed(self._guests):
            self._guests[peer].reply(refusal(averaging_pb2.PROTOCOL_VIOLATION))

    def redirect_to(self, leader: PeerID) -> None:
        """Send guests, those here and those to come, to the leader that this peer waits for."""
        self._leader = leader
        for guest in self._guests.values():
            guest.reply(redirect(leader))

    def stop_redirecting(self) -> None:
        """Stop sending guests away: this peer does not wait for another leader any more."""
        self._leader = None

    # ---- the group --------------------------------------------------------------------------------------------------

    def arrived(self, ticket: Ticket) -> set[PeerID]:
        """Guests at this step that have this peer's weights, or listen; guests of another history are refused.

        A refused guest has to take over the state. All guests follow this peer's orders: any other one is answered at
        once.
        """
        arrived = set()
        for peer, guest in self._guests.items():
            if not guest.is_waiting or guest.ticket.step != ticket.step or peer in self._monitor.lost:
                continue  # on the way out, early, or not there any more
            if guest.ticket.lineage == ticket.lineage or guest.ticket.listens:
                arrived.add(peer)
            else:
                guest.reply(refusal(averaging_pb2.BAD_GROUP_KEY))
        return arrived

    def samples_of(self, arrived: Collection[PeerID]) -> int:
        """How many samples these guests have together."""
        return sum(self._guests[peer].ticket.samples for peer in arrived)

    def close(self, ticket: Ticket, arrived: Collection[PeerID], target: BatchTarget) -> Group:
        """Close the group of this peer and these guests, and tell them that it begins.

        Args:
            ticket: this peer's own
            target: with fewer samples the group does not end the step, and other peers can still come
        """
        arrived = [peer for peer in arrived if self._is_still_member(peer)]
        entries = [(peer, self._guests[peer].ticket, self._guests[peer].shown) for peer in arrived]
        entries.append((self._me, ticket, self._admission.show(ticket.to_bytes())))
        # Always in the same order, so that a reducer mostly keeps its place in the vector: there it adds what its
        # earlier means have left out.
        entries.sort(key=lambda entry: entry[0].to_bytes())
        peer_ids, tickets, shown = zip(*entries, strict=True)
        group = Group.close(nonce := os.urandom(LINEAGE_BYTES), peer_ids, tickets, self._namespace)
        if target.is_reached_by(group.samples):
            self._closed_step, self._closed_with = ticket.step, frozenset(arrived)
        reply = group_reply(group, nonce, shown)
        for peer in arrived:
            self._guests[peer].reply(reply)
        return group

    def _is_still_member(self, peer: PeerID) -> bool:
        """Whether a guest may still be in the group; if not, it is turned away.

        Its certificate may have ended in the lobby: then all other members would refuse a group with it. Or it was
        blamed meanwhile: it is left out from this group on.
        """
        guest = self._guests[peer]
        try:
            self._read_ticket(guest.shown, peer)
        except ValueError:
            guest.reply(refusal(averaging_pb2.PROTOCOL_VIOLATION))
            return False
        return True

    def _read_ticket(self, shown: bytes, peer: PeerID) -> Ticket:
        """The ticket that a peer has shown.

        Raises:
            ValueError: this peer may not come
        """
        if peer in self._shunned:
            raise ValueError("it has made a round fail")
        return read_ticket(shown, peer, self._admission)

    def reopen(self) -> None:
        """Let peers come for this step again: the round of the group that was closed last has failed."""
        self._closed_step = -1

    # ---- join requests ----------------------------------------------------------------------------------------------

    async def serve(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """Answer a join request: the server side of `Knocker.follow`."""
        sender = context.remote_id
        try:
            shown, orders = parse_knock(request.gather)
            ticket = self._read_ticket(shown, sender)
        except ValueError as error:
            logger.debug(f"{sender} came in vain: {error}")
            yield refusal(averaging_pb2.PROTOCOL_VIOLATION)
            return
        self._orders.take(orders, sender)
        answer = self._answer_at_once(request, sender, ticket)
        if answer is not None:
            if answer.code == averaging_pb2.CANCELLED and ticket.step <= self.step and not ticket.listens:
                self._hold_for(sender, ticket)
            yield answer
            return
        before, guest = self._guests.get(sender), Guest(ticket, shown)
        if before is not None:  # its second join request ends the first
            before.reply(refusal(averaging_pb2.CANCELLED))
        self._guests[sender] = guest
        self._monitor.came(sender)
        self._news.set()
        try:
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
            yield await guest.answer
        finally:
            if self._guests.get(sender) is guest:
                del self._guests[sender]
            self._news.set()

    def _answer_at_once(
        self, request: averaging_pb2.JoinRequest, sender: PeerID, ticket: Ticket
    ) -> averaging_pb2.MessageFromLeader | None:
        """What can be answered without waiting, or None for a guest that may wait in the lobby."""
        if request.schema_hash != self._schema_hash:
            return refusal(averaging_pb2.BAD_SCHEMA_HASH)
        if ticket.step < self.step:
            return step_reply(self.step)
        if ticket.step == self._closed_step and sender not in self._closed_with:
            return step_reply(self.step + 1)  # the group is closed: the result can only be downloaded
        if ticket.step > self.step + 1:
            return step_reply(self.step)  # this peer itself is behind
        if self._has_other_weights(ticket):
            return refusal(averaging_pb2.BAD_GROUP_KEY)
        if ticket.orders != self._orders.digest(ticket.step):
            return self._orders.reply()
        if self._leader is not None and self._leader != sender:
            return redirect(self._leader)
        if len(self._guests) >= MAX_GROUP_SIZE - 1:
            return refusal(averaging_pb2.GROUP_IS_FULL)
        return None

    def _hold_for(self, sender: PeerID, ticket: Ticket) -> None:
        """Hold a group open for a peer that was too late: it comes again when it has the average that it missed."""
        if (ticket.step, ticket.lineage) != (self.step, self._lineage):
            self.grace.hold(sender)  # that average is there already
        elif self._num_pursuers_like(sender) < MAX_PURSUERS:
            self._pursuers.add(sender)

    def _num_pursuers_like(self, sender: PeerID) -> int:
        """How many pursuers are known or strangers, as this sender is: strangers take no place of a known peer."""
        return sum((peer in self._known) == (sender in self._known) for peer in self._pursuers)
