"""What this peer computes for the present step and gives to its round."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import torch
from hivemind.utils import get_logger
from torch import nn

from recipe.training.replay import Replay
from swarm.protocol.work import Assignment, OwnWork
from swarm.state_sync.state_version import StateVersion
from swarm.training.audit.earlier_weights import EarlierWeights
from swarm.training.audit.work_log import NO_WORK_LOG, Loss, WorkLog
from swarm.training.gradient_buffer import GradientVector
from swarm.training.island.lead import SINGLE_PROCESS, Island
from swarm.training.throughput import Throughput, Work

logger = get_logger(__name__)


class Contribution:
    """The gradients that this peer has added up, the number of their samples, and its notes for checks of its work.

    It is empty at first, and after each method that begins anew, gives or drops.

    Args:
        vector: the sum to which this peer's backward passes add
        version: the weights on which the peer computes
        largest: largest number that the codec carries; a running statistic beyond it arrives wrong
    """

    def __init__(self, vector: GradientVector, version: StateVersion, largest: float = math.inf):
        self._vector, self._version, self._largest = vector, version, largest
        self._has_warned = False
        self._throughput = Throughput()
        self._log: WorkLog = NO_WORK_LOG
        """Notes on micro-batches, from which members check each other's work."""
        self._island: Island = SINGLE_PROCESS
        """The other processes of this peer, if there are any."""

    def lead(self, island: Island, model: nn.Module) -> None:
        """Make this process the first of a peer of several processes."""
        self._island = island
        island.attach(model, self._vector)

    def check_work(self, replay: Replay, loss: Loss, beside_rounds: bool) -> None:
        """Take part in checks, in which members recompute random parts of each other's work.

        Args:
            beside_rounds: the peer computes while a round runs, and gives that work to the next round
        """
        earlier = EarlierWeights(self._vector.params, self._version.lock) if beside_rounds else None
        self._log = self._island.log_of(replay, loss, self._vector, self._version, earlier)

    # ---- adding up --------------------------------------------------------------------------------------------------

    @property
    def samples(self) -> int:
        """Samples of all processes of this peer."""
        return self._throughput.work.samples

    @property
    def loss(self) -> float:
        """Mean loss over these samples."""
        return self._throughput.work.loss

    @property
    def samples_per_second(self) -> float:
        """How fast this peer computes, without its pauses."""
        return self._throughput.samples_per_second

    @property
    def is_finite(self) -> bool:
        """Whether all numbers are finite. A single NaN in an average would spoil the weights of all peers."""
        return self._vector.is_finite

    def resume(self) -> None:
        """End a pause, which does not count for this peer's pace."""
        self._throughput.resume()

    def begin_micro_batch(self) -> None:
        """Begin a micro-batch: its forward pass comes next in all processes of this peer, on the present weights."""
        self._island.begin_micro_batch(self._version.step, self._version.lineage)

    def begin_backward(self, samples: int) -> None:
        """Prepare for the backward pass that comes next, whose gradients are means over `samples`."""
        self._vector.receive(samples)
        self._log.begin_backward()

    def add(self, samples: int, loss: torch.Tensor | float) -> int:
        """Add the micro-batch whose backward pass is over.

        Args:
            samples: samples of the micro-batch
            loss: mean loss over them, without dimensions

        Returns:
            samples of this micro-batch in all processes of this peer
        """
        self._vector.collect()
        self._throughput.work.noted += self._log.note(samples)
        samples, loss = self._island.add_up(samples, loss)
        self._throughput.note(samples, loss)
        return samples

    def finish(self) -> None:
        """Wait until everything is computed, and gather it in this process."""
        self._throughput.finish()
        self.gather()

    def gather(self) -> None:
        """Add what the other processes of this peer have computed to the sum."""
        work = self._throughput.work
        work.loss_sum = work.loss_sum + self._island.gather(self._vector, work.noted)

    def keep(self) -> None:
        """Note that a local step has used everything so far."""
        self._throughput.keep()

    def drop(self) -> bool:
        """Drop everything, since it is not finite; return whether this is so frequent that the weights may be why."""
        self._vector.drop()
        return self._throughput.drop_all()

    def discount(self, samples: int) -> bool:
        """Drop this many useless samples since `keep`; return whether that is so frequent that weights may be why."""
        return self._throughput.discount(samples)

    def withhold(self) -> None:
        """Drop everything, because the swarm takes nothing from this peer now."""
        self._vector.drop()
        self._throughput.withhold()

    # ---- the round --------------------------------------------------------------------------------------------------

    def statement(self) -> OwnWork | None:
        """What this peer tells the members that may recompute its work; None for nothing."""
        return self._log.own(self._throughput.work, self._island.size)

    def give(self) -> Work:
        """Write the mean for a round onto the wire, and begin anew; return the work that was given."""
        self._vector.to_wire(self.samples)
        self._look_at_statistics()
        return self._throughput.take()

    def _look_at_statistics(self) -> None:
        """Warn once if the codec cuts off a running statistic, which makes validations and checkpoints wrong."""
        if self._has_warned or self._largest == math.inf or not (self._vector.buffers.abs() > self._largest).any():
            return
        self._has_warned = True
        logger.warning(
            f"A running statistic (float buffer) of the model is beyond ±{self._largest:,.0f}, where fp16 cuts numbers "
            "off: peers get a wrong value with each average that is sent as fp16. Scale the model's inputs, or start a "
            "run with --averaging sync, overlap or local and the codec none."
        )

    def give_alone(self) -> float:
        """Use the mean for an update without other peers, and begin anew; return the seconds of computing."""
        self._vector.average_alone(self.samples)
        return self._throughput.take().seconds

    def take_back(self, work: Work) -> None:
        """Take back what was given to a round that gave no average: it counts for the next round."""
        self._vector.take_back(work.samples)
        self._throughput.give_back(work)

    def begin(self) -> None:
        """Begin a new step on other weights; drop everything of the last one."""
        self._vector.reset()
        self.forget_samples()
        self.resume()

    def forget_samples(self) -> None:
        """Forget the samples that were counted."""
        self._throughput.take()

    def check(self, assignment: Assignment | None) -> None:
        """Recompute the part of another member's work that was drawn; this comes before the weights are updated."""
        self._log.check(assignment)

    def updating(self) -> AbstractContextManager[None]:
        """A context in which the weights are updated."""
        return self._log.updating()

    def note_update(self) -> None:
        """Note that the weights have been updated."""
        self._island.note_update()

    def leave(self) -> None:
        """End the other processes of this peer, which leaves."""
        self._island.end()
