"""The version of the swarm's weights that a peer holds: how it hands them over and compares them with other peers'."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import torch
from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from swarm.protocol.attestation import Attestation
from swarm.protocol.messages import Group, Ticket
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts
from swarm.state_sync.training_state import SharedState
from swarm.state_sync.weight_sketch import SKETCH_TOLERANCE, Sketch, nearest_to_most, relative_distance

logger = get_logger(__name__)

SKETCH_EVERY = 8
"""Updates between two comparisons of the weights, the same on all peers."""
FAR = 0.1
"""Relative distance between weights beyond which the replaced weights are saved."""


class StateVersion:
    """The shared state with its step and its lineage.

    The lineage names the history of the weights: the round that made them, or at step 0 a digest of them. Peers that
    begin with the same recipe hold the same weights, so they have the same lineage and need not download anything.

    Args:
        state: parameters, buffers and optimizer statistics
        step: global updates that they have seen
        weights: the weights that all peers have in common
    """

    def __init__(
        self,
        state: SharedState,
        step: int,
        weights: Sequence[torch.Tensor],
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
    ):
        self.state, self.step, self._timeouts = state, step, timeouts
        self._weights, self._sketch = weights, Sketch(weights, state.read)
        self.lineage = os.urandom(LINEAGE_BYTES) if step else state.digest()
        self.changes = 0
        """How often the weights have changed: by an update, or because another peer's were taken over."""
        self.untouched = True
        """Whether the weights are still those with which this peer began."""
        self.is_refuted = False
        """Whether other peers agree that the state this peer took over is not theirs. Then it need not be saved."""
        self.keep_own: Callable[[int], None] = lambda step: None
        """Called with the step before weights that this peer has trained are replaced by others far from them."""
        self.on_change: Callable[[bool], None] = lambda is_update: None
        """Called when the weights have changed: True for an update, False if another peer's were taken over."""
        self.lock = threading.Lock()
        self.settled = threading.Event()
        """Clear while the next update is on its way. A peer that downloads then could neither take part in that update
        nor have it."""
        self.settled.set()

    def export(self):
        """Copy the state for another peer. Waits for an update that is being made, at most `settle_seconds`."""
        self.settled.wait(self._timeouts.settle_seconds)
        with self.lock:
            return self.state.export(self.step, self.lineage)

    def attest(self, with_digest: bool = True) -> Attestation:
        """The attestation of this state. The caller holds the lock."""
        digest = self.state.digest_of(*self.state.held()) if with_digest else b""
        return Attestation(self.step, self.lineage, digest, self._sketch.take(self.lineage))

    def attest_received(self, description: dict, tensors: Sequence[torch.Tensor]) -> Attestation:
        """The attestation of a downloaded state, before it is taken over.

        Raises:
            RoundFailed: it is not a state of this model
        """
        self.state.check(description, tensors)
        step, lineage = description["step"], description["lineage"]
        digest = self.state.digest_of([*map(tuple, description["statistics"])], tensors)
        sketch = Sketch([tensors[place] for place in self.state.places_of(self._weights)])
        return Attestation(step, lineage, digest, sketch.take(lineage))

    def ticket(self, samples: int, loss: float, client_mode: bool) -> Ticket:
        """The ticket for a round that begins on these weights."""
        sketch = self._sketch.take(self.lineage) if self.step % SKETCH_EVERY == 0 else ()
        return Ticket(self.step, samples, client_mode, loss, self.lineage, sketch)

    @staticmethod
    def strayed_from(own: Ticket, group: Group, last_donor: PeerID | None = None) -> PeerID | None:
        """The peer whose state to take over, if this peer's weights are not those of most of its group; else None.

        Weights of the same updates can differ: other hardware rounds otherwise, faulty memory changes them, or a donor
        has lied.

        Args:
            own: this peer's ticket
            group: its group
            last_donor: donor of the state that this peer took over last; it is asked again only if there is no other
        """
        sketches = [ticket.sketch for ticket in group.tickets]
        if all(relative_distance(own.sketch, sketch) <= SKETCH_TOLERANCE for sketch in sketches):
            return None
        full = [index for index, ticket in enumerate(group.tickets) if not ticket.client_mode]
        healers = nearest_to_most(sketches, full)
        distance = relative_distance(own.sketch, sketches[healers[0]])
        if distance <= SKETCH_TOLERANCE:
            return None
        apart = f"The weights of step {own.step} differ from the swarm's by {distance:.1%}"
        logger.warning(f"{apart}: this peer takes over the swarm's")
        others = [index for index in healers if group.peer_ids[index] != last_donor]
        return group.peer_ids[(others or healers)[0]]

    def advance(self, lineage: bytes) -> None:
        """Note that an update has been made; `lineage` names the round that it came out of."""
        self.step, self.lineage, self.untouched = self.step + 1, lineage, False
        self.changes += 1
        self.on_change(True)

    def go_back(self, description: dict, tensors: Sequence[torch.Tensor], lineage: bytes) -> None:
        """Make an update that restores an earlier state of this peer. The caller holds the lock."""
        self.state.take(description, tensors)
        self.advance(lineage)

    def load(self, description: dict, tensors: Sequence[torch.Tensor]) -> None:
        """Take over a downloaded state. The caller holds the lock.

        Raises:
            RoundFailed: it is not a state of this model
        """
        self.state.check(description, tensors)
        both_trained = self.step > 0 and description["step"] > 0
        if both_trained and not self.is_refuted and self.state.distance_to(tensors) > FAR:
            self.keep_own(self.step)
        self.step, self.lineage = self.state.take(description, tensors)
        self.untouched = self.is_refuted = False
        self.changes += 1
        self.on_change(False)
