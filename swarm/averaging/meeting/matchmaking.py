"""How peers meet at the end of a step: all go to the most senior peer, which closes the group when all have come.

Hivemind's matchmaking announces every round in the DHT and waits a fixed time for peers that may come. But the members
of a swarm know each other from their progress records, so they meet without the DHT. The senior server-mode peer leads,
and the others send it join requests; early ones wait in its lobby. The group closes half a round trip after the last
expected member has arrived, or when the leader's patience ends. A peer that is not there any more (`failure_detector`)
is not waited for. If that is the leader, the next in seniority leads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence

from hivemind.p2p import P2P, PeerID

from swarm.averaging.meeting.knock import Knocker, half_more_or_less
from swarm.averaging.meeting.lobby import Lobby
from swarm.averaging.meeting.order_exchange import OrderExchange
from swarm.membership.backoff import Backoff
from swarm.membership.failure_detector import FailureDetector, PeerMonitor
from swarm.network.acquaintances import Acquaintances
from swarm.protocol.admission import OPEN, Admission
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.messages import Group, Member, RoundFailed, Ticket
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts
from swarm.runtime.token_bucket import TokenBucket

WATCHED_SENIORS = 3
"""Seniors that a follower watches; more would be many calls in a large swarm."""
STRANGER_SECONDS = 4.0
"""A token bucket: a leader may wait this long while only strangers are missing."""
STRANGER_SHARE = 0.04
"""What the leader regains of that every second, in seconds."""
FORMING_SECONDS = 30.0
"""The same bucket for a leader that knows no other peer."""
FORMING_SHARE = 0.5
"""What such a leader regains of that every second, in seconds."""


class Matchmaking:
    """Forms one group at a time for one peer; lives in its averaging process.

    Args:
        p2p: this peer's connection to the network
        namespace: run and recipe, so that another recipe's peers cannot even send a join request
        schema_hash: shapes of the averaged vector
        target: a group with fewer samples does not end the step: late peers can still come to the next one; it may
            change from round to round
        detector: tells which peers are still there
        shunned: peers that are not met for now, because they have spoilt a round
        admission: tells which peers may take part
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
        self._me, self._timeouts, self._shunned = p2p.peer_id, timeouts, shunned
        self.target, self.detector = target, detector
        self._known = Acquaintances()
        """Peers that have averaged with this one."""
        self._stranger_patience = TokenBucket(STRANGER_SECONDS, STRANGER_SHARE)
        self._forming_patience = TokenBucket(FORMING_SECONDS, FORMING_SHARE)
        self._expected: frozenset[PeerID] = frozenset()
        self._is_client: dict[PeerID, bool] = {}
        self._news = asyncio.Event()
        """Set when a leader that waits has to look again at which peers are there."""
        self._monitor = PeerMonitor(detector, self._news.set)
        self._orders = OrderExchange(admission, lambda: self.lobby.orders_changed())
        self.lobby = Lobby(
            me=self._me,
            namespace=namespace,
            schema_hash=schema_hash,
            orders=self._orders,
            monitor=self._monitor,
            news=self._news,
            detector=detector,
            shunned=shunned,
            timeouts=timeouts,
            admission=admission,
            known=self._known,
        )
        """Where peers wait that have come to this one as their leader."""
        self.knocker = Knocker(
            p2p=p2p,
            namespace=namespace,
            schema_hash=schema_hash,
            orders=self._orders,
            monitor=self._monitor,
            timeouts=timeouts,
            admission=admission,
            on_accepted=self.lobby.redirect_to,
            on_done=self.lobby.stop_redirecting,
        )
        """Sends this peer's join requests to leaders."""
        self._lock = asyncio.Lock()

    def waits_for(self, step: int) -> bool:
        """Whether a peer has already come with samples to finish this step.

        It is one that this peer knows, or a stranger if this peer knows none.
        """
        return self.lobby.waits_for(step)

    def met(self, peers: Iterable[PeerID]) -> None:
        """Note that these peers have averaged with this one: they are no strangers."""
        self._known.add(peer for peer in peers if peer != self._me)

    def expect(self, members: Collection[PeerID]) -> None:
        """Change the peers that a leader waits for, as peers come and go."""
        self._expected = frozenset(peer for peer in members if peer not in self._shunned) - {self._me}
        self._news.set()

    async def meet(self, ticket: Ticket, members: Sequence[Member], patience_seconds: float, deadline: float) -> Group:
        """Find the group for `ticket.step`.

        Args:
            members: all expected peers, this one included
            patience_seconds: how long a leader waits for missing peers
            deadline: event-loop time at which to give up

        Raises:
            Behind: the swarm has finished this step already
            OtherOrders: the organiser has ordered something that the ticket does not know
            Refused: the leader averages something else
            RoundFailed: no group until the deadline
        """
        async with self._lock:
            self._monitor.begin()
            self.knocker.stuck = set()
            if not ticket.listens:  # else this peer works on an earlier one
                self.lobby.set_step(ticket.step, ticket.lineage)
                self.lobby.reopen()  # a group that was closed for this step has not ended it for this peer
            self.expect([member.peer_id for member in members if member.awaited])
            order = [m for m in sorted(members, key=lambda m: m.seniority) if not m.client_mode]
            order = [m for m in order if m.peer_id not in self._shunned]
            self._is_client = {member.peer_id: member.client_mode for member in members}
            while asyncio.get_running_loop().time() < deadline:
                self._orders.check(ticket)
                try:
                    group = await self._lead_or_follow(ticket, [m.peer_id for m in order], patience_seconds, deadline)
                finally:
                    self._monitor.end()
                if group is not None:
                    return group
                # Only client-mode peers and listeners come here: they have no leader, and cannot lead.
                await asyncio.sleep(
                    self._timeouts.knock_again_seconds if ticket.listens else self._timeouts.redirect_seconds
                )
                self._monitor.begin()
            raise RoundFailed("no group was formed in time")

    async def _lead_or_follow(
        self, ticket: Ticket, order: Sequence[PeerID], patience_seconds: float, deadline: float
    ) -> Group | None:
        """Follow the first peer that leads, in this order; if there is none, lead."""
        own, loop = self._me, asyncio.get_running_loop()
        seniors = order[: order.index(own)] if own in order else order
        longest_seconds = 2 * patience_seconds + self.lobby.hold_seconds + self._timeouts.reply_seconds
        self.knocker.usual_meeting_seconds = patience_seconds + self.lobby.hold_seconds
        self.knocker.longest_meeting_seconds = longest_seconds
        for senior in seniors:
            self._watch(seniors[:WATCHED_SENIORS])
            if senior not in self._monitor.lost:
                wait_until = min(deadline, loop.time() + longest_seconds)
                if ticket.listens:  # for a round that begins when the one before has ended
                    wait_until = deadline
                if (group := await self.knocker.follow(senior, ticket, wait_until)) is not None:
                    return group
        if own not in order:
            return None
        self._watch(self._is_client)
        wait_until = min(deadline, loop.time() + longest_seconds)
        return await self._lead(ticket, min(deadline, loop.time() + patience_seconds), seniors, wait_until)

    def _watch(self, peers: Collection[PeerID]) -> None:
        """Watch these peers until this meeting is over: one that is not there any more is not waited for."""
        for peer in peers:
            if peer != self._me:
                self._monitor.watch(peer, can_be_called=not self._is_client.get(peer, True))

    async def _lead(self, ticket: Ticket, patience_end: float, seniors: Sequence[PeerID], wait_until: float) -> Group:
        """Wait for the others, and close the group. A missing senior may lead another group, so it is asked again."""
        loop, grace = asyncio.get_running_loop(), self.lobby.grace
        knock_at = loop.time() + half_more_or_less(self._timeouts.knock_again_seconds)
        while True:
            self._news.clear()
            self._orders.check(ticket)
            arrived = self.lobby.arrived(ticket)
            expected = self._expected - self._monitor.lost - arrived
            held = {peer for peer in grace.awaited(arrived) - self._monitor.lost if peer not in self._shunned}
            awaited, remaining = expected | held, grace.seconds_left(held)
            if expected:
                remaining = max(remaining, patience_end - loop.time())
            self._watch(awaited)
            only_strangers = not any(peer in self._known for peer in awaited)
            if only_strangers:
                remaining = min(remaining, self._patience_with_strangers.left)
            if remaining <= 0 or not awaited or self._is_in_vain(ticket, arrived, awaited):
                return self.lobby.close(ticket, arrived, self.target)
            if loop.time() >= knock_at:
                for senior in awaited.intersection(seniors):
                    group = await self.knocker.follow(senior, ticket, wait_until)
                    if group is not None:
                        return group
                knock_at = loop.time() + half_more_or_less(self._timeouts.knock_again_seconds)
                continue
            waiting_since = loop.time()
            try:
                await asyncio.wait_for(self._news.wait(), min(remaining, self._timeouts.look_seconds))
            except TimeoutError:
                pass
            if only_strangers:
                self._patience_with_strangers.spend(loop.time() - waiting_since)

    @property
    def _patience_with_strangers(self) -> TokenBucket:
        """Seconds for which this peer waits while only strangers are missing; while a swarm forms, all peers are."""
        return self._stranger_patience if len(self._known) else self._forming_patience

    def _is_in_vain(self, ticket: Ticket, arrived: Collection[PeerID], awaited: Collection[PeerID]) -> bool:
        """Whether all missing peers are silent, and those that are here have too few samples without them.

        Then it is better to compute on than to wait. A peer that has only been slow is in time for the next group.
        """
        samples = ticket.samples + self.lobby.samples_of(arrived)
        return not self.target.is_reached_by(samples) and all(self.detector.doubts(peer) for peer in awaited)
