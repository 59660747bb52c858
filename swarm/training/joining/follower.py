"""How a peer that is behind comes to the swarm's step: it takes over a state, and makes the updates made since.

A state may take longer than an update. So the donor keeps the averages of the updates that are made meanwhile, and the
newcomer makes these updates itself: same weights, same average, same bits. Who has missed nothing but the last average
needs no state at all.

Only a newcomer waits for all this. Who trains goes on meanwhile: the download runs in the averaging process, and
`Follower.poll` is asked now and then whether there is something to be applied.
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
"""Seconds within which a leader is left out that says again what all others deny."""
TOGETHER_SECONDS = 10.0
"""Seconds after a denial for which a peer makes no update alone while others hold its weights: they may need that long
to deny it as well."""


class Follower:
    """The follower takes over what others have; one attempt at a time, and in steps that never block.

    Args:
        own: this peer
        apply: makes an update with an average
        listener: goes to the next round before this peer has its weights
        probation: examines what is taken over
    """

    def __init__(self, own: OwnPeer, *, apply: Callable[[], None], listener: Listener, probation: Probation):
        self._version, self._tracker, self._averager = own.version, own.tracker, own.averager
        self._listener, self._should_stop = listener, own.should_stop
        self._fetcher = Fetcher(own, listener)
        self._replay = UpdateReplay(own, apply, listener, probation, self._fetcher)
        self._takeover = StateTakeover(own, probation, self._fetcher)
        self._steps: Steps[bool] | None = None
        """The steps that the attempt has still to take; None if none is under way."""
        self._denied, self._denied_at = None, -math.inf
        """The leader whose claim all others have denied last, and when, in monotonic seconds."""
        self._waits_for: Future | None = None
        """The future that the next step waits for."""

    @property
    def last_donor(self) -> PeerID | None:
        """The donor whose state this peer has taken over last."""
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
        """Begin to take over the donor's state, or that of whose counts more, unless that is under way already.

        Args:
            donor: the peer whose state is wanted; None: whoever counts more
            timeout_seconds: seconds for which this peer looks for somebody who hands over a state
            joins: this peer has never trained: it is worth a long wait, and an error if nothing comes of it
            is_told: the swarm has gone on, said who leads it: a new attempt does not follow at once
            corroboration: which witnesses must confirm the leader's claim that the swarm has gone on; None: believe the
                leader
        """
        if self._steps is None:
            corroboration = corroboration or Corroboration(self._tracker)
            self._steps = self._steps_of(Attempt(donor, timeout_seconds, joins, is_told, corroboration))

    def poll(self) -> Progress:
        """Go on as far as that needs no waiting; `Progress.NOTHING` while there is more to come.

        Raises:
            InputError: this peer joins, and nobody has handed over a state
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
        """Wait until there is something to go on with, for `POLL_SECONDS` at most."""
        if self._waits_for is None:
            time.sleep(POLL_SECONDS)
        else:
            wait_a_little(self._waits_for)

    def cancel(self) -> None:
        """End the attempt; what is under way is given up."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()

    # ---- its steps --------------------------------------------------------------------------------------------------

    def _steps_of(self, attempt: Attempt) -> Steps[bool]:
        """The steps of an attempt; whether this peer holds other weights at its end."""
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
        knows_history = version.step == 0 or not version.untouched  # else its lineage is its own
        if knows_history and tracker.swarm.latest_step <= version.step + MAX_AVERAGES:
            has_replayed = yield from self._replay.replay_from_anyone(attempt)
            if has_replayed and (tracker.swarm.latest_step <= version.step or self._listener.is_at(version.step)):
                return True  # the average of the round that it listens to comes next, or is here already
        donor = yield from self._takeover.download_from_superiors(attempt)
        if donor is not None:
            self._replay.prefer(donor)
            yield from self._replay.replay_updates(attempt)
            return True
        if attempt.is_told and not has_replayed:
            has_replayed = yield from self._replay_when_they_have_finished(attempt)
        return has_replayed

    def _replay_when_they_have_finished(self, attempt: Attempt) -> Steps[bool]:
        """Fetch the average of the round that has closed without this peer, as soon as it ends; whether it came.

        The next group is held open meanwhile, so this has to begin when the round ends, and with the donor whose line
        is known to be fast.
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
        """Wait until a witness confirms the leader's claim, where one has to; whether that has come about."""
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
        """Whether others, who hold this peer's weights, are about to find out what it has just found out."""
        return time.monotonic() < self._denied_at + TOGETHER_SECONDS and self._tracker.shares_weights

    def _note_denied(self, leader: PeerID | None) -> None:
        """Leave out a leader whose claim was denied, unless it was in a round that has only failed."""
        if leader is None:
            return
        now, own = time.monotonic(), (self._version.step, self._version.lineage)
        record = self._tracker.others.get(leader)
        is_elsewhere = record is not None and (record.step, record.lineage) != own
        says_it_again = self._denied == leader and now < self._denied_at + DENIED_SECONDS
        if is_elsewhere or says_it_again:
            self._tracker.blame({leader: Blame.GOES_ON_ALONE})
        self._denied, self._denied_at = leader, now
