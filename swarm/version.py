"""Which version of the swarm's weights a peer holds, how it hands them over, and how it takes over a later one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from recipe.errors import InputError
from swarm.averager import SwarmAverager
from swarm.progress import ProgressTracker
from swarm.rounds import LINEAGE_BYTES, Group, RoundFailed, Ticket
from swarm.sketch import TOLERANCE, Sketch, nearest_to_most, relative_distance
from swarm.state import SharedState
from swarm.transfer import unpack

logger = get_logger(__name__)

POLL_SECONDS = 0.2
SKETCH_EVERY = 8
"""Updates between two comparisons of the weights, the same on all peers."""
SUPERIOR_SECONDS = 20.0
SETTLE_SECONDS = 5.0  # less than the silence after which a download is given up


def wait_a_little(future: Future) -> None:
    """Wait until the future is done, or for ``POLL_SECONDS``."""
    try:
        future.exception(timeout=POLL_SECONDS)
    except TimeoutError:
        pass


class Version:
    """The shared state with its step and its lineage, the name of the round that it came out of.

    :param state: parameters, buffers and optimizer statistics
    :param step: global updates that they have seen
    :param weights: those that all peers have in common
    :param should_stop: asked while waiting; a true answer ends the wait
    """

    def __init__(self, state: SharedState, step: int, weights: Sequence[torch.Tensor], should_stop: Callable[[], bool]):
        self.state, self.step, self._should_stop = state, step, should_stop
        self._sketch = Sketch(weights)
        self.lineage = os.urandom(LINEAGE_BYTES)
        self._untouched = True
        self.lock = threading.Lock()
        self.settled = threading.Event()
        """Not while the next update is on its way: who downloads then could not take part in it, nor have it."""
        self.settled.set()

    def export(self):
        """What another peer downloads; waits while an update is being made."""
        self.settled.wait(SETTLE_SECONDS)
        with self.lock:
            return self.state.export(self.step, self.lineage)

    def ticket(self, samples: int, loss: float, client_mode: bool) -> Ticket:
        """For a round that begins on these weights."""
        sketch = self._sketch.take() if self.step % SKETCH_EVERY == 0 else ()
        return Ticket(self.step, samples, client_mode, loss, self.lineage, sketch)

    @staticmethod
    def strayed_from(own: Ticket, group: Group) -> PeerID | None:
        """Whose state to take over, because this peer's weights are not those of most of its group.

        They came out of the same updates: other hardware rounds them otherwise, faulty memory changes them.
        """
        sketches = [ticket.sketch for ticket in group.tickets]
        if all(relative_distance(own.sketch, sketch) <= TOLERANCE for sketch in sketches):
            return None
        donors = [index for index, ticket in enumerate(group.tickets) if not ticket.client_mode]
        donor = nearest_to_most(sketches, donors)
        distance = relative_distance(own.sketch, sketches[donor])
        if distance <= TOLERANCE:
            return None
        logger.warning(f"The weights of step {own.step} are {distance:.1%} off the swarm's, which are taken over")
        return group.peer_ids[donor]

    def advance(self, lineage: bytes) -> None:
        """An update has been made; ``lineage`` names the round that it came out of."""
        self.step, self.lineage, self._untouched = self.step + 1, lineage, False

    def reload(self, donor: PeerID, averager: SwarmAverager) -> None:
        """Take over the state of this peer, which may have to finish its update first; a later round tries again."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            try:
                return self._download(donor, str(donor), averager)
            except RoundFailed as error:
                if self._should_stop() or time.monotonic() > deadline:
                    return logger.warning(f"No state from {donor}: {error}")
            time.sleep(POLL_SECONDS)

    def catch_up(self, tracker: ProgressTracker, averager: SwarmAverager, timeout_seconds: float) -> bool:
        """Take over the state of a peer whose state counts more, until none is left or one has been taken over.

        Who has nothing but its own start tries those again that could not hand it over: it would train on alone.

        :returns: whether one has
        :raises InputError: somebody is there but nobody hands over the state in time
        """
        began, failed = time.monotonic(), set()
        reason = "no full peer is there to hand it over"
        while time.monotonic() < began + timeout_seconds and not self._should_stop():
            if not tracker.superiors and not (self._untouched and failed & tracker.others.keys()):
                return False  # those who were ahead or senior are gone
            for peer_id in tracker.donors(min_step=self.step):
                name = tracker.name_of(peer_id)
                try:
                    before, claimed = self.lineage, tracker.others.get(peer_id)
                    self._download(peer_id, name, averager, claimed.step if claimed else 0)
                    tracker.trust(peer_id)
                    if self.lineage != before:
                        tracker.came_back()
                    return True
                except RoundFailed as error:
                    reason = str(error)
                    logger.warning(f"No state from {name}: {error}")
                    tracker.distrust(peer_id)
                    failed.add(peer_id)
            tracker.wait_refreshed(1.0)
            if time.monotonic() - began > SUPERIOR_SECONDS:
                # Those who claim to be ahead but have been joining themselves all the time have nothing to hand over.
                for peer_id in set(tracker.superiors) - set(tracker.donors(min_step=self.step)):
                    tracker.distrust(peer_id)
        if not self._should_stop():
            raise InputError(
                f"The swarm's state could not be downloaded in {timeout_seconds:.0f} s ({reason}): check that the "
                "peers of --initial-peers can be reached and start again."
            )
        return False

    def _download(self, peer_id: PeerID, name: str, averager: SwarmAverager, claimed_step: int = 0) -> None:
        began = time.monotonic()
        download = averager.download_state(peer_id, self.state.max_bytes)
        while not download.done():
            if self._should_stop():
                raise RoundFailed("this peer is leaving")
            averager.check_alive()
            wait_a_little(download)
        description, layout, content = download.result()
        tensors = unpack(layout, content)
        with self.lock:
            step = description.get("step", -1) if isinstance(description, dict) else -1
            if type(step) is int and step < (wanted := max(self.step, claimed_step)):
                raise RoundFailed(f"it holds step {step} only, and not {wanted}")
            self.step, self.lineage = self.state.load(description, tensors)
            self._untouched = False
        seconds = time.monotonic() - began
        logger.warning(f"Took over step {self.step} from {name}: {len(content) / 1e6:.1f} MB in {seconds:.1f} s")
