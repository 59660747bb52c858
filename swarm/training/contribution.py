"""What this peer computes for the present step, and brings to its round."""

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
    """The gradients that this peer has added up, of how many samples they are, and what it notes of them for others.

    It is empty at first, and again from `begin`, `give` and `withhold` on.

    Args:
        vector: where the backward passes of this peer add up
        version: the weights on which it computes
        largest: number that the codec carries; a running statistic beyond it arrives wrong
    """

    def __init__(self, vector: GradientVector, version: StateVersion, largest: float = math.inf):
        self._vector, self._version, self._largest = vector, version, largest
        self._has_warned = False
        self._throughput = Throughput()
        self._log: WorkLog = NO_WORK_LOG
        """What members have to know to check each other's work."""
        self._island: Island = SINGLE_PROCESS
        """The other processes of this peer, if it has some."""

    def lead(self, island: Island, model: nn.Module) -> None:
        """This peer is several processes, of which this is the first."""
        self._island = island
        island.attach(model, self._vector)

    def check_work(self, replay: Replay, loss: Loss, beside_rounds: bool) -> None:
        """Members compute parts of each other's work again, by lot.

        Args:
            beside_rounds: what is computed while a round runs is brought to the next one
        """
        earlier = EarlierWeights(self._vector.params, self._version.lock) if beside_rounds else None
        self._log = self._island.log_of(replay, loss, self._vector, self._version, earlier)

    # ---- while it grows ---------------------------------------------------------------------------------------------

    @property
    def samples(self) -> int:
        """Samples of all processes of this peer."""
        return self._throughput.work.samples

    @property
    def loss(self) -> float:
        """Mean over these samples."""
        return self._throughput.work.loss

    @property
    def samples_per_second(self) -> float:
        """How fast this peer computes, without its pauses."""
        return self._throughput.samples_per_second

    @property
    def is_finite(self) -> bool:
        """Whether it can be averaged: one NaN would spoil everybody's weights."""
        return self._vector.is_finite

    def resume(self) -> None:
        """A pause ends now: it does not count for this peer's pace."""
        self._throughput.resume()

    def begin_micro_batch(self) -> None:
        """Its forward pass comes next, on the weights of this moment, in all processes of this peer."""
        self._island.begin_micro_batch(self._version.step, self._version.lineage)

    def begin_backward(self, samples: int) -> None:
        """The backward pass of a micro-batch comes next; its gradients are means over `samples`."""
        self._vector.receive(samples)
        self._log.begin_backward()

    def add(self, samples: int, loss: torch.Tensor | float) -> int:
        """The backward pass is over.

        Args:
            samples: of the micro-batch
            loss: mean over them, without dimensions

        Returns:
            the samples of all processes of this peer
        """
        self._vector.collect()
        self._throughput.work.noted += self._log.note(samples)
        samples, loss = self._island.add_up(samples, loss)
        self._throughput.note(samples, loss)
        return samples

    def finish(self) -> None:
        """Wait until all of it is computed, and gather it in this process."""
        self._throughput.finish()
        self.gather()

    def gather(self) -> None:
        """What other processes of this peer have computed is added to the sum."""
        work = self._throughput.work
        work.loss_sum = work.loss_sum + self._island.gather(self._vector, work.noted)

    def keep(self) -> None:
        """A local step has used all of it."""
        self._throughput.keep()

    def drop(self) -> bool:
        """Forget it, since it is not finite; true if that happens so often that the weights may be why."""
        self._vector.drop()
        return self._throughput.drop_all()

    def discount(self, samples: int) -> bool:
        """So many samples since `keep` were of no use; true if that happens so often that the weights may be why."""
        return self._throughput.discount(samples)

    def withhold(self) -> None:
        """Forget it: the swarm takes nothing from this peer now."""
        self._vector.drop()
        self._throughput.withhold()

    # ---- its round --------------------------------------------------------------------------------------------------

    def statement(self) -> OwnWork | None:
        """What this peer says of it to who may compute it again; None for nothing."""
        return self._log.own(self._throughput.work, self._island.size)

    def give(self) -> Work:
        """Write the mean for a round onto the wire, and begin anew; returns what was given."""
        self._vector.to_wire(self.samples)
        self._look_at_statistics()
        return self._throughput.take()

    def _look_at_statistics(self) -> None:
        """Warn once of those that are cut off: validations and checkpoints have wrong ones then."""
        if self._has_warned or self._largest == math.inf or not (self._vector.buffers.abs() > self._largest).any():
            return
        self._has_warned = True
        logger.warning(
            f"A running statistic (float buffer) of the model is beyond ±{self._largest:,.0f}, where fp16 cuts numbers "
            "off: all peers get a wrong one while they travel as fp16. Scale the model's inputs, or start a run with "
            "--averaging sync, overlap or local and the codec none."
        )

    def give_alone(self) -> float:
        """Use the mean for an update without others, and begin anew; returns the seconds of computing."""
        self._vector.average_alone(self.samples)
        return self._throughput.take().seconds

    def take_back(self, work: Work) -> None:
        """The round has ended in vain: what was given counts for the next one."""
        self._vector.take_back(work.samples)
        self._throughput.give_back(work)

    def begin(self) -> None:
        """A new step begins, on other weights: nothing is left of the last one."""
        self._vector.reset()
        self.forget_samples()
        self.resume()

    def forget_samples(self) -> None:
        """None of them counts any more."""
        self._throughput.take()

    def check(self, assignment: Assignment | None) -> None:
        """Compute again what another member has given, as the lot has drawn; before the weights are updated."""
        self._log.check(assignment)

    def updating(self) -> AbstractContextManager[None]:
        """The weights are updated in here."""
        return self._log.updating()

    def note_update(self) -> None:
        """The weights have been updated."""
        self._island.note_update()

    def leave(self) -> None:
        """This peer leaves, with all its processes."""
        self._island.end()
