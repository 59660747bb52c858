"""How a peer that is behind reaches the swarm's step: it takes over a state, and replays the updates made since.

A download may take longer than an update. So the donor keeps the averages of the updates that are made meanwhile, and
the joiner makes these updates itself. The same weights and the same average give the same bits. A peer that has missed
only the last average needs no state at all.

Only a joiner waits for all this. A peer that has trained before goes on training meanwhile. The download runs in the
averaging process, and the trainer calls `Follower.poll` now and then to apply what has arrived.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future

from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from swarm.protocol.messages import Blame
from swarm.runtime.async_utils import POLL_SECONDS, wait_a_little
from swarm.state_sync.average_log import MAX_AVERAGES
from swarm.training.joining.attempt import Attempt, Progress, Steps
from swarm.training.joining.corroboration import Corroboration
from swarm.training.joining.fetch import Fetcher
from swarm.training.joining.listener import Listener
from swarm.training.joining.probation import Probation
from swarm.training.joining.state_takeover import StateTakeover
from swarm.training.joining.update_replay import UpdateReplay
from swarm.training.own_peer import OwnPeer

logger = get_logger(__name__)

DENIED_SECONDS = 120.0
"""A leader that repeats a claim within this many seconds after all witnesses denied it is left out."""
TOGETHER_SECONDS = 10.0
"""Seconds after a denial for which a peer makes no update alone while other peers hold its weights. They may need that
long to find out that the claim is false."""


class Follower:
    """Catches up with the swarm: one attempt at a time, in steps that never block.

    Args:
        own: this peer
        apply: makes an update with an average
        listener: goes to the next round before this peer has the weights
        probation: examines states before they are loaded
    """

    def __init__(self, own: OwnPeer, *, apply: Callable[[], None], listener: Listener, probation: Probation):
        self._version, self._tracker, self._averager = own.version, own.tracker, own.averager
        self._listener, self._should_stop = listener, own.should_stop
        self._fetcher = Fetcher(own, listener)
        self._replay = UpdateReplay(own, apply, listener, probation, self._fetcher)
        self._takeover = StateTakeover(own, probation, self._fetcher)
        self._steps: Steps[bool] | None = None
        """The remaining steps of the attempt; None if none is under way."""
        self._denied, self._denied_at = None, -math.inf
        """The leader whose claim all witnesses denied last, and the time of that in monotonic seconds."""
        self._waits_for: Future | None = None
        """The future that the next step waits for."""

    @property
    def last_donor(self) -> PeerID | None:
        """The donor whose state this peer took over last."""
        return self._takeover.last_donor

    # ---- one attempt ------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether this peer is catching up."""
        return self._steps is not None

    def begin(
        self,
        donor: PeerID | None,
        timeout_seconds: float,
        joins: bool = False,
        is_told: bool = False,
        corroboration: Corroboration | None = None,
    ) -> None:
        """Begin an attempt to catch up, unless one is under way already.

        Args:
            donor: the peer whose state is wanted; None for any whose state counts more than this peer's
            timeout_seconds: seconds for which this peer looks for a donor that hands over a state
            joins: this peer has not trained since it started: a long wait is worth while, and a failure is an error
            is_told: the swarm is known to have gone on, so the attempt also waits for a round that still runs
            corroboration: which witnesses must confirm the leader's claim that the swarm has gone on; None: believe the
                leader
        """
        if self._steps is None:
            corroboration = corroboration or Corroboration(self._tracker)
            self._steps = self._steps_of(Attempt(donor, timeout_seconds, joins, is_told, corroboration))

    def poll(self) -> Progress:
        """Go on as far as that needs no waiting; return `Progress.NOTHING` while there is more to come.

        Raises:
            InputError: this peer joins, and no donor has handed over a state
        """
        while self._steps is not None:
            try:
                self._waits_for = next(self._steps)
            except StopIteration as end:
                self._steps = self._waits_for = None
                return Progress.OTHER_WEIGHTS if end.value else Progress.IN_VAIN
            except BaseException:
                self._steps = self._waits_for = None
                raise
            if self._waits_for is None or not self._waits_for.done():
                return Progress.NOTHING
        return Progress.IN_VAIN

    def wait_a_little(self) -> None:
        """Wait until the attempt can go on, for `POLL_SECONDS` at most."""
        if self._waits_for is None:
            time.sleep(POLL_SECONDS)
        else:
            wait_a_little(self._waits_for)

    def cancel(self) -> None:
        """End the attempt, and give up a download that is under way."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()

    # ---- its steps --------------------------------------------------------------------------------------------------

    def _steps_of(self, attempt: Attempt) -> Steps[bool]:
        """The steps of an attempt; they return whether this peer holds other weights at the end."""
        if attempt.donor is not None:
            donor = yield from self._takeover.download_from_donor(attempt)
            if donor is not None:
                self._replay.prefer(donor)
            return donor is not None
        if attempt.is_told:
            yield from self._fetcher.until_refreshed(5 * POLL_SECONDS)
            if not (yield from self._until_confirmed(attempt.corroboration)):
                return False
            self._listener.begin()
        version, tracker = self._version, self._tracker
        has_replayed = False
        knows_history = version.step == 0 or not version.untouched  # if not, its lineage is one of its own
        if knows_history and tracker.swarm.latest_step <= version.step + MAX_AVERAGES:
            has_replayed = yield from self._replay.replay_from_anyone(attempt)
            if has_replayed and (tracker.swarm.latest_step <= version.step or self._listener.is_at(version.step)):
                return True  # the average of the round to which the peer listens comes next, or is here already
        donor = yield from self._takeover.download_from_superiors(attempt)
        if donor is not None:
            self._replay.prefer(donor)
            yield from self._replay.replay_updates(attempt)
            return True
        if attempt.is_told and not has_replayed:
            has_replayed = yield from self._replay_when_they_have_finished(attempt)
        return has_replayed

    def _replay_when_they_have_finished(self, attempt: Attempt) -> Steps[bool]:
        """Fetch the average of a round that was closed without this peer, when that ends; return whether it came.

        The next group is held open meanwhile. So this begins as soon as the round ends, with the donor whose line is
        known to be fast.
        """
        retry_until = time.monotonic() + self._averager.timeouts.retry_seconds
        while not self._should_stop():
            if time.monotonic() > retry_until and not self._listener.is_at(self._version.step + 1):
                break
            if attempt.corroboration.is_denied:
                self._note_denied(attempt.corroboration.leader)
                break
            self._listener.begin()
            yield from self._fetcher.until_refreshed(self._averager.timeouts.pause_seconds, at_least=True)
            if (yield from self._replay.replay_from_anyone(attempt, waits=True)):
                return True
        return False

    def _until_confirmed(self, corroboration: Corroboration) -> Steps[bool]:
        """Wait until a witness confirms the leader's claim, if that is needed; return whether the claim holds."""
        until = time.monotonic() + self._averager.timeouts.retry_seconds
        while corroboration.is_needed and not corroboration.is_confirmed:
            if corroboration.is_denied:
                self._note_denied(corroboration.leader)
                return False
            if time.monotonic() > until or self._should_stop():
                return False
            yield from self._fetcher.until_refreshed(POLL_SECONDS)
        return True

    @property
    def waits_for_others(self) -> bool:
        """Whether to make no update alone, so that peers with the same weights can find out the false claim, too."""
        return time.monotonic() < self._denied_at + TOGETHER_SECONDS and self._tracker.shares_weights

    def _note_denied(self, leader: PeerID | None) -> None:
        """Leave out a leader whose claim was denied, if it is elsewhere or repeats the claim.

        Another leader was in a round that failed, so its claim may have been honest.
        """
        if leader is None:
            return
        now, own = time.monotonic(), (self._version.step, self._version.lineage)
        record = self._tracker.others.get(leader)
        is_elsewhere = record is not None and (record.step, record.lineage) != own
        says_it_again = self._denied == leader and now < self._denied_at + DENIED_SECONDS
        if is_elsewhere or says_it_again:
            self._tracker.blame({leader: Blame.GOES_ON_ALONE})
        self._denied, self._denied_at = leader, now
