"""What the parts of one peer's training have in common."""

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
    """This peer, as the parts of its training see it: what at least three of them need, and nothing else.

    Args:
        version: its weights, and which update they come out of
        gradients: the vector in which an average has to lie
        tracker: knows what the others say, and tells them what this peer does
        averager: runs rounds, and downloads
        control: what the organiser has ordered
        options: how patient this peer is
        overlaps: rounds run beside the training
        should_stop: asked while waiting; a true answer ends the wait
    """

    version: StateVersion
    gradients: GradientVector
    tracker: ProgressTracker
    averager: SwarmAverager
    control: RunControl
    options: CoordinatorOptions
    overlaps: bool
    should_stop: Callable[[], bool]
