"""The first process of an island: it is the peer, and the others compute for it.

An *island* is a peer of several processes, one for each device. The first one has the optimizer, the checkpoints and
all parts that communicate with the swarm. The others add up gradients. When the first one needs these, for a round or a
local step, they are summed into its own sum. Whenever its weights have changed, for any reason, it copies them to the
others. So all processes hold the same bits, in every averaging mode, and only one keeps the optimizer's statistics.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod

import torch
from torch import nn

from recipe.training.replay import Replay
from swarm.training.audit.earlier_weights import EarlierWeights
from swarm.training.audit.work_log import CheckedLog, Loss, Weights
from swarm.training.gradient_buffer import GradientVector
from swarm.training.island.channel import Channel, Word
from swarm.training.island.lost import IslandLost
from swarm.training.island.notes import agree_on_kind, gathered, numbers_for
from swarm.training.throughput import Noted


class Island(ABC):
    """The processes of a peer, as its first one sees them."""

    size = 1
    """How many processes there are."""

    @abstractmethod
    def attach(self, model: nn.Module, vector: GradientVector) -> None:
        """Set the model that the processes compute, and the vector in which this process adds up its gradients."""

    @abstractmethod
    def kind_of(self, replay: Replay) -> str:
        """The kind of device on which the processes compute, for checks of work. All processes take part in this."""

    def log_of(
        self, replay: Replay, loss: Loss, vector: GradientVector, version: Weights, earlier: EarlierWeights | None
    ) -> CheckedLog:
        """The log of this peer's micro-batches, for checks of work; arguments as in `CheckedLog`."""
        return CheckedLog(replay, loss, vector, version, self.kind_of(replay), earlier)

    @abstractmethod
    def begin_micro_batch(self, step: int, lineage: bytes) -> None:
        """Let the other processes compute a micro-batch, on the present weights of this one."""

    @abstractmethod
    def add_up(self, samples: int, loss: torch.Tensor | float) -> tuple[int, torch.Tensor | float]:
        """Return the samples of all processes' micro-batches, and the mean loss with the others' losses as 0."""

    @abstractmethod
    def gather(self, vector: GradientVector, noted: list[Noted]) -> float:
        """Add the others' gradients to this sum, and average float buffers; return the sum of the others' losses.

        Args:
            noted: notes on the micro-batches in the sum; those of the others are inserted in the order of samples
        """

    @abstractmethod
    def note_update(self) -> None:
        """Note that the optimizer has changed the weights: a fused one does not raise their version counters."""

    @abstractmethod
    def end(self) -> None:
        """End the other processes: this peer leaves."""


class SingleProcess(Island):
    """A peer of one process: every method does nothing or returns what it was given."""

    def attach(self, model: nn.Module, vector: GradientVector) -> None:
        pass

    def kind_of(self, replay: Replay) -> str:
        return replay.kind

    def begin_micro_batch(self, step: int, lineage: bytes) -> None:
        pass

    def add_up(self, samples: int, loss: torch.Tensor | float) -> tuple[int, torch.Tensor | float]:
        return samples, loss

    def gather(self, vector: GradientVector, noted: list[Noted]) -> float:
        return 0.0

    def note_update(self) -> None:
        pass

    def end(self) -> None:
        pass


SINGLE_PROCESS = SingleProcess()
NOT_AS_HERE = -1
"""A state of weights that equals none, so that the others get the weights and buffers anew."""


class Lead(Island):
    """The first of several processes tells the others what to do, and gathers what they have computed.

    Args:
        channel: the connection to the others
    """

    def __init__(self, channel: Channel):
        self._channel, self.size = channel, channel.size
        self._model: nn.Module | None = None
        self._vector: GradientVector | None = None
        self._shown: int | None = None
        """The count of changes of the weights that the others have."""
        self._clears = self._updates = 0
        self._own = self._others = 0
        """Samples of this process, and of the others, since gradients were last gathered."""
        self._turns = 0
        """Micro-batches of each process since gradients were last gathered."""
        self._own_buffers: torch.Tensor | None = None
        """Float buffers of this process, while the model holds the mean over all processes for a round."""

    def attach(self, model: nn.Module, vector: GradientVector) -> None:
        self._model, self._vector = model, vector
        self._clears = vector.clears

    def kind_of(self, replay: Replay) -> str:
        return agree_on_kind(self._channel, replay)

    def begin_micro_batch(self, step: int, lineage: bytes) -> None:
        forget = self._vector.clears != self._clears  # the sum was dropped, or given to a round
        if forget:
            self._own = self._others = self._turns = 0
        weights = self._count_changes()
        changed = weights != self._shown
        if self._own_buffers is not None and not changed:  # the average is not there yet, or never comes
            self._vector.take_buffers(self._own_buffers)
        self._own_buffers = None
        with self._channel.speaking():
            self._channel.tell(Word.COMPUTE, step, int(forget), int(changed), *numbers_for(lineage))
            if changed:
                self._channel.spread(self._travelling(is_first_time=self._shown is None))
        self._clears, self._shown = self._vector.clears, weights

    def _count_changes(self) -> int:
        """A number that grows with each change of the weights.

        torch counts how often each tensor was changed in place, but not changes by a fused optimizer. `_updates` counts
        those.
        """
        return self._updates + sum(parameter._version for parameter in self._model.parameters())

    def _travelling(self, is_first_time: bool) -> list[torch.Tensor]:
        """The tensors that the others get when weights have changed."""
        return tensors_of(self._model, is_first_time)

    def _add_gradients(self, vector: GradientVector) -> None:
        self._channel.reduce(vector.sum_in_units_of(vector.unit))

    def note_update(self) -> None:
        self._updates += 1

    def add_up(self, samples: int, loss: torch.Tensor | float) -> tuple[int, torch.Tensor | float]:
        total = self._channel.add_up(samples)
        self._own, self._others, self._turns = self._own + samples, self._others + total - samples, self._turns + 1
        return total, loss * (samples / total)

    def gather(self, vector: GradientVector, noted: list[Noted]) -> float:
        if not self._others or vector.clears != self._clears:  # the others will drop what this process has dropped
            return 0.0
        turns = self._turns if noted else 0
        with self._channel.speaking():
            self._channel.tell(Word.GATHER, vector.unit, turns)
            self._add_gradients(vector)
            self._own_buffers = vector.buffers
            numbers = numbers_of(vector, self._own, 0.0)
            self._channel.reduce_numbers(numbers)
            if turns:
                noted[-turns:] = gathered(noted[-turns:], self._channel)
        loss_sum, total = numbers[:2].tolist()
        vector.take_buffers(numbers[2:] / total)
        # Buffers that are not finite get dropped, and all processes go on with this one's buffers from before.
        if not torch.isfinite(numbers).all():
            self._own_buffers, self._shown = None, NOT_AS_HERE
        self._own = self._others = self._turns = 0
        return loss_sum

    def end(self) -> None:
        if self._channel.is_heard:  # if not, the others compute, and get an error when they next communicate
            with contextlib.suppress(IslandLost):
                self._channel.say(Word.END)
        self._channel.close()


def tensors_of(model: nn.Module, is_first_time: bool) -> list[torch.Tensor]:
    """The tensors that have to be equal in all processes; frozen weights, which never change, only the first time."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad or is_first_time]
    return [*weights, *model.buffers()]


def numbers_of(vector: GradientVector, samples: int, loss_sum: float) -> torch.Tensor:
    """The sum of losses, the samples, and the float buffers times the samples: shape [2 + m], fp64."""
    return torch.cat([torch.tensor([loss_sum, samples], dtype=torch.float64), vector.buffers.double() * samples])
