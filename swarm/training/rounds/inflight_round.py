"""A round while it runs in the background: the members that are awaited, its result, and what this peer gave to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from hivemind.p2p import PeerID

from swarm.averaging.averager import SwarmAverager
from swarm.averaging.commands import RunRound
from swarm.protocol.messages import Member, RoundEnded, RoundFailed
from swarm.protocol.round_report import RoundEvent, RoundReport
from swarm.runtime.async_utils import POLL_SECONDS, wait_a_little
from swarm.training.options import CoordinatorOptions
from swarm.training.throughput import Work


def awaited_ids(members: Sequence[Member]) -> set[PeerID]:
    """The ids of those members that a round waits for."""
    return {member.peer_id for member in members if member.awaited}


class InflightRound:
    """A round that is under way, and what this peer gave to it.

    Args:
        averager: runs the round
        order: the members, and what this peer brings; the time limits are filled in here
        options: this peer's own settings, for the time limits
        work: the work that this peer gives
    """

    def __init__(self, averager: SwarmAverager, order: RunRound, options: CoordinatorOptions, work: Work):
        self.ticket, self.work, self.blocked_seconds = order.ticket, work, 0.0
        self.expected = awaited_ids(order.members)
        self._averager = averager
        timeout_seconds = averager.longest_round_seconds(options.averaging_timeout_seconds, order.members)
        if order.ticket.listens:  # the round before may have to end first
            timeout_seconds *= 2
        self._patience_seconds = timeout_seconds + averager.timeouts.hangs_seconds
        self.future = averager.run_round(
            replace(
                order,
                patience_seconds=options.matchmaking_seconds,
                timeout_seconds=timeout_seconds,
                compute_seconds=work.seconds,
            )
        )

    def expect(self, members: Sequence[Member]) -> None:
        """Tell the averaging process which members to wait for, as peers come and go."""
        expected = awaited_ids(members)
        if expected != self.expected:
            self.expected = expected
            self._averager.expect(expected)

    def wait(self, members: Callable[[], Sequence[Member]], should_stop: Callable[[], bool]) -> RoundReport:
        """Wait for the result of the round. Nothing is computed meanwhile.

        Raises:
            RoundEnded: the round gave no average
        """
        blocked_since, waited_seconds = time.perf_counter(), 0.0
        while not self.future.done():
            wait_a_little(self.future)
            waited_seconds += POLL_SECONDS  # not by the clock, which also runs while this process itself is suspended
            if waited_seconds > self._patience_seconds:
                self._averager.kill()  # it hangs: the watch over this peer's processes sees its death and restarts
            self._averager.check_alive()
            if should_stop():
                self.settle()
                break
            self.expect(members())
        self.blocked_seconds = time.perf_counter() - blocked_since
        if not self.future.done():
            raise RoundFailed("this peer is leaving")
        return self.future.result()

    def failed(self, error: RoundEnded) -> RoundEvent:
        """The event that reports the end of this round with an error."""
        return RoundEvent.of_failure(self.ticket, error, self.work.seconds, self.blocked_seconds)

    def settle(self) -> None:
        """Wait a little for the round to end, for the other members' sake, and cancel it: this peer leaves."""
        deadline = time.monotonic() + self._averager.timeouts.leave_seconds
        while not self.future.done() and self._averager.is_alive() and time.monotonic() < deadline:
            wait_a_little(self.future)
        self._averager.cancel_round()
