"""How a peer that is behind comes to the swarm's step: it takes over the state of another one, and follows.

A state may take longer than an update. So the donor keeps the averages of the updates that are made meanwhile, and the
newcomer makes these updates itself: same weights, same average, same bits. Who has missed nothing but the last average
needs no state at all.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch
from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from recipe.errors import InputError
from swarm.averager import SLOW_BYTES_PER_SECOND, SwarmAverager
from swarm.donors import Donors
from swarm.download import MAX_DESCRIPTION_BYTES, SLOWEST_BYTES_PER_SECOND, TooSlow
from swarm.gradients import GradientVector
from swarm.packing import unpack
from swarm.progress import ProgressTracker
from swarm.rounds import LINEAGE_BYTES, RoundFailed
from swarm.transfer import HANGS_SECONDS
from swarm.version import POLL_SECONDS, SETTLE_SECONDS, Version, wait_a_little

logger = get_logger(__name__)

SUPERIOR_SECONDS = 20.0
MAX_ASKED = 3
MAX_UPDATES = 1000  # a donor that has made more since then makes them up


class Follower:
    """Takes over what others have, into a version.

    :param version: the state of this peer
    :param gradients: where an average has to lie
    :param apply: make an update with it
    :param should_stop: asked while waiting; a true answer ends the wait
    """

    def __init__(
        self,
        version: Version,
        tracker: ProgressTracker,
        averager: SwarmAverager,
        gradients: GradientVector,
        apply: Callable[[], None],
        should_stop: Callable[[], bool],
    ):
        self._version, self._tracker, self._averager = version, tracker, averager
        self._gradients, self._apply, self._should_stop = gradients, apply, should_stop
        self._donor: PeerID | None = None

    def take_over(self, donor: PeerID | None, timeout_seconds: float) -> bool:
        """The donor's state, or that of whose counts more; whether this peer holds other weights now.

        :raises InputError: somebody is there, nobody hands over the state in time, and this peer has never had it
        """
        if donor is not None:
            return self.reload(donor)
        followed = not self._version.untouched and self._follow_somebody()
        if followed and self._tracker.swarm_step <= self._version.step:
            return True
        if not self.catch_up(timeout_seconds):
            return followed
        self.follow(self._donor)
        return True

    def _follow_somebody(self) -> bool:
        """Whether this peer was only an update or two behind, and has made these."""
        donors = self._tracker.donors(min_step=self._version.step)  # further than their records say, maybe
        donors.sort(key=lambda peer: peer != self._donor)  # who may have kept more than the last average for this peer
        followed = any(self.follow(donor) for donor in donors[:MAX_ASKED])
        if followed:
            self._tracker.came_back()
        return followed

    def reload(self, donor: PeerID) -> bool:
        """Take over the state of this peer, which may have to finish its update first; whether it could be had."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            try:
                self._download(donor, str(donor))
                return True
            except RoundFailed as error:
                if self._should_stop() or time.monotonic() > deadline:
                    logger.warning(f"No state from {donor}: {error}")
                    return False
            time.sleep(POLL_SECONDS)

    def catch_up(self, timeout_seconds: float) -> bool:
        """Take over the state of a peer whose state counts more, until none is left or one has been taken over.

        Who has nothing but its own start tries those again that could not hand it over: it would train on alone.

        :returns: whether one has
        :raises InputError: somebody is there, nobody hands over the state in time, and this peer has never had it
        """
        tracker, version = self._tracker, self._version
        began, failed, donors = time.monotonic(), set(), Donors()
        reason = "nobody is there to hand it over"
        while time.monotonic() < began + timeout_seconds and not self._should_stop():
            if not tracker.superiors and not (version.untouched and failed & tracker.others.keys()):
                return False  # those who were ahead or senior are gone
            needed = version.step + (tracker.swarm_step > version.step)  # the same step again would be no way out
            for peer_id, min_rate in donors.in_order(tracker.donors(min_step=needed)):
                name = tracker.name_of(peer_id)
                try:
                    before, claimed = version.lineage, tracker.others.get(peer_id)
                    self._download(peer_id, name, claimed.step if claimed else 0, min_rate)
                    self._donor = peer_id
                    tracker.has_handed_over(peer_id)
                    if version.lineage != before:
                        tracker.came_back()
                    return True
                except RoundFailed as error:
                    reason = str(error)
                    if isinstance(error, TooSlow) and min_rate > SLOWEST_BYTES_PER_SECOND:
                        logger.info(f"{name} hands over the state slowly ({error}): another one may be faster")
                        donors.was_slow(peer_id, error.bytes_per_second)
                        continue
                    logger.warning(f"No state from {name}: {error}")
                    tracker.cannot_hand_over(peer_id)
                    failed.add(peer_id)
            tracker.wait_refreshed(1.0)
            if time.monotonic() - began > SUPERIOR_SECONDS:
                # Those who claim to be ahead but have been joining themselves all the time have nothing to hand over.
                for peer_id in set(tracker.superiors) - set(tracker.donors(min_step=version.step)):
                    tracker.cannot_hand_over(peer_id)
        if self._should_stop():
            return False
        said = f"The swarm's state could not be downloaded in {timeout_seconds:.0f} s ({reason})"
        if version.untouched:
            raise InputError(f"{said}: check that the peers of --initial-peers can be reached and start again.")
        logger.warning(f"{said}: this peer trains on without those who are ahead, and tries again later")
        for peer_id in set(tracker.superiors) & tracker.others.keys():
            if tracker.others[peer_id].step > version.step:
                tracker.cannot_hand_over(peer_id)
        return False

    def find_healer(self) -> PeerID | None:
        """Who can replace weights out of which nothing useful comes, if anybody can.

        :raises InputError: they are not finite, and nobody is there
        """
        donors = self._tracker.donors(min_step=self._version.step)
        if not self._tracker.others and not all(torch.isfinite(weight).all() for weight in self._gradients.weights):
            raise InputError(
                "The weights are not finite any more, and nobody is there who could replace them: start again, which "
                "goes on from the newest checkpoint that is sound; if it comes to this again, lower --learning-rate."
            )
        return random.choice(donors) if donors else None  # the first one may be as ill as this peer

    def refused_by(self, leader: PeerID) -> None:
        """It says that it averages another model; who has taken part in the swarm knows that it does not matter.

        :raises InputError: this peer has not
        """
        name = self._tracker.name_of(leader)
        if self._version.untouched and self._version.step == 0:
            raise InputError(
                f"{name} averages another model than this peer does: start it with the recipe of the swarm (give "
                "--initial-peers and nothing else)."
            )
        logger.warning(f"Ignoring {name}, who wants to lead and says that it averages another model")
        self._tracker.distrusted.add(leader)

    def follow(self, donor: PeerID) -> int:
        """Make the updates that the donor has made since it had this peer's weights; returns how many."""
        made = 0
        while made < MAX_UPDATES:
            try:
                lineage, average = self._fetch_average(donor)
            except RoundFailed as error:  # it has not made the next one yet, or is gone
                logger.debug(f"no further average: {error}")
                break
            with self._version.lock:
                self._gradients.follow(average)
                self._apply()
                self._gradients.release()
                self._version.advance(lineage)
            made += 1
        if made:
            name, updates = self._tracker.name_of(donor), f"{made} update{'s' * (made != 1)}"
            logger.warning(f"Made up for {updates} with averages from {name}, to step {self._version.step}")
        return made

    def _download(
        self,
        peer_id: PeerID,
        name: str,
        claimed_step: int = 0,
        min_bytes_per_second: float = SLOWEST_BYTES_PER_SECOND,
    ) -> None:
        version, began = self._version, time.monotonic()
        most = version.state.max_bytes
        description, layout, content = self._fetch(peer_id, most, min_bytes_per_second=min_bytes_per_second)
        tensors = unpack(layout, content)
        with version.lock:
            step = description.get("step") if isinstance(description, dict) else None
            wanted = max(version.step, claimed_step)
            if type(step) is int and step < wanted:
                raise RoundFailed(f"it holds step {step} only, and not {wanted}")
            if type(step) is int and step > wanted + MAX_UPDATES:
                raise RoundFailed(f"it holds step {step}, and cannot have made so many updates since {wanted}")
            version.load(description, tensors)
            self._gradients.reset()  # with local steps it is what the next one downloads
        seconds = time.monotonic() - began
        logger.warning(f"Took over step {version.step} from {name}: {len(content) / 1e6:.1f} MB in {seconds:.1f} s")

    def _fetch_average(self, donor: PeerID) -> tuple[bytes, torch.Tensor]:
        size = self._averager.vector.shape
        most = size.numel() * torch.float32.itemsize + MAX_DESCRIPTION_BYTES
        wishes = {"average_of": self._version.step, "min_bytes_per_second": SLOW_BYTES_PER_SECOND}
        description, layout, content = self._fetch(donor, most, **wishes)
        try:
            step, before, lineage = description
            (average,) = unpack(layout, content)
        except (TypeError, ValueError) as error:
            raise RoundFailed(f"the average's description is malformed: {error!r}") from error
        if (step, before) != (self._version.step, self._version.lineage):
            raise RoundFailed("the average belongs to other weights")
        if type(lineage) is not bytes or len(lineage) != LINEAGE_BYTES:
            raise RoundFailed("the average's description is out of bounds")
        if average.shape != size or not average.is_floating_point() or not torch.isfinite(average).all():
            raise RoundFailed("it is no average of this model")
        return lineage, average

    def _fetch(self, peer_id: PeerID, max_bytes: int, **wishes):
        download = self._averager.download_state(peer_id, max_bytes, **wishes)
        looks, silent_seconds = self._averager.looks, 0.0
        while not download.done():
            if self._should_stop():
                raise RoundFailed("this peer is leaving")
            self._averager.check_alive()
            wait_a_little(download)
            silent_seconds = silent_seconds + POLL_SECONDS if looks == (looks := self._averager.looks) else 0.0
            if silent_seconds > HANGS_SECONDS:
                self._averager.kill()  # it is stopped: who notices that it has died starts this peer again
        return download.result()
