"""How a peer takes over the whole state of a donor: it downloads, checks and loads it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from recipe.errors import InputError
from swarm.protocol.messages import RoundFailed
from swarm.runtime.async_utils import POLL_SECONDS
from swarm.state_sync.download import DownloadRequest, NoState
from swarm.state_sync.uploads import MIN_BUSY_SECONDS
from swarm.training.joining.attempt import Attempt, Steps
from swarm.training.joining.corroboration import Corroboration
from swarm.training.joining.fetch import MAX_DONORS, Fetcher
from swarm.training.joining.probation import Probation
from swarm.training.own_peer import OwnPeer

logger = get_logger(__name__)

MAX_UPDATES_AHEAD = 1000
"""Most updates by which a donor can be ahead of the step expected of it. A donor with more has made them up."""
CONFIRM_SECONDS = 3.0
"""Seconds for which a peer waits until a peer other than the donor says that it holds the state: records come each
second."""
MAX_WAIT_SECONDS = 600.0
"""Most seconds in all for which a peer waits for busy donors beyond the time limit of its attempt."""


class DonorSearch:
    """The search for a donor that hands over its state, in one attempt.

    Args:
        timeout_seconds: seconds after which the search is over; some waits do not count
    """

    def __init__(self, timeout_seconds: float):
        self._began = time.monotonic()
        self._deadline = self._began + timeout_seconds
        self.busy_seconds = 0.0
        """Seconds for which this peer has waited for busy donors."""
        self.failed: set[PeerID] = set()
        """The donors that could not hand over their state."""
        self.reason = "no peer offers it"
        """The reason why there is no state yet, as the end of a sentence."""

    @property
    def seconds(self) -> float:
        """Seconds since the search began."""
        return time.monotonic() - self._began

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self._deadline

    def extend(self, seconds: float) -> None:
        """Do not count this many of the seconds that have passed."""
        self._deadline += seconds


class StateTakeover:
    """Takes over the whole state of a peer whose state counts more than this one's, or of a named donor.

    Args:
        own: this peer
        probation: examines states before they are loaded
        fetcher: downloads states
    """

    def __init__(self, own: OwnPeer, probation: Probation, fetcher: Fetcher):
        self._version, self._tracker, self._averager = own.version, own.tracker, own.averager
        self._gradients, self._probation, self._fetcher = own.gradients, probation, fetcher
        self._should_stop = own.should_stop
        self._claimed: dict[PeerID, int] = {}
        """The steps that donors claimed when a download began that has broken off and may go on."""
        self.last_donor: PeerID | None = None
        """The donor whose state this peer took over last."""

    def download_from_donor(self, attempt: Attempt) -> Steps[PeerID | None]:
        """Take over the state of the donor that the attempt names; return the donor, or None if it gave no state.

        The donor may have to finish an update first, so this tries again for a while.
        """
        deadline = time.monotonic() + self._averager.timeouts.settle_seconds
        while True:
            try:
                return (yield from self.download([attempt.donor], attempt))
            except NoState as error:
                if self._should_stop() or time.monotonic() > deadline:
                    logger.warning(f"No state from {self._tracker.name_of(attempt.donor)}: {error}")
                    return None
            yield None

    def download_from_superiors(self, attempt: Attempt) -> Steps[PeerID | None]:
        """Take over the state of a peer whose state counts more; return the donor, or None without one.

        A joiner also tries again donors that could not hand over their state: otherwise it would train alone.

        Raises:
            InputError: this peer joins, and no donor has handed over a state
        """
        tracker, search = self._tracker, DonorSearch(attempt.timeout_seconds)
        while not search.is_over and not self._should_stop():
            may_try_again = attempt.joins and search.failed & tracker.others.keys()
            if not tracker.swarm.superiors and not may_try_again:
                return None  # the peers that were ahead or senior are gone
            if attempt.corroboration.is_denied:
                return None
            busy_seconds = 0.0
            if donors := self._candidates(attempt):
                asked_at = time.monotonic()
                try:
                    return (yield from self.download(donors, attempt))
                except NoState as error:
                    busy_seconds = error.busy_seconds
                    self._note_no_state(search, error, time.monotonic() - asked_at)
            if busy_seconds and search.busy_seconds < MAX_WAIT_SECONDS:
                yield from self._wait_for_busy(search, busy_seconds)
            else:
                yield from self._fetcher.until_refreshed(1.0)
            if search.seconds > self._averager.timeouts.superior_seconds:
                self._pass_over_joiners()
        if not self._should_stop():
            self._give_up(search, attempt)
        return None

    def _candidates(self, attempt: Attempt) -> list[PeerID]:
        """The donors that may be asked for a useful state, the best first."""
        version, swarm, corroboration = self._version, self._tracker.swarm, attempt.corroboration
        is_behind = swarm.latest_step > version.step  # then a state of this peer's own step would not help
        donors = swarm.donors(min_step=version.step + is_behind)
        if corroboration.is_needed:
            donors = [donor for donor in donors if corroboration.may_confirm_state_of(donor)]
        return donors[:MAX_DONORS]

    def _note_no_state(self, search: DonorSearch, error: NoState, seconds: float) -> None:
        """Note that none of the donors that were asked has handed over its state.

        Args:
            seconds: seconds since they were asked, which do not count if something arrived
        """
        search.reason = str(error)
        for peer, why in error.reasons.items():
            logger.warning(f"No state from {self._tracker.name_of(peer)}: {why}")
            self._tracker.cannot_hand_over(peer)
            search.failed.add(peer)
        if error.has_begun:
            search.extend(seconds)

    def _wait_for_busy(self, search: DonorSearch, seconds: float) -> Steps[None]:
        """Wait for donors that serve other joiners first, for as long as they say. This time does not count."""
        seconds, began = max(MIN_BUSY_SECONDS, seconds), time.monotonic()
        search.reason = "its donors serve other joiners first"
        logger.warning(f"The donors serve other joiners first: this peer waits {seconds:.0f} s")
        yield from self._fetcher.until_refreshed(seconds, at_least=True)
        waited_seconds = time.monotonic() - began
        search.busy_seconds += waited_seconds
        search.extend(waited_seconds)

    def _pass_over_joiners(self) -> None:
        """Pass over peers whose state would count more but that still join themselves: they have no state to give."""
        swarm = self._tracker.swarm
        for peer_id in set(swarm.superiors) - set(swarm.donors(min_step=self._version.step)):
            self._tracker.cannot_hand_over(peer_id)

    def _give_up(self, search: DonorSearch, attempt: Attempt) -> None:
        """Go on without a state, because the time is over.

        Raises:
            InputError: this peer joins, and still has the weights with which it began
        """
        tracker, version = self._tracker, self._version
        said = f"The swarm's state could not be downloaded in {search.seconds:.0f} s ({search.reason})"
        if attempt.joins and version.untouched:
            raise InputError(
                f"{said}: check that the peers of --initial-peers can be reached, and that torch and timm have the "
                "same versions here as there, and start again."
            )
        logger.warning(f"{said}: this peer trains on without the peers that are ahead, and tries again later")
        for peer_id in set(tracker.swarm.superiors) & tracker.others.keys():
            if tracker.others[peer_id].step > version.step:
                tracker.cannot_hand_over(peer_id)

    def download(self, donors: Sequence[PeerID], attempt: Attempt) -> Steps[PeerID | None]:
        """Take over the state of one of these donors.

        Returns:
            the donor; None if this peer has come as far by itself meanwhile

        Raises:
            NoState: none of them has handed over a state that this peer accepts
        """
        version, tracker, began = self._version, self._tracker, time.monotonic()
        claimed = {peer: record.step for peer, record in tracker.others.items() if peer in donors}
        claimed |= {peer: step for peer, step in self._claimed.items() if peer in claimed}
        before = version.step, version.lineage
        try:
            request = DownloadRequest(version.state.max_bytes, is_awaited=attempt.joins)
            fetched = yield from self._fetcher.fetch(donors, attempt, request)
        except NoState as error:
            self._claimed = claimed if error.has_begun else {}
            raise
        donor, description = fetched.donor, fetched.description
        self._claimed = {}
        yield from self._until_others_hold(donor, description, attempt.corroboration)
        try:
            tensors = fetched.tensors()
            with version.lock:
                step = description.get("step") if isinstance(description, dict) else None
                if type(step) is int and step <= version.step and (version.step, version.lineage) != before:
                    return None
                self._check_step(donor, step, max(version.step, claimed.get(donor, 0)))
                examined = self._probation.examine(donor, description, tensors)
                version.load(description, tensors)
                self._gradients.adopt()  # with local steps, this sets the anchors, which the next joiner downloads
                self._averager.took_over()
                self._probation.begin(donor, examined)
        except RoundFailed as error:
            raise NoState({donor: str(error)}) from error
        self.last_donor = donor
        tracker.has_handed_over(donor)
        if version.lineage != before[1]:
            tracker.came_back()
        megabytes, seconds = len(fetched.content) / 1e6, time.monotonic() - began
        name = tracker.name_of(donor)
        logger.warning(f"Took over step {version.step} from {name}: {megabytes:.1f} MB in {seconds:.1f} s")
        return donor

    def _until_others_hold(self, donor: PeerID, description: object, corroboration: Corroboration) -> Steps[None]:
        """Wait until a peer other than the donor says that it holds or held this state, if that is needed.

        Raises:
            NoState: no peer says so; the donor may still be honest
        """
        said = description if isinstance(description, dict) else {}
        step, lineage = said.get("step"), said.get("lineage")
        if type(step) is not int or type(lineage) is not bytes:
            return  # loading the state raises the error
        deadline = time.monotonic() + CONFIRM_SECONDS
        while not corroboration.confirms(donor, step, lineage):
            if time.monotonic() > deadline:
                name = self._tracker.name_of(donor)
                raise NoState({}, f"no other peer confirms the state of step {step} that {name} offers")
            yield from self._fetcher.until_refreshed(POLL_SECONDS)

    def _check_step(self, donor: PeerID, step: object, wanted: int) -> None:
        """Check that the step of a state is one that this peer can believe.

        Raises:
            RoundFailed: the step is earlier than the donor claimed, or later than any peer can be
        """
        if type(step) is not int:
            return  # loading the state raises the error
        if step < wanted:
            raise RoundFailed(f"it offers step {step}, and step {wanted} is needed")
        if step > wanted + MAX_UPDATES_AHEAD or not self._tracker.swarm.may_hold(donor, step):
            raise RoundFailed(f"it offers step {step}, and no other peer is near that step")
