"""Who else must confirm that the swarm has gone on without this peer, when its leader claims so.

A leader says so to those who come to a round too late. It could say it to all, go on by itself, and have a history and
averages of its own to show: all would hold its weights, and nobody would notice. But an honest leader waits for those
who are expected. So a peer that comes in time, from a round that it was in with others, wants the claim corroborated:
these others are its witnesses. It waits until one of them is further, or in the round that it is to have missed, and
then uses what somebody else than its donor holds as well. If all witnesses say that they are where this peer is, the
leader is left out.
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
"""Seconds without a record, after which a peer counts as one that says nothing: it may have died after an update."""
IN_TIME_SHARE = 0.5
"""Share of a leader's patience for which a peer that comes in time computes, or does something else, without a
pause."""


class Attendance:
    """The attendance of this peer at the rounds of its present step: whether it came in time, and which have failed.

    Args:
        patience_seconds: seconds for which a leader waits for those who are expected
    """

    def __init__(self, patience_seconds: float):
        self._most_seconds = IN_TIME_SHARE * patience_seconds
        self._longest_seconds, self._since = math.inf, time.monotonic()
        self._came_in_time = False
        self._failed_groups: set[bytes] = set()
        """The groups in which this peer has been for the present update, without an average."""

    def begin_step(self) -> None:
        """Begin another step: this peer computes for it from now on."""
        self._longest_seconds = 0.0
        self.resume()

    def resume(self) -> None:
        """Count the time from now on: before, this peer was in a round or waited itself, and nobody waited for it."""
        self._since = time.monotonic()

    def look(self) -> None:
        """Note that a micro-batch has been computed: only now this peer looks for a round again."""
        now = time.monotonic()
        self._longest_seconds, self._since = max(self._longest_seconds, now - self._since), now

    @property
    def is_in_time(self) -> bool:
        """Whether a leader that began a round in this step has not had to wait for this peer for long."""
        return self._longest_seconds < self._most_seconds

    def go_to_round(self) -> None:
        """Note that the round of this step begins for this peer."""
        self._came_in_time = self.is_in_time

    def listen(self) -> None:
        """Note that the round of this step has begun before this peer had its weights."""
        self._came_in_time = False

    def note_failed(self, group_id: bytes) -> None:
        """Note that the round has ended without an average; the id is empty if there was no group."""
        if group_id:
            self._failed_groups.add(group_id)

    def note_update(self) -> None:
        """Note that the weights have changed: rounds before that count no more."""
        self._failed_groups.clear()

    def corroboration_for(self, leader: PeerID | None, tracker: ProgressTracker) -> Corroboration:
        """Say which witnesses must confirm this leader's claim that the swarm has gone on."""
        witnesses = tracker.swarm.last_group if self._came_in_time else ()
        return Corroboration(tracker, leader, witnesses, self._failed_groups)


class Corroboration:
    """The witnesses that must confirm a leader's claim that the swarm has gone on, in one attempt to catch up.

    Args:
        tracker: knows what the others say
        leader: the peer that makes the claim
        witnesses: the peers that were in the last round with this one; none: the leader is believed
        failed_groups: the groups in which this peer has been for the update in question, without an average; others may
            have one
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
        """The witnesses that say something, and have spoilt nothing; also who could not hand over its state.

        For a helper only those who train: two helpers have no samples to go on with.
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
        """Whether somebody has to confirm the claim: a witness is there."""
        return bool(self._present)

    def _note_denials(self) -> None:
        """Note who has said since that it is where this peer is: whatever it does next, it has missed no round."""
        own = self._tracker.own
        for peer, record in self._present.items():
            is_new = record.time > self._since + TOLERATED_SECONDS
            if is_new and (record.step, record.lineage) == (own.step, own.lineage) and not record.is_in_round:
                self._denying.add(peer)

    @property
    def is_confirmed(self) -> bool:
        """Whether a witness is further than this peer, or in a round that this peer has missed."""
        self._note_denials()
        step, leads = self._tracker.own.step, self._tracker.others.get(self.leader)
        return any(
            record.step > step or (record.step == step and record.is_in_round and peer not in self._denying)
            for peer, record in self._present.items()
        ) or (leads is not None and self._is_of_failed_group(leads.step, leads.lineage))

    def _is_of_failed_group(self, step: int, lineage: bytes) -> bool:
        """Whether these weights came out of a round in which this peer has been, and others as well."""
        return step == self._tracker.own.step + 1 and lineage in self._failed_groups

    @property
    def is_denied(self) -> bool:
        """Whether all witnesses have said since the claim that they are where this peer is."""
        present = self._present
        return bool(present) and not self.is_confirmed and self._denying >= present.keys()

    def confirms(self, donor: PeerID, step: int, lineage: bytes) -> bool:
        """Whether somebody else than the donor holds these weights, or has held them; true where nobody has to."""
        if not self.is_needed or self._is_of_failed_group(step, lineage):
            return True
        return bool(self._tracker.holders(step, lineage, [donor]))

    def is_witness_past(self, step: int) -> bool:
        """Whether a witness is further than this step."""
        return any(record.step > step for record in self._present.values())

    def may_confirm_state_of(self, donor: PeerID) -> bool:
        """Whether somebody else may hold the state of this donor as well, as far as its record says."""
        record, step = self._tracker.others.get(donor), self._tracker.own.step
        return record is not None and (record.step > step or self.confirms(donor, record.step, record.lineage))

    def num_confirmed(self, donor: PeerID, step: int, lineages: Sequence[bytes]) -> int:
        """How many of these updates, the first ones, another one than the donor has made as well.

        Args:
            step: the step from which they go on
            lineages: the lineages that they lead to
        """
        made = (number for number in range(len(lineages), 0, -1))
        return next((number for number in made if self.confirms(donor, step + number, lineages[number - 1])), 0)
