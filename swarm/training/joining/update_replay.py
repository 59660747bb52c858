"""How a peer makes updates that it missed: the same weights and the same average give the same bits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count

import torch
from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from swarm.membership.claim_bounds import MAX_APART
from swarm.protocol.messages import RoundFailed
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.runtime.async_utils import POLL_SECONDS
from swarm.state_sync.average_log import MAX_AVERAGES, MAX_BATCH_BYTES, averages_in, whole
from swarm.state_sync.download import Downloaded, DownloadRequest
from swarm.state_sync.download_messages import MAX_DESCRIPTION_BYTES
from swarm.training.joining.attempt import Attempt, Steps
from swarm.training.joining.corroboration import Corroboration
from swarm.training.joining.fetch import MAX_DONORS, Fetcher
from swarm.training.joining.listener import Listener
from swarm.training.joining.probation import Probation
from swarm.training.own_peer import OwnPeer

logger = get_logger(__name__)

REPLAY_SECONDS = 1.0
"""Seconds for which this peer replays updates without doing anything else: averages may be many and small."""
MAX_UPDATES = 1000
"""Most updates that this peer replays in a row. A donor with more has made them up."""


class UselessAverages(RoundFailed):
    """A donor has sent averages that this peer cannot use; another donor may have others.

    Args:
        donor: of the averages
        lineage: name of the weights that they follow on; None if they are malformed
    """

    def __init__(self, donor: PeerID, lineage: bytes | None = None):
        super().__init__("these averages are of no use here")
        self.donor, self.lineage = donor, lineage


class UpdateReplay:
    """The replay of updates that this peer has missed, with averages that other peers have kept.

    Args:
        own: this peer
        apply: makes an update with an average
        listener: knows the round from which this peer gets the average anyway
        probation: notes which donors' averages this peer has taken
        fetcher: downloads averages
    """

    def __init__(
        self,
        own: OwnPeer,
        apply: Callable[[], None],
        listener: Listener,
        probation: Probation,
        fetcher: Fetcher,
    ):
        self._version, self._tracker, self._averager = own.version, own.tracker, own.averager
        self._gradients, self._apply = own.gradients, apply
        self._listener, self._probation, self._fetcher = listener, probation, fetcher
        self._fast_donor: PeerID | None = None
        """The donor of the last state or average."""

    def prefer(self, donor: PeerID) -> None:
        """Ask this donor first: its state has come here, so its line is known, and it may have kept more averages."""
        self._fast_donor = donor

    def replay_from_anyone(self, attempt: Attempt, waits: bool = False) -> Steps[bool]:
        """Replay missed updates whose averages a donor has kept; return whether there were any.

        Args:
            waits: wait until the donor of the last state or average has made the next update
        """
        donors = self._who_may_have_averages()
        may_wait = waits and donors and donors[0] == self._fast_donor
        if may_wait and (yield from self.replay_updates(attempt, donors[:1], waits)):
            self._tracker.came_back()
            return True
        if (yield from self.replay_updates(attempt)):  # not of a donor that has just sent no averages
            self._tracker.came_back()
            return True
        return False

    def replay_updates(
        self, attempt: Attempt, donors: Sequence[PeerID] | None = None, waits: bool = False
    ) -> Steps[int]:
        """Replay the updates that other peers made since they had this peer's weights; return how many.

        Args:
            donors: all of them hold the same averages, so the one with the fastest line may hand them over; None: all
                donors that may have them
            waits: wait for the first average, if a donor is making that update now
        """
        donors = self._who_may_have_averages() if donors is None else donors
        made, donor, other_weights = 0, None, set()
        while donors and self._may_replay(donor, made):
            try:
                donor, lineages, averages = yield from self.fetch_averages(donors, attempt, waits and not made)
                lineages = yield from self._confirmed_by_others(donor, lineages, attempt.corroboration)
            except UselessAverages as error:
                if error.lineage in other_weights:  # two donors agree, so this peer needs the state
                    break
                if error.lineage is not None:
                    other_weights.add(error.lineage)
                donors = [peer for peer in donors if peer != error.donor]
                continue
            except RoundFailed as error:  # no donor has made the next update yet, or all are gone
                logger.debug(f"no further average: {error}")
                break
            made += yield from self._make_updates(donor, lineages, averages, made)
            self._fast_donor = donor
            donors = [donor, *(peer for peer in donors if peer != donor)]
        if made:
            with self._version.lock:
                self._probation.note_arrived()
            name, updates = self._tracker.name_of(donor), f"{made} update{'s' * (made != 1)}"
            logger.warning(f"Caught up {updates} with averages from {name}, now at step {self._version.step}")
        return made

    def _who_may_have_averages(self) -> list[PeerID]:
        """The donors at this peer's step or later, which may be further than their records say.

        The first is the donor of the last state or average. Its line is known to be fast, and it may have kept more
        than its last average for this peer.
        """
        donors = self._tracker.swarm.donors(min_step=self._version.step)
        donors.sort(key=lambda peer: peer != self._fast_donor)
        return donors[:MAX_DONORS]

    def _make_updates(
        self, donor: PeerID, lineages: Sequence[bytes], averages: Sequence[tuple[torch.Tensor, ...]], made: int
    ) -> Steps[int]:
        """Replay these updates, as long as the next one can be one of the swarm's; return how many.

        Args:
            averages: one for each lineage; further ones are left out
            made: number of updates that this peer has replayed in a row before
        """
        number, began = 0, time.monotonic()
        for lineage, average in zip(lineages, averages[: len(lineages)], strict=True):
            with self._version.lock:
                size = self._gradients.fragments.size_at(self._version.step)
                self._gradients.follow(whole(average, size))
                self._apply()
                self._gradients.release()
                self._version.advance(lineage)
                self._probation.note_followed(donor)
            self._averager.followed(lineage)
            number += 1
            if not self._may_replay(donor, made + number):
                break
            if time.monotonic() > began + REPLAY_SECONDS:
                yield None
                began = time.monotonic()
        return number

    def _confirmed_by_others(
        self, donor: PeerID, lineages: Sequence[bytes], corroboration: Corroboration
    ) -> Steps[Sequence[bytes]]:
        """Wait until another peer confirms updates; return the lineages of those confirmed, or all if none has to be.

        Raises:
            RoundFailed: none is confirmed, or this peer has made one itself meanwhile, or others are further by now
        """
        version, deadline = self._version, time.monotonic() + self._averager.timeouts.retry_seconds
        before = version.step, version.lineage
        while not (number := corroboration.num_confirmed(donor, version.step, lineages)):
            if corroboration.is_denied or time.monotonic() > deadline:  # others may end that round later
                raise RoundFailed("no other peer has made this update")
            if corroboration.is_witness_past(version.step + len(lineages)):
                raise RoundFailed("the witnesses are further, and may name a later update")
            yield from self._fetcher.until_refreshed(POLL_SECONDS)
        if (version.step, version.lineage) != before:
            raise RoundFailed("this peer has made an update meanwhile")
        return lineages[:number]

    def _may_replay(self, donor: PeerID | None, made: int) -> bool:
        """Whether the next update can be one of the swarm's, and this peer does not listen to its round."""
        if made >= MAX_UPDATES or self._listener.is_at(self._version.step):
            return False
        next_step = self._version.step + 1 - MAX_APART  # records may be that old
        return donor is None or next_step <= 0 or self._tracker.swarm.may_hold(donor, next_step)

    def fetch_averages(
        self, donors: Sequence[PeerID], attempt: Attempt, waits: bool
    ) -> Steps[tuple[PeerID, list[bytes], list[tuple[torch.Tensor, ...]]]]:
        """Fetch the averages of this peer's step and of some steps after it, from one of these donors.

        Returns:
            the donor, the lineages after each update, and the averages in the form in which they travel

        Raises:
            UselessAverages: they do not follow on this peer's weights, or are none of this model
            RoundFailed: no donor has them, or this peer has made an update meanwhile
        """
        version = self._version
        own = version.step, version.lineage
        vector_bytes = self._averager.vector.nbytes
        max_bytes = max(vector_bytes, MAX_BATCH_BYTES) + MAX_DESCRIPTION_BYTES
        request = DownloadRequest(max_bytes, average_of=version.step, waits=waits)
        fetched = yield from self._fetcher.fetch(donors, attempt, request)
        if (version.step, version.lineage) != own:
            raise RoundFailed("this peer has made an update meanwhile")
        try:
            before, lineages, averages = self._read(fetched)
        except (TypeError, ValueError, RoundFailed) as error:
            name = self._tracker.name_of(fetched.donor)
            logger.warning(f"{name} sent averages that do not fit this model, and is not asked for a while: {error}")
            self._tracker.trust.handed_over_false(fetched.donor)
            raise UselessAverages(fetched.donor) from error
        if before != version.lineage:
            raise UselessAverages(fetched.donor, before)
        return fetched.donor, lineages, averages

    def _read(self, fetched: Downloaded) -> tuple[bytes, list[bytes], list[tuple[torch.Tensor, ...]]]:
        """Read averages from this peer's step on; the donor is not trusted.

        Returns:
            the lineage before the first update, the lineages after each of them, and the averages

        Raises:
            TypeError, ValueError, RoundFailed: they are no averages of this model from this step on
        """
        step, before, lineages = fetched.description
        sizes = map(self._gradients.fragments.size_at, count(self._version.step))
        lineages, averages = list(lineages), list(averages_in(fetched.tensors(), sizes))
        are_named = all(type(name) is bytes and len(name) == LINEAGE_BYTES for name in (before, *lineages))
        if step != self._version.step or not are_named:
            raise ValueError("the description is malformed")
        if not 1 <= len(averages) <= MAX_AVERAGES or len(lineages) != len(averages):
            raise ValueError("the number of averages is wrong")
        return before, lineages, averages
