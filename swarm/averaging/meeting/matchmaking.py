"""How peers meet at the end of a step: everyone goes to the most senior peer, who closes the group when all have come.

Hivemind's matchmaking announces every round in the DHT and waits a fixed time for whoever may turn up. But the members
of a swarm know each other from their progress records, so they meet without the DHT: the senior full peer leads, the
others knock at its door (early ones wait in its lobby), and the group closes half a round trip after the last expected
member arrives, or when the leader's patience ends. Who is not there any more (`failure_detector`) is not waited for;
if that is the leader, the next in seniority leads.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.proto import averaging_pb2
from hivemind.utils import get_logger

from swarm.averaging.meeting.joiner_grace import JoinerGrace
from swarm.averaging.meeting.matchmaking_messages import (
    group_reply,
    orders_reply,
    parse_group,
    parse_knock,
    parse_orders,
    parse_step,
    read_ticket,
    redirect,
    refusal,
    step_reply,
    to_knock,
)
from swarm.membership.backoff import Backoff
from swarm.membership.failure_detector import FailureDetector, PeerMonitor
from swarm.network.acquaintances import Acquaintances
from swarm.network.peer_service import PeerService
from swarm.protocol.admission import OPEN, Admission
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.certificates import NotSigned
from swarm.protocol.messages import (
    MAX_GROUP_SIZE,
    Behind,
    Group,
    Member,
    OtherOrders,
    Refused,
    RoundFailed,
    Ticket,
)
from swarm.protocol.signed_lists import ORDERS
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.runtime.async_utils import unless
from swarm.runtime.once import Once
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts
from swarm.runtime.token_bucket import TokenBucket

logger = get_logger(__name__)

WATCHED_SENIORS = 3
"""Seniors that a peer watches that follows one of them; more would be many calls in a large swarm."""
STRANGER_SECONDS = 4.0
"""A token bucket: a leader may wait this long for nobody but strangers."""
STRANGER_SHARE = 0.04
"""What the leader regains of that every second, in seconds."""
FORMING_SECONDS = 30.0
"""The same bucket of a leader that knows nobody else."""
FORMING_SHARE = 0.5
"""What such a leader regains of that every second, in seconds."""
HOLD_SHARE = 0.3
"""Share of a usual exchange for which a group is held open for a peer that lacks only the last average, and fetches
it."""
STUCK_SHARE = 0.9
"""Share of the longest meeting after which a leader that has let this peer in, and does not begin, is stuck. Less than
all of it: some time passes before the peer that waits looks at the clock."""
MAX_PURSUERS = 16
"""Peers for which the next group is held at most until they have the average that they lack."""
SAY_AGAIN_SECONDS = 60.0
"""Seconds after which a peer is told again that others leave it out."""
UNREACHABLE = (TimeoutError, P2PDaemonError, P2PHandlerError, StopAsyncIteration, OSError)
"""What a call raises when the peer that is called is gone, late or refuses."""


@dataclass
class Guest:
    """Someone in the lobby who waits for the group to close.

    Args:
        shown: the ticket as it has shown it
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


class Matchmaking:
    """Forms one group at a time for the peer in whose averager process it lives.

    Args:
        p2p: this peer's connection to the network
        namespace: run and recipe, so that another recipe's peers cannot even knock
        schema_hash: shapes of the averaged vector
        target: a group with fewer samples does not end the step: whoever is late can still come to the next one; it may
            change from round to round
        detector: tells who is still there
        shunned: those who are not met for now, because they have spoilt a round
        admission: tells who may take part
    """

    def __init__(
        self,
        p2p: P2P,
        namespace: str,
        schema_hash: bytes,
        target: BatchTarget,
        detector: FailureDetector,
        shunned: Backoff,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        admission: Admission = OPEN,
    ):
        self._timeouts, self._admission = timeouts, admission
        self._p2p, self._namespace, self._schema_hash = p2p, namespace, schema_hash
        self._shunned, self._said_shunned_at = shunned, -math.inf
        self.stuck: set[PeerID] = set()
        """Who has let this peer in at the last meeting and never began."""
        self.left_out: frozenset[PeerID] = frozenset()
        """Who does not lead this peer, whoever else follows it."""
        self._known = Acquaintances()
        """Those who have averaged with this peer."""
        self._stranger_patience = TokenBucket(STRANGER_SECONDS, STRANGER_SHARE)
        self._forming_patience = TokenBucket(FORMING_SECONDS, FORMING_SHARE)
        self._pursuers: set[PeerID] = set()
        """Peers with our weights that came after the group closed. They need its average before they join the next."""
        self.target, self.detector = target, detector
        self._complaints = Once()
        self._lobby: dict[PeerID, Guest] = {}
        self._arrivals = asyncio.Event()
        self._expected: frozenset[PeerID] = frozenset()
        self._step, self._lineage = 0, None
        self._closed_step, self._closed_with = -1, frozenset[PeerID]()
        self._longest_meeting_seconds = math.inf
        """A leader that has not begun after so long does not come."""
        self._leader: PeerID | None = None
        self._is_client: dict[PeerID, bool] = {}
        self._monitor = PeerMonitor(detector, self._arrivals.set)
        self.grace = JoinerGrace(timeouts)
        self._lock = asyncio.Lock()

    def set_step(self, step: int, lineage: bytes | None = None) -> None:
        """The step that this peer works on: early guests wait for it, late ones are told that they are behind.

        Args:
            lineage: of this peer's weights; None leaves out who has others only when the group is closed
        """
        if step > self._step:
            for peer in self._pursuers:
                self.grace.hold(peer, self._hold_seconds)
            self._pursuers.clear()
        self._step, self._lineage = step, lineage
        for peer, guest in self._lobby.items():
            if not guest.is_waiting:
                continue
            if guest.ticket.step < step:
                guest.reply(step_reply(step))
                if peer not in self._monitor.lost:
                    self.grace.hold(peer)
            elif self._has_other_weights(guest.ticket):
                guest.reply(refusal(averaging_pb2.BAD_GROUP_KEY))

    def _orders(self, step: int) -> bytes:
        """Names the organiser's orders that count for the update after so many, as far as this process knows."""
        return self._admission.lists.orders.digest(step)

    def orders_changed(self) -> None:
        """Guests who follow other orders than this peer hear which ones; a leader who waits for them notices."""
        for guest in self._lobby.values():
            if guest.ticket.orders != self._orders(guest.ticket.step):
                guest.reply(self._orders_reply())
        self._arrivals.set()

    def _orders_reply(self):
        return orders_reply(self._admission.lists.signed(ORDERS))

    def _take_orders(self, signed: bytes, peer: PeerID) -> bool:
        """Whether in these orders, which a member has passed on, there is one that this process did not know."""
        try:
            is_newer = bool(signed) and self._admission.lists.take(ORDERS, signed)
        except NotSigned as error:
            if self._complaints.first("orders"):
                logger.warning(f"The orders that {peer} passes on are not followed: the list {error} (said once)")
            return False
        if is_newer:
            self.orders_changed()
        return is_newer

    def _check_orders(self, ticket: Ticket) -> None:
        """Raises OtherOrders: the trainer has to follow other ones before it can come to a round"""
        if ticket.orders != self._orders(ticket.step):
            raise OtherOrders(self._admission.lists.signed(ORDERS))

    @property
    def _hold_seconds(self) -> float:
        """For which a group is held open at most."""
        return max(self._timeouts.hold_seconds, HOLD_SHARE * self.detector.usual_seconds)

    def _has_other_weights(self, ticket: Ticket) -> bool:
        """Whether its sender is at this peer's step in another history."""
        if self._lineage is None or ticket.listens:
            return False
        return ticket.step == self._step and ticket.lineage != self._lineage

    def met(self, peers: Iterable[PeerID]) -> None:
        """These have averaged with this peer: they are no strangers."""
        self._known.add(peer for peer in peers if peer != self._p2p.peer_id)

    @property
    def step(self) -> int:
        return self._step

    def reopen(self) -> None:
        """The round of the group that was closed last has failed: whoever was in it can come again."""
        self._closed_step = -1

    def waits_for(self, step: int) -> bool:
        """Whether somebody has come to finish this step already; strangers do not count where this peer has others."""

        def counts(peer: PeerID, guest: Guest) -> bool:
            is_at = guest.ticket.step == step and not guest.ticket.listens and guest.is_waiting
            return is_at and (peer in self._known or not len(self._known))

        return any(counts(peer, guest) for peer, guest in self._lobby.items())

    def turn_away_removed(self) -> None:
        """Who was removed from the run does not wait for the next group any more."""
        for peer in self._admission.removed(self._lobby):
            self._lobby[peer].reply(refusal(averaging_pb2.PROTOCOL_VIOLATION))

    def expect(self, members: Collection[PeerID]) -> None:
        """Change whom the leader waits for, as peers come and go."""
        self._expected = frozenset(peer for peer in members if peer not in self._shunned) - {self._p2p.peer_id}
        self._arrivals.set()

    async def meet(self, ticket: Ticket, members: Sequence[Member], patience_seconds: float, deadline: float) -> Group:
        """Find the group for `ticket.step`.

        Args:
            members: everyone expected, this peer included
            patience_seconds: how long a leader waits for those who are missing
            deadline: event-loop time at which to give up

        Raises:
            Behind: the swarm has finished this step already
            OtherOrders: the organiser has ordered something that the ticket does not know
            Refused: the leader averages something else
            RoundFailed: no group until the deadline
        """
        async with self._lock:
            self._monitor.begin()
            self.stuck = set()
            if not ticket.listens:  # else this peer works on an earlier one
                self.set_step(ticket.step, ticket.lineage)
            self.expect([member.peer_id for member in members if member.awaited])
            order = [m for m in sorted(members, key=lambda m: m.seniority) if not m.client_mode]
            order = [m for m in order if m.peer_id not in self._shunned]
            self._is_client = {member.peer_id: member.client_mode for member in members}
            while asyncio.get_running_loop().time() < deadline:
                self._check_orders(ticket)
                try:
                    group = await self._lead_or_follow(ticket, [m.peer_id for m in order], patience_seconds, deadline)
                finally:
                    self._monitor.end()
                if group is not None:
                    return group
                # Only outbound-only peers and listeners come here: nobody to follow, unable to lead.
                await asyncio.sleep(
                    self._timeouts.knock_again_seconds if ticket.listens else self._timeouts.redirect_seconds
                )
                self._monitor.begin()
            raise RoundFailed("no group was formed in time")

    async def _lead_or_follow(
        self, ticket: Ticket, order: Sequence[PeerID], patience_seconds: float, deadline: float
    ) -> Group | None:
        """Follow the first who leads, in this order; if that is nobody, lead."""
        own, loop = self._p2p.peer_id, asyncio.get_running_loop()
        seniors = order[: order.index(own)] if own in order else order
        self._longest_meeting_seconds = 2 * patience_seconds + self._hold_seconds + self._timeouts.reply_seconds
        for senior in seniors:
            self._watch(seniors[:WATCHED_SENIORS])
            if senior not in self._monitor.lost:
                wait_until = min(deadline, loop.time() + self._longest_meeting_seconds)
                if ticket.listens:  # for a round that begins when the one before has ended
                    wait_until = deadline
                if (group := await self.follow(senior, ticket, wait_until)) is not None:
                    return group
        if own not in order:
            return None
        self._watch(self._is_client)
        wait_until = min(deadline, loop.time() + self._longest_meeting_seconds)
        return await self._lead(ticket, min(deadline, loop.time() + patience_seconds), seniors, wait_until)

    def _watch(self, peers: Collection[PeerID]) -> None:
        """Until this meeting is over, who of them is not there any more is not waited for."""
        for peer in peers:
            if peer != self._p2p.peer_id:
                self._monitor.watch(peer, can_be_called=not self._is_client.get(peer, True))

    async def _lead(self, ticket: Ticket, patience_end: float, seniors: Sequence[PeerID], wait_until: float) -> Group:
        """Wait for the others. A senior who is still expected may lead a group of its own: try its door again."""
        loop = asyncio.get_running_loop()
        knock_at = loop.time() + _half_more_or_less(self._timeouts.knock_again_seconds)
        while True:
            self._arrivals.clear()
            self._check_orders(ticket)
            arrived = self._arrived(ticket)
            expected = self._expected - self._monitor.lost - arrived
            held = {peer for peer in self.grace.awaited(arrived) - self._monitor.lost if peer not in self._shunned}
            awaited, remaining = expected | held, self.grace.seconds_left(held)
            if expected:
                remaining = max(remaining, patience_end - loop.time())
            self._watch(awaited)
            only_strangers = not any(peer in self._known for peer in awaited)
            if only_strangers:
                remaining = min(remaining, self._patience_with_strangers.left)
            if remaining <= 0 or not awaited or self._is_in_vain(ticket, arrived, awaited):
                return self._close(ticket, arrived)
            if loop.time() >= knock_at:
                for senior in awaited.intersection(seniors):
                    group = await self.follow(senior, ticket, wait_until)
                    if group is not None:
                        return group
                knock_at = loop.time() + _half_more_or_less(self._timeouts.knock_again_seconds)
                continue
            waiting_since = loop.time()
            try:
                await asyncio.wait_for(self._arrivals.wait(), min(remaining, self._timeouts.look_seconds))
            except TimeoutError:
                pass
            if only_strangers:
                self._patience_with_strangers.spend(loop.time() - waiting_since)

    @property
    def _patience_with_strangers(self) -> TokenBucket:
        """Seconds for which this peer waits for nobody but strangers; while a swarm forms, all are."""
        return self._stranger_patience if len(self._known) else self._forming_patience

    def _is_in_vain(self, ticket: Ticket, arrived: Collection[PeerID], awaited: Collection[PeerID]) -> bool:
        """Whether those who are missing say nothing, and those who are here have too few samples without them.

        It is better to compute on than to wait then; who has only been slow is in time for the next group.
        """
        samples = ticket.samples + sum(self._lobby[peer].ticket.samples for peer in arrived)
        return not self.target.is_reached_by(samples) and all(self.detector.doubts(peer) for peer in awaited)

    def _arrived(self, ticket: Ticket) -> set[PeerID]:
        """Guests with our weights; who comes with the same step of another history has to take over ours.

        All of them follow our orders: who does not is answered at once.
        """
        arrived = set()
        for peer, guest in self._lobby.items():
            if not guest.is_waiting or guest.ticket.step != ticket.step or peer in self._monitor.lost:
                continue  # on the way out, early, or not there any more
            if guest.ticket.lineage == ticket.lineage or guest.ticket.listens:
                arrived.add(peer)
            else:
                guest.reply(refusal(averaging_pb2.BAD_GROUP_KEY))
        return arrived

    def _close(self, ticket: Ticket, arrived: Collection[PeerID]) -> Group:
        arrived = [peer for peer in arrived if self._is_still_member(peer)]
        entries = [(peer, self._lobby[peer].ticket, self._lobby[peer].shown) for peer in arrived]
        entries.append((self._p2p.peer_id, ticket, self._admission.show(ticket.to_bytes())))
        # Always in the same order, so that a reducer mostly keeps its place in the vector: there it adds what its
        # earlier means have left out.
        entries.sort(key=lambda entry: entry[0].to_bytes())
        peer_ids, tickets, shown = zip(*entries, strict=True)
        group = Group.close(nonce := os.urandom(LINEAGE_BYTES), peer_ids, tickets)
        if self.target.is_reached_by(group.samples):
            self._closed_step, self._closed_with = ticket.step, frozenset(arrived)
        reply = group_reply(group, nonce, shown)
        for peer in arrived:
            self._lobby[peer].reply(reply)
        return group

    def _is_still_member(self, peer: PeerID) -> bool:
        """A certificate may have ended in the lobby; all others would refuse a group with this guest.

        Or it has been found out there: it is left out from this group on.
        """
        guest = self._lobby[peer]
        try:
            if peer in self._shunned:
                raise ValueError("it has spoilt a round")
            read_ticket(guest.shown, peer, self._admission)
        except ValueError:
            guest.reply(refusal(averaging_pb2.PROTOCOL_VIOLATION))
            return False
        return True

    async def follow(
        self, leader: PeerID, ticket: Ticket, wait_until: float, redirects: int = 2, orders: bytes = b""
    ) -> Group | None:
        """Knock at the leader's door; None when it cannot lead us now.

        Args:
            orders: the organiser's, for a leader who did not know them
        """
        if (reply := await self._knock(leader, ticket, wait_until, orders)) is None:
            return None
        if (theirs := parse_orders(reply)) is not None:
            self._take_orders(theirs, leader)
            self._check_orders(ticket)
            if orders or not (own := self._admission.lists.signed(ORDERS)):
                return None  # it was told, and insists
            return await self.follow(leader, ticket, wait_until, redirects, own)
        if reply.code == averaging_pb2.NOT_A_LEADER and reply.suggested_leader and redirects:
            try:
                suggested = PeerID(reply.suggested_leader)
            except ValueError as error:
                logger.debug(f"{leader} sends us to nobody: {error}")
                return None
            return await self._follow_elsewhere(suggested, leader, ticket, wait_until, redirects - 1)
        return self._read_reply(reply, leader, ticket)

    async def _knock(
        self, leader: PeerID, ticket: Ticket, wait_until: float, orders: bytes
    ) -> averaging_pb2.MessageFromLeader | None:
        """What the leader answers in the end, after a wait in its lobby if it lets us in; None if nothing comes."""
        request, loop = self._request(ticket, orders), asyncio.get_running_loop()
        stream, accepted, came_at, lost = None, False, loop.time(), self._monitor.watch(leader, can_be_called=True)
        try:
            stream = await unless(lost, self._open_door(leader, request), self._timeouts.reply_seconds)
            reply = await unless(lost, anext(stream), self._timeouts.reply_seconds)
            if accepted := reply.code == averaging_pb2.ACCEPTED:
                self._leader = leader
                self._send_guests_to(leader)
                remaining = max(0.0, wait_until - loop.time())
                reply = await unless(lost, anext(stream), remaining)
            return reply
        except UNREACHABLE as error:
            logger.debug(f"{leader} does not lead us: {error!r}")
            timed_out_inside = accepted and isinstance(error, TimeoutError) and not ticket.listens
            self._note_failed_leader(leader, lost.done(), timed_out_inside, loop.time() - came_at)
            return None
        finally:
            self._leader = None
            if stream is not None:
                await stream.aclose()

    def _request(self, ticket: Ticket, orders: bytes) -> averaging_pb2.JoinRequest:
        brings = to_knock(self._admission.show(ticket.to_bytes()), orders)
        return averaging_pb2.JoinRequest(schema_hash=self._schema_hash, gather=brings, client_mode=ticket.client_mode)

    def _open_door(self, peer: PeerID, request: averaging_pb2.JoinRequest) -> Awaitable[AsyncIterator]:
        """The stream of what this peer answers to a knock."""
        return PeerService.get_stub(self._p2p, peer, namespace=self._namespace).rpc_join_group(request)

    def _note_failed_leader(self, leader: PeerID, is_lost: bool, timed_out_inside: bool, waited_seconds: float) -> None:
        """Whoever leads in its place does not wait for it again, if it is to blame.

        Args:
            is_lost: it is not there any more
            timed_out_inside: it let us in, and did not begin in time: its process answers, its trainer does not come
        """
        if timed_out_inside and waited_seconds >= STUCK_SHARE * self._longest_meeting_seconds:
            self.stuck.add(leader)
        if is_lost or timed_out_inside:
            self._monitor.lost.add(leader)

    async def compare_orders(self, peer: PeerID, ticket: Ticket, orders: bytes = b"") -> None:
        """See whether somebody follows the same orders of the organiser; else both know all of them from now on.

        Args:
            ticket: of a listener, for the step in question
            orders: what it is told
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
        if (theirs := parse_orders(reply)) is None or self._take_orders(theirs, peer) or orders:
            return
        if own := self._admission.lists.signed(ORDERS):
            await self.compare_orders(peer, ticket, own)

    async def _follow_elsewhere(
        self, suggested: PeerID, leader: PeerID, ticket: Ticket, wait_until: float, redirects: int
    ) -> Group | None:
        """Go where a peer has sent us; if nobody leads there, that peer will find out as well and lead itself."""
        if suggested == self._p2p.peer_id:
            return None
        if suggested not in self._monitor.lost and suggested not in self.left_out:
            group = await self.follow(suggested, ticket, wait_until, redirects)
            if group is not None:
                return group
        await asyncio.sleep(_half_more_or_less(self._timeouts.redirect_seconds))
        return await self.follow(leader, ticket, wait_until, redirects)

    def _read_reply(self, reply, leader: PeerID, ticket: Ticket) -> Group | None:
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
            return parse_group(reply, leader, self._p2p.peer_id, ticket, self._admission)
        except ValueError as error:
            logger.warning(f"Ignoring a malformed group from {leader}: {error}")
            return None

    def _say_that_we_are_shunned(self, leader: PeerID) -> None:
        if time.monotonic() > self._said_shunned_at + SAY_AGAIN_SECONDS:
            self._said_shunned_at = time.monotonic()
            logger.warning(
                f"{leader} leaves this peer out for a while: what it sent could not be used, or its line is far too "
                "slow for this swarm (`swarm doctor` says what it sends), or its certificate does not count there"
            )

    def _send_guests_to(self, leader: PeerID) -> None:
        for guest in self._lobby.values():
            guest.reply(redirect(leader))

    def _answer_at_once(self, request, sender: PeerID, ticket: Ticket):
        """What can be answered without waiting, or None for a guest who may wait in the lobby."""
        if request.schema_hash != self._schema_hash:
            return refusal(averaging_pb2.BAD_SCHEMA_HASH)
        if ticket.step < self._step:
            return step_reply(self._step)
        if ticket.step == self._closed_step and sender not in self._closed_with:
            return step_reply(self._step + 1)  # the group is closed: the result can only be downloaded
        if ticket.step > self._step + 1:
            return step_reply(self._step)  # we are the ones who are behind
        if self._has_other_weights(ticket):
            return refusal(averaging_pb2.BAD_GROUP_KEY)
        if ticket.orders != self._orders(ticket.step):
            return self._orders_reply()
        if self._leader is not None and self._leader != sender:
            return redirect(self._leader)
        if len(self._lobby) >= MAX_GROUP_SIZE - 1:
            return refusal(averaging_pb2.GROUP_IS_FULL)
        return None

    def _hold_for(self, sender: PeerID, ticket: Ticket) -> None:
        """It has come too late, and will come again when it has the average that it has missed."""
        if (ticket.step, ticket.lineage) != (self._step, self._lineage):
            self.grace.hold(sender)  # that average is there already
        elif len(self._pursuers) < MAX_PURSUERS:
            self._pursuers.add(sender)

    async def serve(self, request: averaging_pb2.JoinRequest, context: P2PContext) -> AsyncIterator:
        """Somebody knocks at this peer's door: the server side of `follow`."""
        sender = context.remote_id
        try:
            if sender in self._shunned:
                raise ValueError("it has spoilt a round")
            shown, orders = parse_knock(request.gather)
            ticket = read_ticket(shown, sender, self._admission)
        except ValueError as error:
            logger.debug(f"{sender} came in vain: {error}")
            yield refusal(averaging_pb2.PROTOCOL_VIOLATION)
            return
        self._take_orders(orders, sender)
        answer = self._answer_at_once(request, sender, ticket)
        if answer is not None:
            if answer.code == averaging_pb2.CANCELLED and ticket.step <= self._step and not ticket.listens:
                self._hold_for(sender, ticket)
            yield answer
            return
        before, guest = self._lobby.get(sender), Guest(ticket, shown)
        if before is not None:  # its second knock ends the first
            before.reply(refusal(averaging_pb2.CANCELLED))
        self._lobby[sender] = guest
        self._monitor.came(sender)
        self._arrivals.set()
        try:
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
            yield await guest.answer
        finally:
            if self._lobby.get(sender) is guest:
                del self._lobby[sender]
            self._arrivals.set()


def _half_more_or_less(seconds: float) -> float:
    """By chance: two who knock at each other's doors at the same moment should not do so again."""
    return seconds * random.uniform(0.5, 1.5)
