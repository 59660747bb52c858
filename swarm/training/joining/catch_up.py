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
from swarm.training.joining.healers import Healers
from swarm.training.joining.listener import Listener
from swarm.training.joining.probation import Probation
from swarm.training.own_peer import OwnPeer
from swarm.training.rounds.own_round import OwnRound

SHORT_SECONDS = 1.0
"""Seconds for which a peer that is behind waits for the state, or for missed averages, before it computes on."""
LONG_SECONDS = 2.0
"""Seconds after which a peer that is behind tells other peers not to wait for it."""


class CatchUp:
    """The course of catching up: when it begins, how long the peer waits for it, what it reports, and what follows.

    Args:
        own: this peer
        own_round: the round of its present step, which other weights make useless
        listener: goes to the next round before this peer has the weights
        follower: makes the attempts
        healers: the peers that can replace refuted weights
        probation: knows whether other peers have refuted this peer's weights
        may_wait: called often while this peer waits; false when the peer is to leave, also by its owner's limits
    """

    def __init__(
        self,
        own: OwnPeer,
        own_round: OwnRound,
        listener: Listener,
        follower: Follower,
        healers: Healers,
        probation: Probation,
        may_wait: Callable[[], bool],
    ):
        self._version, self._tracker, self._control, self._options = own.version, own.tracker, own.control, own.options
        self._gradients, self._contribution, self._attendance = own.gradients, own.contribution, own.attendance
        self._averaging, self._round, self._listener = own.averaging, own_round, listener
        self._follower, self._healers, self._probation = follower, healers, probation
        self._may_wait = may_wait
        self._behind_since: float | None = None
        self._polled_at = -math.inf

    @property
    def is_running(self) -> bool:
        """Whether an attempt is under way."""
        return self._follower.is_running

    @property
    def is_behind(self) -> bool:
        """Whether this peer takes part in no round: the swarm has gone on without it, or a donor gives it a state."""
        return self._behind_since is not None

    def join(self) -> None:
        """Take over the swarm's state before anything is computed.

        Raises:
            InputError: no peer hands it over
        """
        self._control.join()
        self._follower.begin(None, self._options.join_timeout_seconds, joins=True)
        self._poll(math.inf)
        self._round.begin_step()

    def begin(
        self, donor: PeerID | None = None, is_told: bool = False, corroboration: Corroboration | None = None
    ) -> bool:
        """Begin to take over the swarm's state, or the donor's. Once it is here, earlier computing is dropped.

        Args:
            donor: the peer whose state is wanted; None for any whose state counts more than this peer's
            is_told: the swarm is known to have gone on: until this peer has the state, or has tried in vain, it takes
                part in no round; so with a donor
            corroboration: which witnesses must confirm the leader's claim that the swarm has gone on; None: believe the
                leader

        Returns:
            whether this peer holds other weights already
        """
        if is_told or donor is not None:
            self._follower.cancel()  # an attempt that a mere claim to be ahead began may last long
            if self._behind_since is None:
                self._behind_since = time.monotonic()
                self.report()
        self._follower.begin(donor, self._options.join_timeout_seconds, is_told=is_told, corroboration=corroboration)
        return self._apply(self._poll(SHORT_SECONDS if self.is_behind else 0.0))

    def keep_up(self) -> bool:
        """Begin to catch up if a peer is ahead or this peer's weights are refuted, or go on with catching up.

        Returns:
            whether no round may begin now
        """
        return self._has_caught_up() or self.is_behind

    def _has_caught_up(self) -> bool:
        """Begin to catch up if there is a reason, or go on with it; return whether the peer holds other weights now."""
        if self.is_running:
            return self._apply(self._go_on())
        if self._probation.refuters:
            donor = self._healers.find_healer_of_refuted()
            if donor is not None:
                return self.begin(donor)
        if self._tracker.swarm.seconded_step > self._version.step:
            return self.begin()
        return False

    def _go_on(self) -> Progress:
        """Go on with the attempt as far as that is possible now.

        A peer that is behind most likely computes in vain, and a leader may hold a group open for it. So it waits here
        for as long as it has computed since the last call. A liar that tells it that it is behind slows it down by half
        at most.
        """
        computed_seconds = min(time.monotonic() - self._polled_at, LONG_SECONDS)
        wait_seconds = max(POLL_SECONDS, computed_seconds) if self.is_behind else 0.0
        return self._poll(wait_seconds)

    def report(self) -> None:
        """Report that this peer is behind.

        The donors may be in the middle of a round, which should not wait for this peer. In a swarm without overlap, it
        reports only a delay that is longer than `LONG_SECONDS`.
        """
        is_long = time.monotonic() - self._behind_since > LONG_SECONDS
        if self._averaging.overlaps or is_long:
            self._tracker.report(urgent=self._tracker.own.phase != JOINING, samples=0, phase=JOINING)
        else:
            self._tracker.report(samples=0)

    def cancel(self) -> None:
        """End the attempt: this peer leaves."""
        self._follower.cancel()

    def _apply(self, progress: Progress) -> bool:
        """Act on the progress of the attempt; return whether this peer holds other weights now."""
        if progress is Progress.OTHER_WEIGHTS:
            self._round.begin_step()
            self.go_on_with_the_round()
        elif progress is Progress.IN_VAIN:
            self._tracker.report(samples=self._contribution.samples)  # nothing has changed: what it computed counts
            self._round.resume()
            self.go_on_with_the_round()
        elif self.is_behind:
            self._contribution.resume()
        self._attendance.resume()  # this peer has waited for an answer: it has not made other peers wait
        return progress is Progress.OTHER_WEIGHTS

    def go_on_with_the_round(self) -> None:
        """Take over the round to which this peer listens, if the peer holds the weights of that round; else leave it.

        Do nothing while the peer still catches up: it may still get those weights, and the round would fail without
        the share that this peer reduces.
        """
        if self.is_running:
            return
        listened = self._listener.take(self._version.step, self._version.lineage)
        if listened is not None:
            self._gradients.depart()
            if self._averaging.local_steps is None:  # with local steps, what it has computed is in its weights
                self._contribution.forget_samples()
            self._round.take_over(listened)

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
