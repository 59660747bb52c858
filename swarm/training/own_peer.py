"""The objects that the parts of one peer's training share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarm.averaging.averager import SwarmAverager
from swarm.membership.progress_tracker import ProgressTracker
from swarm.state_sync.state_version import StateVersion
from swarm.training.gradient_buffer import GradientVector
from swarm.training.options import CoordinatorOptions
from swarm.training.run_control import RunControl


@dataclass(frozen=True)
class OwnPeer:
    """This peer, as the parts of its training see it: the objects that at least three of them need.

    Args:
        version: the peer's weights, and the update that made them
        gradients: the vector that holds an average before an update
        tracker: reads other peers' progress records, and writes this peer's
        averager: runs rounds and downloads
        control: the organiser's orders
        options: the patience of this peer
        overlaps: rounds run beside the training
        should_stop: called while waiting; a true answer ends the wait
    """

    version: StateVersion
    gradients: GradientVector
    tracker: ProgressTracker
    averager: SwarmAverager
    control: RunControl
    options: CoordinatorOptions
    overlaps: bool
    should_stop: Callable[[], bool]
