"""The crew of an island whose processes share one model: they do what the first process says with their pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from recipe.training.replay import Replay
from swarm.training.audit.work_log import Loss, NotingLog
from swarm.training.gradient_buffer import Place, in_a_row
from swarm.training.island.channel import Channel, Word
from swarm.training.island.crew import Crew
from swarm.training.island.notes import agree_on_kind
from swarm.training.island.sharded.pieces import Pieces, local_of


class ShardedCrew(Crew):
    """A `Crew` that holds pieces of the model. Arguments as in `Crew`, and these.

    Args:
        roots: the models in the module, each of which all processes compute together
    """

    def __init__(
        self,
        channel: Channel,
        model: nn.Module,
        roots: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        target_batch_size: int,
        max_step: int,
    ):
        super().__init__(channel, model, optimizer, target_batch_size, max_step)
        self._roots, self._latest = roots, [((), {})] * len(roots)
        """The latest inputs of each model."""
        self._mixed: torch.dtype | None = None
        """The autocast number format of this process's latest micro-batch; None for that of the weights."""
        self._replay: Replay | None = None
        for number, root in enumerate(roots):
            root.register_forward_pre_hook(self._note(number), with_kwargs=True)

    def _vector_of(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> CrewSums:
        return CrewSums(Pieces(self._channel, model, optimizer), model)

    def check_work(self, replay: Replay, loss: Loss) -> None:
        """As in `Crew`, but the kind of device is exchanged later, when the first process asks for it."""
        self._replay, self._work_log = replay, NotingLog(replay, self._vector, self)

    def _note(self, number: int):
        def note(module: nn.Module, inputs: tuple, named: dict[str, Any]) -> None:
            self._latest[number] = tree_map_only(torch.Tensor, torch.Tensor.detach, (inputs, named))
            kind = self._channel.device.type
            self._mixed = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

        return note

    def _travelling(self) -> list[torch.Tensor]:
        return list(self._model.buffers())

    def _hand_over_gradients(self, unit: int) -> None:
        """Do nothing: gradients stay here until the first process asks for them."""

    def _obey(self, word: Word, numbers: list[int]) -> None:
        pieces = self._vector.pieces
        if word is Word.FORGET:
            self._vector.drop()
            self._start_anew()
        elif word is Word.LEND:
            self._lend(*numbers[:2])
        elif word is Word.KIND:
            agree_on_kind(self._channel, self._replay)
        elif word is Word.LOOK:
            self._channel.reduce_numbers(torch.tensor([0.0 if pieces.is_finite else 1.0]))
        elif word is Word.GIVE:
            for number in range(len(pieces.params)):
                self._channel.send(pieces.sum_of(number), 0)
            pieces.forget()
        elif word is Word.TAKE:
            self._take(adds=numbers[0])
        elif word is Word.STEP:
            pieces.step(self._channel.exchange(None)[0])
        elif word is Word.READ:
            self._channel.send(local_of(pieces.tensor(*numbers[:2])), 0)
        elif word is Word.WRITE:
            self._channel.receive(local_of(pieces.tensor_for(*numbers[:2])), 0)
        elif word is Word.RENEW:
            pieces.renew()
        else:
            super()._obey(word, numbers)

    @torch.no_grad()
    def _take(self, adds: int) -> None:
        pieces = self._vector.pieces
        for number in range(len(pieces.params)):
            came = torch.empty_like(pieces.sum_of(number), device="cpu")
            self._channel.receive(came, 0)
            pieces.put(number, came, bool(adds))
        if not adds:
            pieces.show_average()

    def _lend(self, number: int, goes_back: int) -> None:
        """Compute a model along with the first process, so that it gets whole weights; keep nothing of the result.

        Args:
            number: the index of the model
            goes_back: 1 if the first process computes a gradient, which needs the weights again; 0 if it evaluates
        """
        root, (inputs, named) = self._roots[number], self._latest[number]
        buffers = [buffer.clone() for buffer in self._model.buffers()]
        trains = [module for module in root.modules() if module.training]
        root.train(bool(goes_back))
        mixed = torch.autocast(self._channel.device.type, self._mixed, enabled=self._mixed is not None)
        with torch.set_grad_enabled(bool(goes_back)), self._channel.computing(), mixed:
            outputs = root(*inputs, **named)
            if goes_back:
                sum(one.sum() for one in tree_leaves(outputs) if torch.is_tensor(one) and one.requires_grad).backward()
                self._vector.pieces.release()
        root.eval()
        for module in trains:
            module.training = True
        with torch.no_grad():
            for buffer, before in zip(self._model.buffers(), buffers, strict=True):
                buffer.copy_(before)


class CrewSums:
    """The gradients and float buffers of a `ShardedCrew`, in the place of a `GradientVector`.

    Args:
        pieces: the pieces of this process
        model: the module with the buffers
    """

    def __init__(self, pieces: Pieces, model: nn.Module):
        self.pieces = pieces
        self._buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self._before: list[torch.Tensor] = []
        self.reset()

    @property
    def buffers(self) -> torch.Tensor:
        """As in `GradientVector`."""
        return in_a_row(self._buffers)

    @property
    def sizes(self) -> list[int]:
        """As in `GradientVector`."""
        return [param.numel() for param in self.pieces.params]

    def watch(self, places: Sequence[Place]) -> None:
        """As in `GradientVector`."""
        self.pieces.own.watch(places)

    def watched(self) -> torch.Tensor:
        """As in `GradientVector`, but of this process's own micro-batch alone."""
        return self.pieces.own.watched()

    def receive(self, samples: int) -> None:
        self.pieces.receive()

    def collect(self) -> None:
        self.pieces.collect()

    def reset(self) -> None:
        """Note the present buffers as those that `drop` restores; the sums stay."""
        self._before = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def drop(self) -> None:
        self.pieces.forget()
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(before)
