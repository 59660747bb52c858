"""The witnesses that must confirm a leader's claim that the swarm has gone on without this peer.

A leader says so to peers that come to a round too late. A lying leader could say it to all peers and go on by itself,
with a history and averages of its own to show. Then all would hold its weights, and no peer would notice. But an
honest leader waits for the members that are expected. So a peer that comes in time wants the claim corroborated, if it
was in the last round with other peers: these are its witnesses. It waits until a witness is further, or in the round
that it is said to have missed. Then it uses only what a peer other than its donor holds as well. If all witnesses say
that they are where this peer is, the leader is left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from swarm.membership.progress_record import TOLERATED_SECONDS, PeerProgress
from swarm.membership.progress_tracker import ProgressTracker

SILENT_SECONDS = 5.0
"""Seconds without a record after which a peer counts as silent: it may have died after an update."""
IN_TIME_SHARE = 0.5
"""Largest share of a leader's patience for which a peer may be busy without looking for a round, and still count as in
time."""


class Attendance:
    """The attendance of this peer at the rounds of its present step: whether it came in time, and which have failed.

    Args:
        patience_seconds: seconds for which a leader waits for members that are expected
    """

    def __init__(self, patience_seconds: float):
        self._most_seconds = IN_TIME_SHARE * patience_seconds
        self._longest_seconds, self._since = math.inf, time.monotonic()
        self._came_in_time = False
        self._failed_groups: set[bytes] = set()
        """Groups that this peer was in for the present update, and from which it got no average."""

    def begin_step(self) -> None:
        """Begin another step: this peer computes for it from now on."""
        self._longest_seconds = 0.0
        self.resume()

    def resume(self) -> None:
        """Count the time from now on: before, this peer was in a round or waited itself, so no peer waited for it."""
        self._since = time.monotonic()

    def look(self) -> None:
        """Note that a micro-batch has been computed: only now does this peer look for a round again."""
        now = time.monotonic()
        self._longest_seconds, self._since = max(self._longest_seconds, now - self._since), now

    @property
    def is_in_time(self) -> bool:
        """Whether a leader that began a round in this step did not have to wait long for this peer."""
        return self._longest_seconds < self._most_seconds

    def go_to_round(self) -> None:
        """Note that the round of this step begins for this peer."""
        self._came_in_time = self.is_in_time

    def listen(self) -> None:
        """Note that the round of this step began before this peer had the weights."""
        self._came_in_time = False

    def note_failed(self, group_id: bytes) -> None:
        """Note that the round has ended without an average; the id is empty if there was no group."""
        if group_id:
            self._failed_groups.add(group_id)

    def note_update(self) -> None:
        """Note that the weights have changed: earlier rounds do not count any more."""
        self._failed_groups.clear()

    def corroboration_for(self, leader: PeerID | None, tracker: ProgressTracker) -> Corroboration:
        """Return the corroboration that this leader's claim needs, with the witnesses of the last round."""
        witnesses = tracker.swarm.last_group if self._came_in_time else ()
        return Corroboration(tracker, leader, witnesses, self._failed_groups)


class Corroboration:
    """The witnesses that must confirm a leader's claim that the swarm has gone on, in one attempt to catch up.

    Args:
        tracker: knows the other peers' records
        leader: the peer that makes the claim
        witnesses: the peers that were in the last round with this one; if there are none, the leader is believed
        failed_groups: groups for the update in question that gave no average to this peer, but maybe to other members
    """

    def __init__(
        self,
        tracker: ProgressTracker,
        leader: PeerID | None = None,
        witnesses: Iterable[PeerID] = (),
        failed_groups: Iterable[bytes] = (),
    ):
        self._tracker, self.leader, self._since = tracker, leader, get_dht_time()
        self._witnesses, self._failed_groups = frozenset(witnesses) - {leader}, frozenset(failed_groups)
        self._denying: set[PeerID] = set()

    @property
    def _present(self) -> dict[PeerID, PeerProgress]:
        """Records of the witnesses that are heard and not blamed, even if they could not hand over their state.

        A helper counts only witnesses that train, since a swarm of helpers has no samples to go on with.
        """
        if not self._witnesses:
            return {}
        tracker, oldest = self._tracker, get_dht_time() - SILENT_SECONDS
        present = {}
        for peer, record in tracker.others.items():
            is_heard = record.time > oldest and peer not in tracker.trust.blamed
            if peer in self._witnesses and is_heard and not (tracker.own.helps and record.helps):
                present[peer] = record
        return present

    @property
    def is_needed(self) -> bool:
        """Whether a witness has to confirm the claim, because at least one is there."""
        return bool(self._present)

    def _note_denials(self) -> None:
        """Note the witnesses that said, since the claim, that they are where this peer is: no round was missed then."""
        own = self._tracker.own
        for peer, record in self._present.items():
            is_new = record.time > self._since + TOLERATED_SECONDS
            if is_new and (record.step, record.lineage) == (own.step, own.lineage) and not record.is_in_round:
                self._denying.add(peer)

    @property
    def is_confirmed(self) -> bool:
        """Whether the claim is confirmed: a witness is further than this peer, or in a round that this peer missed.

        The leader's weights also confirm it, if they came out of a round that gave an average, but not to this peer.
        """
        self._note_denials()
        step, leads = self._tracker.own.step, self._tracker.others.get(self.leader)
        return any(
            record.step > step or (record.step == step and record.is_in_round and peer not in self._denying)
            for peer, record in self._present.items()
        ) or (leads is not None and self._is_of_failed_group(leads.step, leads.lineage))

    def _is_of_failed_group(self, step: int, lineage: bytes) -> bool:
        """Whether these weights came out of a round that this peer was in, but that gave no average to it."""
        return step == self._tracker.own.step + 1 and lineage in self._failed_groups

    @property
    def is_denied(self) -> bool:
        """Whether all witnesses have said, since the claim, that they are where this peer is."""
        present = self._present
        return bool(present) and not self.is_confirmed and self._denying >= present.keys()

    def confirms(self, donor: PeerID, step: int, lineage: bytes) -> bool:
        """Whether a peer other than the donor holds or held these weights; true if no confirmation is needed."""
        if not self.is_needed or self._is_of_failed_group(step, lineage):
            return True
        return bool(self._tracker.holders(step, lineage, [donor]))

    def is_witness_past(self, step: int) -> bool:
        """Whether a witness is further than this step."""
        return any(record.step > step for record in self._present.values())

    def may_confirm_state_of(self, donor: PeerID) -> bool:
        """Whether a peer other than this donor may confirm its state, as far as the donor's record says."""
        record, step = self._tracker.others.get(donor), self._tracker.own.step
        return record is not None and (record.step > step or self.confirms(donor, record.step, record.lineage))

    def num_confirmed(self, donor: PeerID, step: int, lineages: Sequence[bytes]) -> int:
        """The number of the first of these updates that a peer other than the donor has made as well.

        Args:
            step: the step before the first of these updates
            lineages: the lineages after each of them
        """
        made = (number for number in range(len(lineages), 0, -1))
        return next((number for number in made if self.confirms(donor, step + number, lineages[number - 1])), 0)
