"""One round's exchange: large vectors go in stripes, side by side, each an all-reduce with streams of its own.

libp2p lets only 256 KiB of a new stream through before the receiver has to ask for more. So in one stream, a share of
some megabytes would wait for several round trips, however fast the line is. All members divide alike, by what all know.

A member that is not there any more (`failure_detector`), or is much later than usual, is given up in all stripes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from swarm.averaging.allreduce import AllReduce
from swarm.averaging.compression.error_feedback import ErrorFeedback
from swarm.averaging.compression.float16 import compact
from swarm.averaging.compression.powersgd import LowRank
from swarm.averaging.lines.division import shares_of
from swarm.averaging.shares import stripe_of, stripes_of
from swarm.averaging.unsettled import Memory
from swarm.membership.failure_detector import FailureDetector
from swarm.protocol.messages import Blame, Group, RoundFailed
from swarm.runtime.async_utils import in_thread

logger = get_logger(__name__)

PAUSES_BETWEEN_LOOKS = 5
"""Sleeps into which the time between two looks at what is missing is divided. If this process stands still in one of
them, parts can still arrive in the others."""
LATE_AVERAGES_SHARE = 0.5
"""Share of the time after which an exchange is late; so much later, averages that are missing are late as well."""

AwaitedPart = Callable[[AllReduce, PeerID], int | None]
Register = Callable[[Group], contextlib.AbstractContextManager]
MakeRunner = Callable[[Group, torch.Tensor, int, ErrorFeedback, int], AllReduce]


class MissingPart(NamedTuple):
    """A part that this peer waits for now.

    Args:
        peer: the member that has to send it
        stripe: number of the stripe in which it is missing
        part_index: number of the part in that stripe
    """

    peer: PeerID
    stripe: int
    part_index: int


class StripedAllReduce(contextlib.AsyncExitStack):
    """Runs one peer's exchange with one closed group; once it is entered, senders can wait for its stripes.

    Args:
        group: the closed group
        stripes: number of stripes, for each of the averages to come
        others: the other members, which are watched meanwhile
        detector: tells which members are still there, and when an exchange is late
        register: makes a stripe known to members that send to this peer, as long as a context lasts
        make_runner: makes the all-reduce of a stripe, which senders to this stripe can reach from then on. It takes the
            stripe's group, its part of the vector, how many numbers at its end are buffers, what earlier rounds left
            out of it, and how many stripes there are
    """

    def __init__(
        self,
        group: Group,
        stripes: Collection[int],
        others: Collection[PeerID],
        detector: FailureDetector,
        register: Register,
        make_runner: MakeRunner,
    ):
        super().__init__()
        self._stripes = [
            [stripe_of(group, turn, stripe) for stripe in range(count)] for turn, count in enumerate(stripes)
        ]
        self.group, self._others, self._detector = group, others, detector
        self._register, self._make_runner = register, make_runner
        self.runners: list[AllReduce] = []
        self.lost: set[PeerID] = set()
        self.waited_seconds: dict[PeerID, float] = {}
        """Seconds for which this peer waited for each member, at times when it did not wait for all other members."""
        self._awaited_before = deque([set()], maxlen=3)
        """What was missing at each of the last looks, the oldest first."""
        self.kept_waiting = frozenset[PeerID]()
        """Members that have kept this peer waiting, if the exchange took too long."""

    async def __aenter__(self) -> StripedAllReduce:
        for stripe in (stripe for stripes in self._stripes for stripe in stripes):
            self.enter_context(self._register(stripe))
        for watch in (*map(self._watch, self._others), self._watch_the_time(), self._look_now_and_then()):
            self.callback(asyncio.ensure_future(watch).cancel)
        return self

    async def _watch(self, peer_id: PeerID) -> None:
        ticket = self.group.ticket_of(peer_id)
        await self._detector.lost(peer_id, can_be_called=not ticket.client_mode)
        self._give_up(peer_id)

    async def _watch_the_time(self) -> None:
        """Give up late members: a line that has broken down lets through too little for the others, but is not silent.

        Members that are late with their own parts are given up first: because of them, reducers that are in time are
        late with averages. These reducers find out at the same time, and then need no longer than a usual exchange.
        """
        while True:
            await self._detector.until_late()
            await self._give_up_who_is_late(AllReduce.awaited_input, set(self._others))
            await self._detector.until_late(LATE_AVERAGES_SHARE)
            if not self._awaited(AllReduce.awaited_input):  # else the other reducers wait for it, too
                await self._give_up_who_is_late(AllReduce.awaited_average, self._reducers)

    def _awaited(self, part: AwaitedPart) -> set[MissingPart]:
        """The parts that are missing now, from members that are still there."""
        found = set()
        for stripe, runner in enumerate(self.runners):
            if runner.is_over:
                continue
            for peer in self._others:
                part_index = part(runner, peer)
                if part_index is not None and peer not in self.lost:
                    found.add(MissingPart(peer, stripe, part_index))
        return found

    def _keeping_us(self) -> frozenset[PeerID]:
        """Members that have not sent what would have ended this exchange.

        If these are all of several other members, it is none: the cause may be this peer's own line. A single other
        member is named all the same, since it is better to go on alone than never.
        """
        awaited, others = self._awaited(AllReduce.awaited_input), set(self._others) - self.lost
        late = frozenset(missing.peer for missing in awaited & self._awaited_before[0])
        return late if late < others or len(others) == 1 else frozenset()

    async def _look_now_and_then(self) -> None:
        look_seconds = self._detector.timeouts.look_seconds
        while True:
            await asyncio.sleep(look_seconds)
            self._awaited_before.append(self._awaited(AllReduce.awaited_input))
            for peer_id in self._holding_us_up():
                self.waited_seconds[peer_id] = self.waited_seconds.get(peer_id, 0.0) + look_seconds

    def _holding_us_up(self) -> set[PeerID]:
        """Members that the exchange waits for now; none, if these are all others: it may be this peer's own line.

        A part that is missing at this peer is missing at other reducers as well, and makes their averages late. So
        averages are looked at only when no part is missing.
        """
        others = set(self._others) - self.lost
        for part in (AllReduce.awaited_input, AllReduce.awaited_average):
            if awaited := {missing.peer for missing in self._awaited(part)}:
                return awaited if awaited < others else set()
        return set()

    @property
    def blamed(self) -> dict[PeerID, Blame]:
        """Members that have sent what no honest peer sends, and what that was."""
        return {peer: what for runner in self.runners for peer, what in runner.blamed.items()}

    @property
    def outside(self) -> frozenset[PeerID]:
        """Members that were far from the others in at least half of what this peer has combined."""
        combined = sum(runner.parts_combined for runner in self.runners)
        parts = sum((Counter(runner.outside) for runner in self.runners), Counter())
        return frozenset(peer for peer, number in parts.items() if 2 * number >= combined)

    async def _give_up_who_is_late(self, part: AwaitedPart, owing: set[PeerID]) -> None:
        awaited = self._awaited(part)
        for _ in range(PAUSES_BETWEEN_LOOKS):
            await asyncio.sleep(self._detector.timeouts.look_seconds / PAUSES_BETWEEN_LOOKS)
        # A member that only had to wait has moved on to another part by now, and drops out of the intersection.
        late = {missing.peer for missing in awaited & self._awaited(part)}
        if late < owing - self.lost:  # else it is probably this peer's own line
            for peer_id in filter(self._detector.was_in_time, late):
                logger.debug(f"{peer_id} is late")
                self._give_up(peer_id)

    def memories(self, low_rank: LowRank | None) -> list[Memory]:
        """What knows what this round, which has failed here, left out for members that have finished it.

        With PowerSGD that depends on both passes: as long as this peer's parts of the second pass have not all left,
        nothing of its gradient has arrived.
        """
        if low_rank is None:
            return [runner for runner in self.runners if runner.has_served]
        have_begun = not self._stripes  # all passes
        return [low_rank] if have_begun and all(runner.has_given for runner in self.runners) else []

    @property
    def _reducers(self) -> set[PeerID]:
        """The other members that have a share."""
        return {peer for peer, share in shares_of(self.group).items() if share}.intersection(self._others)

    def _give_up(self, peer_id: PeerID) -> None:
        self._detector.gave_up(peer_id)
        self.lost.add(peer_id)
        self._lose(peer_id, self.runners)

    def _lose(self, peer_id: PeerID, runners: Sequence[AllReduce]) -> None:
        for runner in runners:
            runner.lose(peer_id)

    async def average(self, vector: torch.Tensor, feedback: ErrorFeedback, num_buffers: int = 0) -> None:
        """Make the next average: `vector`, shape [n], fp32, becomes the mean of all members' ones, unless this fails.

        Args:
            num_buffers: numbers at the vector's end that are buffers of the model

        Raises:
            RoundFailed: a part of the mean is missing, or it is not finite
        """
        stripes = self._stripes.pop(0)
        divided = stripes_of(len(vector), num_buffers, len(stripes))
        parts = [slice(stretch.begin, stretch.end) for stretch in divided]
        runners = [
            self._make_runner(stripe, vector[part], stretch.num_buffers, feedback.part(part), len(stripes))
            for stripe, part, stretch in zip(stripes, parts, divided, strict=True)
        ]
        self.runners += runners
        for peer_id in tuple(self.lost):
            self._lose(peer_id, runners)
        runs = [asyncio.ensure_future(self._run(runner)) for runner in runners]
        try:
            # All go on to their end even if one fails: other members may need only this peer's share of the rest.
            await asyncio.wait(runs)
        except asyncio.CancelledError:
            self.kept_waiting = self._keeping_us()
            raise
        finally:
            for run in runs:
                run.cancel()
            averages = await asyncio.gather(*runs, return_exceptions=True)
        for failure in averages:
            if isinstance(failure, BaseException):
                raise failure
        for runner, part, average in zip(runners, parts, averages, strict=True):
            runner.keep_left_out()
            vector[part] = average

    async def _run(self, runner: AllReduce) -> torch.Tensor:
        try:
            await in_thread(runner.add_left_out)
            average = await runner.run()
            if not await in_thread(lambda: bool(torch.isfinite(average).all())):
                raise RoundFailed("the average is not finite", frozenset(self.lost))
            return await in_thread(compact, average)
        finally:
            runner.close()
