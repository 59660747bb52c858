"""How a peer takes over the whole state of another one: it is downloaded, checked, and loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future

from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from recipe.errors import InputError
from swarm.averaging.averager import SwarmAverager
from swarm.membership.progress_tracker import ProgressTracker
from swarm.protocol.messages import RoundFailed
from swarm.runtime.async_utils import POLL_SECONDS
from swarm.state_sync.download import NoState
from swarm.state_sync.serialization import unpack
from swarm.state_sync.state_version import StateVersion
from swarm.state_sync.uploads import MIN_BUSY_SECONDS
from swarm.training.gradient_buffer import GradientVector
from swarm.training.joining.attempt import Attempt
from swarm.training.joining.fetch import MAX_DONORS, Fetcher
from swarm.training.joining.probation import Probation
from swarm.training.joining.second_word import SecondWord

logger = get_logger(__name__)

MAX_UPDATES_AHEAD = 1000
"""Most updates that a donor can be ahead of what it was asked for. A donor with more has made them up."""
HELD_SECONDS = 3.0
"""Seconds for which a peer waits until another one says that it holds a state, too: records come each second."""
MAX_WAIT_SECONDS = 600.0
"""Most seconds in all for which a peer waits for busy donors beyond the time limit of its attempt."""

DonorSteps = Generator[Future | None, None, PeerID | None]
"""Goes on when what it yields is done, or after a while; returns whose state this peer has taken over, if any."""


class StateTakeover:
    """Takes over the state of a peer whose state counts more, or of one that is named.

    Args:
        version: the state of this peer
        tracker: knows whose state counts more
        averager: says how long things may take
        gradients: what it holds belongs to the weights
        probation: examines what is taken over
        fetcher: downloads states
        should_stop: asked while waiting; a true answer ends the wait
    """

    def __init__(
        self,
        version: StateVersion,
        tracker: ProgressTracker,
        averager: SwarmAverager,
        gradients: GradientVector,
        probation: Probation,
        fetcher: Fetcher,
        should_stop: Callable[[], bool],
    ):
        self._version, self._tracker, self._averager = version, tracker, averager
        self._gradients, self._probation, self._fetcher = gradients, probation, fetcher
        self._should_stop = should_stop
        self._claimed: dict[PeerID, int] = {}
        """The steps that donors held when a download began that has broken off, and may go on."""
        self.last_donor: PeerID | None = None
        """The donor whose state this peer has taken over last."""

    def reload(self, attempt: Attempt) -> DonorSteps:
        """Take over the state of the donor that the attempt names, which may have to finish its update first."""
        deadline = time.monotonic() + self._averager.timeouts.settle_seconds
        while True:
            try:
                return (yield from self.download([attempt.donor], attempt))
            except NoState as error:
                if self._should_stop() or time.monotonic() > deadline:
                    logger.warning(f"No state from {self._tracker.name_of(attempt.donor)}: {error}")
                    return None
            yield None

    def catch_up(self, attempt: Attempt) -> DonorSteps:
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
                return None  # those who were ahead or senior are gone
            if attempt.second_word.is_denied:
                return None
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
            return None
        said = f"The swarm's state could not be downloaded in {time.monotonic() - began:.0f} s ({reason})"
        if attempt.joins and version.untouched:
            raise InputError(f"{said}: check that the peers of --initial-peers can be reached and start again.")
        logger.warning(f"{said}: this peer trains on without those who are ahead, and tries again later")
        for peer_id in set(tracker.swarm.superiors) & tracker.others.keys():
            if tracker.others[peer_id].step > version.step:
                tracker.cannot_hand_over(peer_id)
        return None

    def download(self, donors: Sequence[PeerID], attempt: Attempt) -> DonorSteps:
        """Take over the state of one of these; of none, if this peer has come as far by itself meanwhile.

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
                    return None
                self._check_step(donor, step, max(version.step, claimed.get(donor, 0)))
                examined = self._probation.examine(donor, description, tensors)
                version.load(description, tensors)
                self._gradients.adopt()  # with local steps it is what the next one downloads
                self._probation.begin(donor, examined)
        except RoundFailed as error:
            raise NoState({donor: str(error)}) from error
        self.last_donor = donor
        tracker.has_handed_over(donor)
        if version.lineage != before[1]:
            tracker.came_back()
        seconds, name = time.monotonic() - began, tracker.name_of(donor)
        logger.warning(f"Took over step {version.step} from {name}: {len(content) / 1e6:.1f} MB in {seconds:.1f} s")
        return donor

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
