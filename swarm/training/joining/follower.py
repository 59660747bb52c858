"""How a peer that is behind comes to the swarm's step: it takes over the state of another one, and follows.

A state may take longer than an update. So the donor keeps the averages of the updates that are made meanwhile, and the
newcomer makes these updates itself: same weights, same average, same bits. Who has missed nothing but the last average
needs no state at all.

Only a newcomer waits for all this. Who trains goes on meanwhile: the download runs in the averaging process, and
`Follower.poll` is asked now and then whether there is something to be applied.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future

import torch
from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from recipe.errors import InputError
from swarm.averaging.averager import SwarmAverager
from swarm.membership.progress_tracker import ProgressTracker
from swarm.protocol.messages import Blame, RoundFailed
from swarm.runtime.async_utils import POLL_SECONDS, wait_a_little
from swarm.state_sync.average_log import MAX_AVERAGES
from swarm.state_sync.download import NoState
from swarm.state_sync.serialization import unpack
from swarm.state_sync.state_version import StateVersion
from swarm.state_sync.uploads import MIN_BUSY_SECONDS
from swarm.training.gradient_buffer import GradientVector
from swarm.training.joining.attempt import Attempt, Steps
from swarm.training.joining.fetch import MAX_DONORS, Fetcher
from swarm.training.joining.listener import Listener
from swarm.training.joining.probation import Probation
from swarm.training.joining.second_word import SecondWord
from swarm.training.joining.update_replay import UpdateReplay

logger = get_logger(__name__)

MAX_UPDATES_AHEAD = 1000
"""Most updates that a donor can be ahead of what it was asked for. A donor with more has made them up."""
RECORDS_LAG = 2
"""Updates that others may have made since they wrote what they hold, in a fast swarm."""
HELD_SECONDS = 3.0
"""Seconds for which a peer waits until another one says that it holds a state, too: records come each second."""
DENIED_SECONDS = 120.0
"""Seconds within which a leader is left out that says again what all others deny."""
TOGETHER_SECONDS = 10.0
"""Seconds after a denial for which a peer makes no update alone while others hold its weights: they may need that long
to deny it as well."""
MAX_WAIT_SECONDS = 600.0
"""Most seconds in all for which a peer waits for busy donors beyond the time limit of its attempt."""


class Follower:
    """Takes over what others have, into a version; one attempt at a time, piece by piece.

    Args:
        version: the state of this peer
        gradients: where an average has to lie
        apply: make an update with it
        should_stop: asked while waiting; a true answer ends the wait
        listener: goes to the next round before this peer has its weights
        probation: examines what is taken over
    """

    def __init__(
        self,
        version: StateVersion,
        tracker: ProgressTracker,
        averager: SwarmAverager,
        gradients: GradientVector,
        apply: Callable[[], None],
        should_stop: Callable[[], bool],
        listener: Listener,
        probation: Probation,
    ):
        self._version, self._tracker, self._averager = version, tracker, averager
        self._gradients, self._should_stop = gradients, should_stop
        self._listener, self._probation = listener, probation
        self._fetcher = Fetcher(averager, tracker, listener, should_stop)
        self._replay = UpdateReplay(version, tracker, averager, gradients, apply, listener, probation, self._fetcher)
        self._steps: Steps | None = None
        self._denied, self._denied_at = None, -math.inf
        """Who has said last what all others denied, and when, in monotonic seconds."""
        self._waits_for: Future | None = None
        self._claimed: dict[PeerID, int] = {}
        """The steps that donors held when a download began that has broken off, and may go on."""
        self.last_donor: PeerID | None = None
        """Whose state this peer has taken over last."""

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
        second_word: SecondWord | None = None,
    ) -> None:
        """Begin to take over the donor's state, or that of whose counts more, unless that is under way already.

        Args:
            joins: this peer has never trained: it is worth a long wait, and an error if nothing comes of it
            is_told: the swarm has gone on, said who leads it: a new attempt does not follow at once
            second_word: what has to be heard beside a leader who has said so; nothing, if it is left out
        """
        if self._steps is None:
            word = second_word or SecondWord(self._tracker)
            self._steps = self._take_over(Attempt(donor, timeout_seconds, joins, is_told, word))

    def poll(self) -> bool | None:
        """Go on as far as that needs no waiting.

        Returns:
            None while there is more to come, then whether this peer holds other weights now

        Raises:
            InputError: as `begin` says
        """
        while self._steps is not None:
            try:
                self._waits_for = next(self._steps)
            except StopIteration as end:
                self._steps = self._waits_for = None
                return end.value
            except BaseException:
                self._steps = self._waits_for = None
                raise
            if self._waits_for is None or not self._waits_for.done():
                return None
        return False

    def wait_a_little(self) -> None:
        """Until there is something to go on with, or for `POLL_SECONDS`."""
        if self._waits_for is None:
            time.sleep(POLL_SECONDS)
        else:
            wait_a_little(self._waits_for)

    def cancel(self) -> None:
        """This peer leaves."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()

    # ---- what it consists of ----------------------------------------------------------------------------------------

    def _take_over(self, attempt: Attempt) -> Steps:
        if attempt.donor is not None:
            return (yield from self._reload(attempt))
        if attempt.is_told:
            yield from self._fetcher.until_refreshed(5 * POLL_SECONDS)
            if not (yield from self._until_given(attempt.second_word)):
                return False
            self._listener.begin()
        version, tracker = self._version, self._tracker
        followed = False
        knows_history = version.step == 0 or not version.untouched  # else its lineage is its own
        if knows_history and tracker.swarm.latest_step <= version.step + MAX_AVERAGES:
            followed = yield from self._replay.follow_somebody(attempt)
            if followed and tracker.swarm.latest_step <= version.step:
                return True
        if (yield from self._catch_up(attempt)):
            yield from self._replay.follow(self._replay.who_may_have_averages(), attempt)
            return True
        retry_until = time.monotonic() + self._averager.timeouts.retry_seconds
        while attempt.is_told and not followed and not self._should_stop():
            if time.monotonic() > retry_until and not self._listener.is_at(version.step + 1):
                break
            if attempt.second_word.is_denied:
                self._note_denied(attempt.second_word.leader)
                break
            self._listener.begin()
            # The group has closed without this peer. The next one is held open while this peer fetches the average of
            # it, so that has to begin when the round ends, and with the donor whose line is known to be fast.
            yield from self._fetcher.until_refreshed(self._averager.timeouts.pause_seconds, at_least=True)
            followed = yield from self._replay.follow_somebody(attempt, waits=True)
        return followed

    def _until_given(self, word: SecondWord) -> Steps:
        """Wait for the second word, where one is needed; whether it has come."""
        until = time.monotonic() + self._averager.timeouts.retry_seconds
        while word.is_needed and not word.is_given:
            if word.is_denied:
                self._note_denied(word.leader)
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
        """The swarm has not gone on: who has said so is left out, unless it was in a round that has only failed."""
        if leader is None:
            return
        now, own = time.monotonic(), (self._version.step, self._version.lineage)
        record = self._tracker.others.get(leader)
        is_elsewhere = record is not None and (record.step, record.lineage) != own
        says_it_again = self._denied == leader and now < self._denied_at + DENIED_SECONDS
        if is_elsewhere or says_it_again:
            self._tracker.blame({leader: Blame.GOES_ON_ALONE})
        self._denied, self._denied_at = leader, now

    def _reload(self, attempt: Attempt) -> Steps:
        """Take over the state of this peer, which may have to finish its update first; whether it could be had."""
        deadline = time.monotonic() + self._averager.timeouts.settle_seconds
        while True:
            try:
                yield from self.download([attempt.donor], attempt)
                return True
            except NoState as error:
                if self._should_stop() or time.monotonic() > deadline:
                    logger.warning(f"No state from {self._tracker.name_of(attempt.donor)}: {error}")
                    return False
            yield None

    def _catch_up(self, attempt: Attempt) -> Steps:
        """Take over the state of a peer whose state counts more, until none is left or one has been taken over.

        Who joins tries those again that could not hand it over: it would train on alone. Time in which something
        arrived, or that busy donors have announced, does not count.
        """
        tracker, version = self._tracker, self._version
        began, busy_so_far, failed = time.monotonic(), 0.0, set()
        deadline = began + attempt.timeout_seconds
        reason = "nobody is there to hand it over"
        while time.monotonic() < deadline and not self._should_stop():
            if not tracker.swarm.superiors and not (attempt.joins and failed & tracker.others.keys()):
                return False  # those who were ahead or senior are gone
            if attempt.second_word.is_denied:
                return False
            needed = version.step + (
                tracker.swarm.latest_step > version.step
            )  # the same step again would be no way out
            busy_seconds, asked_at = 0.0, time.monotonic()
            donors = tracker.swarm.donors(min_step=needed)
            if attempt.second_word.is_needed:
                donors = [donor for donor in donors if attempt.second_word.may_give(donor)]
            if donors := donors[:MAX_DONORS]:
                try:
                    return (yield from self.download(donors, attempt))
                except NoState as error:
                    reason, busy_seconds = str(error), error.busy_seconds
                    for peer, why in error.reasons.items():
                        logger.warning(f"No state from {tracker.name_of(peer)}: {why}")
                        tracker.cannot_hand_over(peer)
                        failed.add(peer)
                    if error.has_begun:
                        deadline += time.monotonic() - asked_at
            if busy_seconds and busy_so_far < MAX_WAIT_SECONDS:
                busy_seconds, waits_since = max(MIN_BUSY_SECONDS, busy_seconds), time.monotonic()
                reason = "those who have it hand it over to others first"
                logger.warning(f"The state is handed over to others first: this peer waits {busy_seconds:.0f} s")
                yield from self._fetcher.until_refreshed(busy_seconds, at_least=True)
                waited = time.monotonic() - waits_since
                busy_so_far, deadline = busy_so_far + waited, deadline + waited
            else:
                yield from self._fetcher.until_refreshed(1.0)
            if time.monotonic() - began > self._averager.timeouts.superior_seconds:
                # Those who claim to be ahead but have been joining themselves all the time have nothing to hand over.
                for peer_id in set(tracker.swarm.superiors) - set(tracker.swarm.donors(min_step=version.step)):
                    tracker.cannot_hand_over(peer_id)
        if self._should_stop():
            return False
        said = f"The swarm's state could not be downloaded in {time.monotonic() - began:.0f} s ({reason})"
        if attempt.joins and version.untouched:
            raise InputError(f"{said}: check that the peers of --initial-peers can be reached and start again.")
        logger.warning(f"{said}: this peer trains on without those who are ahead, and tries again later")
        for peer_id in set(tracker.swarm.superiors) & tracker.others.keys():
            if tracker.others[peer_id].step > version.step:
                tracker.cannot_hand_over(peer_id)
        return False

    def download(self, donors: Sequence[PeerID], attempt: Attempt) -> Steps:
        """The state of one of these; False if this peer has come as far by itself meanwhile.

        Raises:
            NoState: none of them has handed it over
        """
        version, tracker, began = self._version, self._tracker, time.monotonic()
        claimed = {peer: record.step for peer, record in tracker.others.items() if peer in donors}
        claimed |= {peer: step for peer, step in self._claimed.items() if peer in claimed}
        before = version.step, version.lineage
        try:
            fetched = yield from self._fetcher.fetch(donors, attempt, version.state.max_bytes, is_awaited=attempt.joins)
        except NoState as error:
            self._claimed = claimed if error.has_begun else {}
            raise
        donor, description, layout, content = fetched
        self._claimed = {}
        yield from self._until_held(donor, description, attempt.second_word)
        try:
            tensors = unpack(layout, content)
            with version.lock:
                step = description.get("step") if isinstance(description, dict) else None
                if type(step) is int and step <= version.step and (version.step, version.lineage) != before:
                    return False
                self._check_step(donor, step, max(version.step, claimed.get(donor, 0)))
                examined = self._probation.examine(donor, description, tensors)
                version.load(description, tensors)
                self._gradients.adopt()  # with local steps it is what the next one downloads
                self._probation.begin(donor, examined)
        except RoundFailed as error:
            raise NoState({donor: str(error)}) from error
        self.last_donor = donor
        self._replay.prefer(donor)
        tracker.has_handed_over(donor)
        if version.lineage != before[1]:
            tracker.came_back()
        seconds, name = time.monotonic() - began, tracker.name_of(donor)
        logger.warning(f"Took over step {version.step} from {name}: {len(content) / 1e6:.1f} MB in {seconds:.1f} s")
        return True

    def _until_held(self, donor: PeerID, description: object, word: SecondWord) -> Generator[Future | None, None, None]:
        """Wait until somebody else says that it holds this state, or has held it, where a second word is needed.

        Raises:
            NoState: nobody does; its donor may still be honest
        """
        said = description if isinstance(description, dict) else {}
        step, lineage = said.get("step"), said.get("lineage")
        if type(step) is not int or type(lineage) is not bytes:
            return  # whoever loads the state says so
        deadline = time.monotonic() + HELD_SECONDS
        while not word.holds(donor, step, lineage):
            if time.monotonic() > deadline:
                name = self._tracker.name_of(donor)
                raise NoState({}, f"nobody else says that it holds step {step} as {name} gives it")
            yield from self._fetcher.until_refreshed(POLL_SECONDS)

    def _check_step(self, donor: PeerID, step: object, wanted: int) -> None:
        """Raises RoundFailed: the donor has less than it said, or more than this peer can believe."""
        if type(step) is not int:
            return  # whoever loads the state says so
        if step < wanted:
            raise RoundFailed(f"it holds step {step} only, and not {wanted}")
        if step > wanted + MAX_UPDATES_AHEAD or not self._tracker.swarm.may_hold(donor, step):
            raise RoundFailed(f"it holds step {step}, and nobody else is near that")

    # ---- whom to believe --------------------------------------------------------------------------------------------

    def find_healer(self) -> PeerID | None:
        """Who can replace weights out of which nothing useful comes, if anybody can: not who they came from, if so.

        Raises:
            InputError: they are not finite, and nobody is there
        """
        donors = self._tracker.swarm.donors(min_step=self._version.step - RECORDS_LAG)
        weights = map(self._version.state.read, self._gradients.weights)
        if not self._tracker.others and not all(torch.isfinite(weight).all() for weight in weights):
            raise InputError(
                "The weights are not finite any more, and nobody is there who could replace them: start again, which "
                "goes on from the newest checkpoint that is sound; if it comes to this again, lower --learning-rate."
            )
        if self._version.untouched and self._version.step == 0:
            return None  # these weights are the recipe's: nobody has better ones
        others = [donor for donor in donors if donor != self.last_donor] or donors
        return random.choice(others) if others else None  # the first one may be as ill as this peer

    def find_witness(self) -> PeerID | None:
        """Who can replace weights that others have refuted: one of these if possible, and nobody they came from."""
        donors = self._tracker.swarm.donors(min_step=self._version.step - RECORDS_LAG)
        others = [donor for donor in donors if donor not in self._probation.sources]
        refuters = [donor for donor in others if donor in self._probation.refuters]
        return random.choice(refuters or others) if others else None

    def refused_by(self, leader: PeerID) -> None:
        """It says that it averages another model; who has taken part in the swarm knows that it does not matter.

        Raises:
            InputError: this peer has not
        """
        name = self._tracker.name_of(leader)
        if self._version.untouched and self._version.step == 0:
            raise InputError(
                f"{name} averages another model than this peer does: start it with the recipe of the swarm (give "
                "--initial-peers and nothing else)."
            )
        logger.warning(f"Ignoring {name}, who wants to lead and says that it averages another model")
        self._tracker.distrusted.add(leader)
