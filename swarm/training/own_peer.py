"""The objects that the parts of one peer's training share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hivemind import DHT

from swarm.averaging.averager import SwarmAverager
from swarm.averaging.rounds import AveragingOptions
from swarm.membership.progress_tracker import ProgressTracker
from swarm.protocol.auto_mode import Plan
from swarm.protocol.batch_target import BatchTarget
from swarm.runtime.line_use import LineUse
from swarm.state_sync.state_version import StateVersion
from swarm.state_sync.training_state import SharedState
from swarm.training.auto_averaging import AutoAveraging
from swarm.training.averaging_mode import Averaging
from swarm.training.contribution import Contribution
from swarm.training.gradient_buffer import GradientVector, has_float_buffers
from swarm.training.island.sharded.pieces import local_of
from swarm.training.joining.corroboration import Attendance
from swarm.training.options import CoordinatorOptions
from swarm.training.run_control import RunControl


@dataclass(frozen=True)
class OwnPeer:
    """This peer, as the parts of its training see it: the objects that at least three of them need.

    Args:
        version: the peer's weights, and the update that made them
        gradients: the vector that holds an average before an update
        contribution: what the peer has computed for its step
        attendance: whether the peer comes to its rounds in time
        tracker: reads other peers' progress records, and writes this peer's
        averager: runs rounds and downloads
        control: the organiser's orders
        options: the patience of this peer
        averaging: how the swarm averages
        should_stop: called while waiting; a true answer ends the wait
    """

    version: StateVersion
    gradients: GradientVector
    contribution: Contribution
    attendance: Attendance
    tracker: ProgressTracker
    averager: SwarmAverager
    control: RunControl
    options: CoordinatorOptions
    averaging: Averaging
    should_stop: Callable[[], bool]

    @classmethod
    def of(
        cls,
        dht: DHT,
        namespace: str,
        name: str,
        gradients: GradientVector,
        state: SharedState,
        *,
        step: int,
        target_batch_size: int,
        max_step: int,
        options: CoordinatorOptions,
        averaging: Averaging,
        plan: Plan | None,
        should_stop: Callable[[], bool],
    ) -> OwnPeer:
        """Make these objects for a peer that has not joined yet.

        Args:
            gradients: the vector that rounds average
            state: the model and its optimizers, which joiners download
            dht, namespace, name, step, target_batch_size, max_step, options, averaging, plan, should_stop: as in
                `Coordinator`
        """
        model = state.model
        auto = AutoAveraging(has_float_buffers(model), plan) if averaging.auto else None
        control = RunControl(options.admission, target_batch_size, max_step, auto)
        version = StateVersion(state, step, gradients.weights, options.timeouts)
        tracker = ProgressTracker(
            dht=dht,
            namespace=namespace,
            target=control.target(step),
            name=name,
            max_step=max_step,
            timeouts=options.timeouts,
            admission=options.admission,
        )
        tracker.report(helps=options.helps, profile=options.profile)
        averaged = AveragingOptions(
            namespace=namespace,
            vector=gradients.wire,
            fragments=gradients.fragments,
            target=BatchTarget(target_batch_size),
            codec=averaging.codec,
            rule=averaging.rule,
            auto=averaging.auto,
            shapes=[param.shape for param in gradients.params],
            line=options.line or LineUse(),
            timeouts=options.timeouts,
            admission=options.admission,
            ledger=options.ledger,
            slowest_line_mbps=options.slowest_line_mbps,
        )
        return cls(
            version=version,
            gradients=gradients,
            contribution=Contribution(gradients, version, averaging.codec.largest_number),
            attendance=Attendance(options.matchmaking_seconds),
            tracker=tracker,
            averager=SwarmAverager(
                dht=dht,
                options=averaged,
                get_state=version.export,
                of_trainer=[*map(local_of, model.parameters()), *model.buffers(), *gradients.own_tensors],
            ),
            control=control,
            options=options,
            averaging=averaging,
            should_stop=should_stop,
        )
