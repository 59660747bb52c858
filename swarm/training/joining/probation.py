"""Whether a state that this peer has taken over is the swarm's, by the attestations of peers other than its donor.

A donor proves nothing, since its digests are of its own bytes. So other peers say in their progress records what they
hold (`Attestation`). A peer that has taken over a state is on probation until one of them says that it holds the same.
On probation its samples do not count, and it does not attest its state itself. Probation ends after a while without a
confirmation, or a swarm whose hardware differs would shut all joiners out. The group still compares weights at every
eighth step. A state that most peers refute keeps a peer on probation for as long as these peers are there, since its
samples would be of false weights; but not a new peer of an open run, where most peers may be one liar.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

import torch
from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from swarm.membership.progress_tracker import ProgressTracker
from swarm.protocol.attestation import Attestation
from swarm.protocol.messages import RoundFailed
from swarm.state_sync.state_version import SKETCH_EVERY, StateVersion
from swarm.state_sync.weight_sketch import SKETCH_TOLERANCE, relative_distance
from swarm.training.joining.attester import Attester

logger = get_logger(__name__)

MAX_UPDATES = 16
"""Most updates to which this peer gives nothing because no peer has confirmed its state."""
MAX_SECONDS = 30.0
"""Most seconds for which this peer gives nothing for that reason, if updates are slow."""
MAX_REFUSED = 2
"""Most states that strangers can refute to a joiner of an open run. Names and claims cost nothing there."""
MAX_OWN = 16
"""Most steps of which this peer remembers what it held."""


class StateVerdict(Enum):
    """What other peers' attestations say of a state."""

    CONFIRMED = "another peer holds it, too"
    REFUTED = "other peers hold another one, and agree with each other"
    OPEN = "no attestation decides"


def is_same(one: Attestation, other: Attestation) -> bool:
    """Whether both attestations are certainly of the same bits."""
    return bool(one.digest) and one.digest == other.digest


def are_alike(one: Attestation, other: Attestation) -> bool:
    """Whether both attestations are of the same weights, up to what different hardware rounds differently."""
    if is_same(one, other):
        return True
    have_sketches = len(one.sketch) == len(other.sketch) > 0
    return have_sketches and relative_distance(one.sketch, other.sketch) <= SKETCH_TOLERANCE


def judge(
    own: Attestation, others: Iterable[Attestation], is_as_received: bool, num_attesting: int = 0
) -> StateVerdict:
    """Judge a state by other peers' attestations of the same step and lineage.

    Equal bits confirm. Weights that are nearly the same, as on other hardware, confirm only after an update. The signs
    of a sketch follow from the lineage, so a lying donor knows those of its own step, and can match the sketch there.

    Peers that agree with each other refute the state under three conditions. They are at least two. They are more than
    the donor and the peers that agree with it. They are more than half of all peers that attest anything. Otherwise two
    liars could refute every honest donor, since peers are silent about most steps where a digest takes long.

    Args:
        own: this peer's attestation of the state
        others: the other peers' attestations of it, without the donor's
        is_as_received: no update has been made since the state was handed over
        num_attesting: number of peers that attest anything, of whatever step, without the donor
    """
    alike, apart = [], []
    for other in others:
        (alike if are_alike(own, other) else apart).append(other)
    against = max((sum(are_alike(one, other) for other in apart) for one in apart), default=0)
    if against > 1 + len(alike) and 2 * against > num_attesting:
        return StateVerdict.REFUTED
    confirming = [other for other in alike if is_same(own, other) or not is_as_received]
    return StateVerdict.CONFIRMED if confirming and len(alike) > against else StateVerdict.OPEN


class Probation:
    """The probation of this peer: from when it takes something over until another peer has confirmed what it holds.

    Args:
        version: the state of this peer
        tracker: knows the other peers' attestations
        attester: attests what this peer holds after its own updates
    """

    def __init__(self, version: StateVersion, tracker: ProgressTracker, attester: Attester):
        self._version, self._tracker, self._attester = version, tracker, attester
        self.sources: frozenset[PeerID] = frozenset()
        """The peers that handed over the state, or averages since. Their own attestations confirm nothing."""
        self.refuters: frozenset[PeerID] = frozenset()
        """The peers that have refuted what this peer holds."""
        self._own: dict[tuple[int, bytes], tuple[Attestation, bool]] = {}
        self._has_state, self._updates, self.since = False, 0, math.inf
        self._refused, self._last_step = 0, 0
        attester.tell = self._say

    @property
    def is_on(self) -> bool:
        """Whether this peer has taken over something that is not confirmed yet."""
        return bool(self.sources)

    @property
    def gives_nothing(self) -> bool:
        """Whether this peer's samples do not count. After missed averages only, they count until these are refuted."""
        return self._has_state or bool(self.refuters)

    def _attesting(self, sources: Iterable[PeerID]) -> set[PeerID]:
        """The peers, other than these sources, that attest anything. A peer on probation does not."""
        others = self._tracker.others
        return {peer for peer in others.keys() - set(sources) if others[peer].attested is not None}

    # ---- what is taken over -----------------------------------------------------------------------------------------

    def examine(self, donor: PeerID, description: dict, tensors: Sequence[torch.Tensor]) -> Attestation | None:
        """Examine a downloaded state before this peer loads it; return its attestation.

        Returns:
            what this peer attests of the state; None if no peer but the donor attests anything

        Raises:
            RoundFailed: it is not a state of this model, or other peers refute it
        """
        if not self._attesting([donor]):
            return None
        received = self._version.attest_received(description, tensors)
        others = self._tracker.attestations(received.step, received.lineage, [donor])
        if self._judge(received, others, [donor], is_as_received=True) is StateVerdict.REFUTED:
            self._refused += 1
            names = self._names_apart(received, others)
            self._tracker.trust.handed_over_false(donor)
            raise RoundFailed(f"its state of step {received.step} differs from that of {names}")
        return received

    def begin(self, donor: PeerID, received: Attestation | None) -> None:
        """Begin probation with a state that has been taken over. The caller holds the lock."""
        self.end()
        if received is not None:
            self._tracker.report(attested=None)
            self.sources, self._has_state, self._last_step = frozenset([donor]), True, received.step
            self._own = {(received.step, received.lineage): (received, True)}

    def note_followed(self, donor: PeerID) -> None:
        """Note an update that was made with an average from this donor. The caller holds the lock."""
        step = self._last_step = self._version.step
        self.sources |= {donor}
        if step % SKETCH_EVERY == 0 or self._tracker.attestations(step, self._version.lineage, self.sources):
            self._note(self._attester.attest_now())

    def note_arrived(self) -> None:
        """Note that this peer has made all missed updates that it could. The caller holds the lock."""
        self._note(self._attester.attest_now())

    def note_update(self) -> None:
        """Note an update that was made in a round."""
        self._updates += 1

    def _say(self, own: Attestation) -> None:
        """Report what this peer holds, or, on probation, only remember it for comparison."""
        if self.is_on:
            self._note(own)
        else:
            self._tracker.report(attested=own)

    def _note(self, own: Attestation) -> None:
        if (own.step, own.lineage) not in self._own:
            self._own = dict([*self._own.items(), ((own.step, own.lineage), (own, False))][-MAX_OWN:])

    # ---- what other peers attest ------------------------------------------------------------------------------------

    def review(self) -> None:
        """Check whether other peers confirm or refute what this peer holds, or probation has lasted long enough."""
        if not self.is_on:
            return
        self.since = min(self.since, time.monotonic())
        if not self.refuters.isdisjoint(self._tracker.others):
            if self._is_late and self._tracker.knows_nobody:
                self._end_in_vain()
            return
        self.refuters = frozenset()  # all refuters have left
        for own, is_as_received in [*self._own.values()]:
            others = self._tracker.attestations(own.step, own.lineage, self.sources)
            verdict = self._judge(own, others, self.sources, is_as_received)
            is_settled = own.step >= self._last_step  # if not, fetched averages came on top: confirm those, too
            if verdict is StateVerdict.CONFIRMED and is_settled:
                self._confirm(own, others)
                return
            if verdict is StateVerdict.REFUTED:
                self._refute(own, others)
                return
        self._end_if_nobody_can_tell()

    def _judge(
        self, own: Attestation, others: Mapping[PeerID, Attestation], sources: Iterable[PeerID], is_as_received: bool
    ) -> StateVerdict:
        verdict = judge(own, others.values(), is_as_received, len(self._attesting(sources)))
        has_doubts = verdict is StateVerdict.REFUTED and self._tracker.knows_nobody and self._refused >= MAX_REFUSED
        return StateVerdict.OPEN if has_doubts else verdict

    def _confirm(self, own: Attestation, others: Mapping[PeerID, Attestation]) -> None:
        if self._has_state:
            names = self._names(peer for peer, said in others.items() if are_alike(own, said))
            logger.warning(f"The state of step {own.step} is confirmed by {names}")
        self.end()
        self._refused = 0
        self._tracker.report(attested=own)

    def note_stray(self) -> None:
        """Note that the group compared weights and that those of this peer differ; distrust the state's sources."""
        if self._has_state:
            sources = self._names(self.sources)
            logger.warning(f"The weights from {sources} differ from those of the group: this peer drops them")
            for source in self.sources:
                self._tracker.trust.handed_over_false(source)

    def _refute(self, own: Attestation, others: Mapping[PeerID, Attestation]) -> None:
        self.refuters = frozenset(peer for peer, said in others.items() if not are_alike(own, said))
        sources, names = self._names(self.sources), self._names_apart(own, others)
        logger.warning(
            f"The weights of step {own.step} from {sources} differ from those of {names}: this peer drops them"
        )
        self._version.is_refuted = self._has_state  # without a state, the weights are this peer's own: worth keeping
        self._refused += 1
        for source in self.sources:
            self._tracker.trust.handed_over_false(source)

    @property
    def _is_late(self) -> bool:
        return self._updates >= MAX_UPDATES or time.monotonic() > self.since + MAX_SECONDS

    def _end_if_nobody_can_tell(self) -> None:
        if not self._attesting(self.sources):
            self.end()
        elif self._is_late:
            self._end_in_vain()

    def _end_in_vain(self) -> None:
        if self._has_state:
            logger.warning(
                f"No peer has confirmed the state from {self._names(self.sources)}: this peer takes part all the same, "
                f"and its weights are compared with the group's every {SKETCH_EVERY} steps"
            )
        self.end()

    def end(self) -> None:
        """End probation: this peer takes part as all others do."""
        self.sources = self.refuters = frozenset()
        self._own = {}
        self._has_state, self._updates, self.since = False, 0, math.inf

    def _names_apart(self, own: Attestation, others: Mapping[PeerID, Attestation]) -> str:
        """The names of the peers that hold something else."""
        return self._names(peer for peer, said in others.items() if not are_alike(own, said))

    def _names(self, peers: Iterable[PeerID]) -> str:
        return " and ".join(sorted(map(self._tracker.name_of, peers)))
