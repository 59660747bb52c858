"""The other processes of an island, the *crew*: in place of a coordinator, the first process tells them what to do."""

from __future__ import annotations

import torch
from torch import nn

from recipe.training.replay import Replay
from swarm.protocol.admission import OPEN
from swarm.training.audit.work_log import NO_WORK_LOG, Loss, NotingLog, WorkLog
from swarm.training.gradient_buffer import GradientVector, averaged_tensors
from swarm.training.island.channel import Channel, Word
from swarm.training.island.lead import numbers_of, tensors_of
from swarm.training.island.notes import agree_on_kind, lineage_from, table_of
from swarm.training.run_control import RunControl
from swarm.training.throughput import Noted, finite_or_zero


class Crew:
    """Takes the place of the coordinator of `swarm.training.strategy.SwarmStrategy` in a process that only computes.

    Args:
        channel: the connection to the first process
        model, optimizer: as in `Coordinator`; the optimizer names the weights whose gradients count, and makes no step
        target_batch_size, max_step: those of the run
    """

    def __init__(
        self,
        channel: Channel,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        target_batch_size: int,
        max_step: int,
    ):
        self._channel, self._model = channel, model
        self._vector = self._vector_of(model, optimizer)
        self.control = RunControl(OPEN, target_batch_size, max_step)
        """Orders: none, because only the first process follows them."""
        self.step = 0
        """Global updates that the weights have seen."""
        self.lineage = b""
        """Lineage of the weights."""
        self._work_log: WorkLog = NO_WORK_LOG
        self._noted: list[Noted] = []
        self._samples, self._loss_sum = 0, torch.zeros((), dtype=torch.float64)
        self._is_over = False
        self._has_weights = False

    def _vector_of(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> GradientVector:
        """The sum of gradients of this process."""
        return GradientVector(*averaged_tensors(model, optimizer))

    def check_work(self, replay: Replay, loss: Loss) -> None:
        """Note what this process computes. Only the first process checks the work of other members."""
        agree_on_kind(self._channel, replay)
        self._work_log = NotingLog(replay, self._vector, self)

    def wait_while_paused(self) -> None:
        """Do nothing: the first process waits."""

    def begin_micro_batch(self) -> bool:
        """Do what the first process says until a micro-batch is to be computed; return False if this peer has left.

        Raises:
            IslandLost: the first process is silent
        """
        while not self._is_over:
            word, numbers = self._channel.hear()
            if word is Word.COMPUTE:
                self._begin(*numbers)
                return True
            self._is_over = word is Word.END
            if not self._is_over:
                self._obey(word, numbers)
        return False

    def _obey(self, word: Word, numbers: list[int]) -> None:
        if word is Word.GATHER:
            self._hand_over(*numbers[:2])

    def _begin(self, step: int, forget: int, weights: int, *lineage: int) -> None:
        self.step, self.lineage = step, lineage_from(lineage)
        if forget:
            self._vector.drop()
            self._start_anew()
        if weights:
            self._channel.spread(self._travelling())
            self._has_weights = True

    def _travelling(self) -> list[torch.Tensor]:
        return tensors_of(self._model, is_first_time=not self._has_weights)

    def _hand_over_gradients(self, unit: int) -> None:
        self._channel.reduce(self._vector.sum_in_units_of(unit))

    def _hand_over(self, unit: int, turns: int) -> None:
        with self._channel.speaking():
            self._hand_over_gradients(unit)
            self._channel.reduce_numbers(numbers_of(self._vector, self._samples, float(self._loss_sum)))
            if turns:
                self._channel.reduce_numbers(table_of(self._noted, turns, self._channel))
        self._vector.reset()
        self._start_anew()

    def _start_anew(self) -> None:
        self._samples, self._loss_sum, self._noted = 0, torch.zeros_like(self._loss_sum), []

    def begin_backward(self, samples: int) -> None:
        """Prepare for the backward pass that comes next, as in `Coordinator`."""
        self._vector.receive(samples)
        self._work_log.begin_backward()

    def contribute(self, samples: int, loss: torch.Tensor | float) -> bool:
        """Count a micro-batch, and tell the first process its samples. Return False: no update is made here.

        Raises:
            IslandLost: the first process is gone
        """
        self._vector.collect()
        self._noted += self._work_log.note(samples)
        loss = finite_or_zero(loss)
        self._loss_sum = self._loss_sum.to(loss.device) + samples * loss
        self._samples += samples
        self._channel.add_up(samples)
        return False

    def before_validation(self) -> None:
        """Do nothing: the first process validates."""

    def after_validation(self) -> None:
        """Do nothing: the first process goes on training."""

    def shared(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the state unchanged: the first process writes checkpoints."""
        return state_dict

    def leave(self) -> None:
        """Close the connection to the first process."""
        self._channel.close()
