"""When a peer catches up with the swarm, and what it does meanwhile.

A peer that only reads in records that others are further trains on as before, since this may not be true. A peer that
was told so in a round has nothing to give to the next one. It takes part in no round until it has the swarm's state or
has tried in vain.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from hivemind.p2p import PeerID

from swarm.membership.progress_record import JOINING
from swarm.runtime.async_utils import POLL_SECONDS
from swarm.training.joining.attempt import Progress
from swarm.training.joining.corroboration import Corroboration
from swarm.training.joining.follower import Follower
from swarm.training.own_peer import OwnPeer

SHORT_SECONDS = 1.0
"""Seconds for which a peer that is behind waits for the state, or for missed averages, before it computes on."""
LONG_SECONDS = 2.0
"""Seconds after which a peer that is behind tells other peers not to wait for it."""


class CatchUp:
    """The course of catching up: when it begins, how long the peer waits for it, and what it reports.

    Args:
        own: this peer
        follower: makes the attempts
        may_wait: called often while this peer waits; false when the peer is to leave, also by its owner's limits
    """

    def __init__(self, own: OwnPeer, follower: Follower, may_wait: Callable[[], bool]):
        self._follower, self._version, self._tracker = follower, own.version, own.tracker
        self._options, self._overlaps, self._may_wait = own.options, own.averaging.overlaps, may_wait
        self._behind_since: float | None = None
        self._polled_at = -math.inf

    @property
    def is_running(self) -> bool:
        """Whether an attempt is under way."""
        return self._follower.is_running

    @property
    def is_behind(self) -> bool:
        """Whether this peer has been told that the swarm has gone on without it."""
        return self._behind_since is not None

    def join(self) -> None:
        """Take over the swarm's state before anything is computed.

        Raises:
            InputError: no peer hands it over
        """
        self._follower.begin(None, self._options.join_timeout_seconds, joins=True)
        self._poll(math.inf)

    def begin(
        self, donor: PeerID | None = None, is_told: bool = False, corroboration: Corroboration | None = None
    ) -> Progress:
        """Begin to take over the swarm's state, or the donor's.

        Args:
            donor: the peer whose state is wanted; None for any whose state counts more than this peer's
            is_told: a leader said that the swarm has gone on: until this peer has the state, it takes part in no round
            corroboration: which witnesses must confirm the leader's claim that the swarm has gone on; None: believe the
                leader
        """
        if is_told or donor is not None:
            self._follower.cancel()  # an attempt that a mere claim to be ahead began may last long
            if self._behind_since is None:
                self._behind_since = time.monotonic()
                self.report()
        self._follower.begin(donor, self._options.join_timeout_seconds, is_told=is_told, corroboration=corroboration)
        return self._poll(SHORT_SECONDS if self.is_behind else 0.0)

    def go_on(self) -> Progress:
        """Go on with the attempt as far as that is possible now.

        A peer that is behind most likely computes in vain, and a leader may hold a group open for it. So it waits here
        for as long as it has computed since the last call. A liar that tells it that it is behind slows it down by half
        at most.
        """
        computed_seconds = min(time.monotonic() - self._polled_at, LONG_SECONDS)
        wait_seconds = max(POLL_SECONDS, computed_seconds) if self.is_behind else 0.0
        return self._poll(wait_seconds) if self.is_running else Progress.NOTHING

    def report(self) -> None:
        """Report that this peer is behind.

        The donors may be in the middle of a round, which should not wait for this peer. In a swarm without overlap, it
        reports only a delay that is longer than `LONG_SECONDS`.
        """
        is_long = time.monotonic() - self._behind_since > LONG_SECONDS
        if self._overlaps or is_long:
            self._tracker.report(urgent=self._tracker.own.phase != JOINING, samples=0, phase=JOINING)
        else:
            self._tracker.report(samples=0)

    def cancel(self) -> None:
        """End the attempt: this peer leaves."""
        self._follower.cancel()

    def _poll(self, wait_seconds: float) -> Progress:
        """Go on for at most this many seconds; return what has come of it since this call began."""
        changes_before = self._version.changes
        deadline = time.monotonic() + wait_seconds
        while (progress := self._follower.poll()) is Progress.NOTHING:
            if time.monotonic() >= deadline or not self._may_wait():
                break
            self._follower.wait_a_little()
        self._polled_at = time.monotonic()
        if not self._follower.is_running:
            self._behind_since = None
        if self._version.changes != changes_before:
            return Progress.OTHER_WEIGHTS  # at once: local steps that this peer makes from now on are on these weights
        # A change before this call was reported then. At the end of the attempt it is no news.
        return Progress.NOTHING if progress is Progress.NOTHING else Progress.IN_VAIN
