"""The follower's side of a meeting: a peer comes to a leader, waits in its lobby, and hears which group it is in.

To *knock* is to send a join request. The leader's *lobby* (`Lobby`) is where a peer that was let in waits for its
group.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.proto import averaging_pb2
from hivemind.utils import get_logger

from swarm.averaging.meeting.matchmaking_messages import parse_group, parse_orders, parse_step, to_knock
from swarm.averaging.meeting.order_exchange import OrderExchange
from swarm.membership.failure_detector import PeerMonitor
from swarm.network.peer_service import PeerService
from swarm.protocol.admission import Admission, NotAMember
from swarm.protocol.messages import MAX_GROUP_SIZE, Behind, Group, Refused, Ticket
from swarm.runtime.async_utils import unless
from swarm.runtime.timeouts import Timeouts

logger = get_logger(__name__)

STUCK_SHARE = 0.9
"""Share of the longest meeting after which a leader that has let this peer in, and does not begin, is stuck. It is less
than all of it, since some time passes before the waiting peer looks at the clock."""
SAY_AGAIN_SECONDS = 60.0
"""Seconds after which the volunteer is told again that other peers leave this one out."""
UNREACHABLE = (TimeoutError, P2PDaemonError, P2PHandlerError, StopAsyncIteration, OSError)
"""What a call raises when the peer that is called is gone, late or refuses."""


class Knocker:
    """Sends join requests to leaders, and waits for their groups.

    Args:
        p2p: this peer's connection to the network
        namespace: run and recipe
        schema_hash: shapes of the averaged vector
        orders: takes over what a leader follows
        monitor: tells which peers are not there any more
        timeouts: how long this peer waits for others
        admission: makes this peer's tickets count, and tells which peers may be in a group
        on_accepted: called when this peer waits in a leader's lobby
        on_done: called when it does not wait there any more
    """

    def __init__(
        self,
        *,
        p2p: P2P,
        namespace: str,
        schema_hash: bytes,
        orders: OrderExchange,
        monitor: PeerMonitor,
        timeouts: Timeouts,
        admission: Admission,
        on_accepted: Callable[[PeerID], None],
        on_done: Callable[[], None],
    ):
        self._p2p, self._namespace, self._schema_hash = p2p, namespace, schema_hash
        self._orders, self._monitor, self._timeouts, self._admission = orders, monitor, timeouts, admission
        self._on_accepted, self._on_done = on_accepted, on_done
        self.stuck: set[PeerID] = set()
        """Leaders that have let this peer in at this meeting and never began, or have broken off twice in a row."""
        self._broke_off: set[PeerID] = set()
        """Leaders that have broken off when this peer was last in their lobby. There is a limit, since names cost a
        stranger nothing."""
        self._lobby_seconds: dict[PeerID, float] = {}
        """For each leader that this peer follows now, the time in its lobbies that ended with an answer of the leader;
        infinite if the answer was malformed."""
        self.left_out: Collection[PeerID] = frozenset()
        """Peers that this peer does not follow, even if other peers do."""
        self.usual_meeting_seconds = math.inf
        """Seconds after which a leader closes its group at the latest, if its own step is over when this peer comes."""
        self.longest_meeting_seconds = math.inf
        """Seconds after which a leader that has not begun will not begin."""
        self._said_shunned_at = -math.inf

    async def follow(self, leader: PeerID, ticket: Ticket, wait_until: float, redirects: int = 2) -> Group | None:
        """Send a join request to the leader; returns its group, or None if it cannot lead this peer now.

        A leader that lets this peer in and after a long wait gives it no group, whatever it answers, has broken off.

        Args:
            wait_until: event-loop time at which this peer leaves a leader's lobby
            redirects: how often a leader may send this peer to another one

        Raises:
            Behind: the swarm has finished this step already
            OtherOrders: the organiser has ordered something that the ticket does not know
            Refused: the leader averages something else
        """
        try:
            group = await self._follow(leader, ticket, wait_until, redirects)
        finally:
            lobby_seconds = self._lobby_seconds.pop(leader, 0.0)
        if group is not None:
            self._broke_off.discard(leader)
        elif lobby_seconds > self.usual_meeting_seconds and not ticket.listens:
            self._note_broken_off(leader)
        return group

    async def _follow(
        self, leader: PeerID, ticket: Ticket, wait_until: float, redirects: int, orders: bytes = b""
    ) -> Group | None:
        """As `follow`, without blame.

        Args:
            orders: the organiser's orders, for a leader that did not know them
        """
        if (reply := await self._knock(leader, ticket, wait_until, orders)) is None:
            return None
        if (theirs := parse_orders(reply)) is not None:
            self._orders.take(theirs, leader)
            self._orders.check(ticket)
            if orders or not (own := self._orders.signed):
                return None  # it was told already, or there is nothing to tell
            return await self._follow(leader, ticket, wait_until, redirects, own)
        if reply.code == averaging_pb2.NOT_A_LEADER and reply.suggested_leader and redirects:
            try:
                suggested = PeerID(reply.suggested_leader)
            except ValueError as error:
                logger.debug(f"{leader} names a leader with a malformed peer id: {error}")
                return None
            return await self._follow_elsewhere(suggested, leader, ticket, wait_until, redirects - 1)
        return self._read_reply(reply, leader, ticket)

    async def compare_orders(self, peer: PeerID, ticket: Ticket, orders: bytes = b"") -> None:
        """Compare the organiser's orders with those of a peer; if they differ, both know all of them afterwards.

        Args:
            ticket: a listener's ticket for the step in question
            orders: the orders that this peer tells the other one
        """
        stream = None
        try:
            async with asyncio.timeout(self._timeouts.reply_seconds):
                stream = await self._open_door(peer, self._request(ticket, orders))
                reply = await anext(stream)
        except UNREACHABLE as error:
            logger.debug(f"{peer} does not say what it follows: {error!r}")
            return
        finally:
            if stream is not None:
                await stream.aclose()
        if (theirs := parse_orders(reply)) is None or self._orders.take(theirs, peer) or orders:
            return
        if own := self._orders.signed:
            await self.compare_orders(peer, ticket, own)

    # ---- the join request -------------------------------------------------------------------------------------------

    async def _knock(
        self, leader: PeerID, ticket: Ticket, wait_until: float, orders: bytes
    ) -> averaging_pb2.MessageFromLeader | None:
        """The leader's last answer, after a wait in its lobby if it lets this peer in; None if nothing comes."""
        request, loop = self._request(ticket, orders), asyncio.get_running_loop()
        stream, accepted, came_at, lost = None, False, loop.time(), self._monitor.watch(leader, can_be_called=True)
        try:
            stream = await unless(lost, self._open_door(leader, request), self._timeouts.reply_seconds)
            reply = await unless(lost, anext(stream), self._timeouts.reply_seconds)
            if accepted := reply.code == averaging_pb2.ACCEPTED:
                self._on_accepted(leader)
                remaining = max(0.0, wait_until - loop.time())
                reply = await unless(lost, anext(stream), remaining)
                self._note_lobby(leader, loop.time() - came_at)
            return reply
        except UNREACHABLE as error:
            logger.debug(f"{leader} does not lead this peer: {error!r}")
            timed_out_inside = accepted and isinstance(error, TimeoutError) and not ticket.listens
            self._note_failed_leader(leader, lost.done(), timed_out_inside, loop.time() - came_at)
            if accepted and not (isinstance(error, TimeoutError) or lost.done()):  # it has closed the stream
                self._note_lobby(leader, loop.time() - came_at)
            return None
        finally:
            self._on_done()
            if stream is not None:
                await stream.aclose()

    def _request(self, ticket: Ticket, orders: bytes) -> averaging_pb2.JoinRequest:
        brings = to_knock(self._admission.show(ticket.to_bytes()), orders)
        return averaging_pb2.JoinRequest(schema_hash=self._schema_hash, gather=brings, client_mode=ticket.client_mode)

    def _open_door(self, peer: PeerID, request: averaging_pb2.JoinRequest) -> Awaitable[AsyncIterator]:
        """Send a join request; returns the stream of the peer's answers."""
        return PeerService.get_stub(self._p2p, peer, namespace=self._namespace).rpc_join_group(request)

    def _note_failed_leader(self, leader: PeerID, is_lost: bool, timed_out_inside: bool, waited_seconds: float) -> None:
        """Note whether a leader that did not lead is to blame: then this meeting does not wait for it again.

        Args:
            is_lost: whether it is not there any more
            timed_out_inside: whether it let this peer in and did not begin in time: its process answers, but its
                trainer does not come
            waited_seconds: how long this peer has waited for it
        """
        if timed_out_inside and waited_seconds >= STUCK_SHARE * self.longest_meeting_seconds:
            self.stuck.add(leader)
        if is_lost or timed_out_inside:
            self._monitor.lost.add(leader)

    def _note_lobby(self, leader: PeerID, seconds: float) -> None:
        self._lobby_seconds[leader] = self._lobby_seconds.get(leader, 0.0) + seconds

    def _note_broken_off(self, leader: PeerID) -> None:
        """Note that a leader has let this peer in and then given it no group, after a long wait or in a wrong form.

        Once this can happen to an honest leader. The second time in a row it counts as one that never begins.
        """
        if leader in self._broke_off:
            self.stuck.add(leader)
            self._monitor.lost.add(leader)
            return
        if len(self._broke_off) >= MAX_GROUP_SIZE:
            self._broke_off.clear()
        self._broke_off.add(leader)

    # ---- what it is told --------------------------------------------------------------------------------------------

    async def _follow_elsewhere(
        self, suggested: PeerID, leader: PeerID, ticket: Ticket, wait_until: float, redirects: int
    ) -> Group | None:
        """Follow the leader that a peer has suggested; if it does not lead, that peer finds out as well and leads."""
        if suggested == self._p2p.peer_id:
            return None
        if suggested not in self._monitor.lost and suggested not in self.left_out:
            group = await self.follow(suggested, ticket, wait_until, redirects)
            if group is not None:
                return group
        await asyncio.sleep(half_more_or_less(self._timeouts.redirect_seconds))
        return await self._follow(leader, ticket, wait_until, redirects)

    def _read_reply(self, reply: averaging_pb2.MessageFromLeader, leader: PeerID, ticket: Ticket) -> Group | None:
        if reply.code == averaging_pb2.BAD_SCHEMA_HASH:
            raise Refused(leader)
        if reply.code == averaging_pb2.BAD_GROUP_KEY:
            raise Behind(ticket.step, leader)
        if reply.code == averaging_pb2.PROTOCOL_VIOLATION:
            self._say_that_we_are_shunned(leader)
        leader_step = parse_step(reply)
        if leader_step is not None and leader_step > ticket.step:
            raise Behind(leader_step, leader)
        if reply.code != averaging_pb2.BEGIN_ALLREDUCE:
            return None
        try:
            return parse_group(reply, leader, self._p2p.peer_id, ticket, self._admission, self._namespace)
        except ValueError as error:
            logger.warning(f"Ignoring a malformed group from {leader}: {error}")
            # The leader may not have heard yet that a member has been removed: then it is not to blame.
            self._lobby_seconds[leader] = 0.0 if isinstance(error, NotAMember) else math.inf
            return None

    def _say_that_we_are_shunned(self, leader: PeerID) -> None:
        if time.monotonic() > self._said_shunned_at + SAY_AGAIN_SECONDS:
            self._said_shunned_at = time.monotonic()
            logger.warning(
                f"{leader} leaves this peer out for a while. Possible reasons: it could not use what this peer sent; "
                "this peer's line is far too slow (`swarm doctor` shows the traffic of the run); or it does not accept "
                "this peer's certificate"
            )


def half_more_or_less(seconds: float) -> float:
    """These seconds, changed by up to half at random: so two peers do not knock at each other again and again."""
    return seconds * random.uniform(0.5, 1.5)
