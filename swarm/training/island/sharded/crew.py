"""The other processes of an island that share one model with the first: they do what it says with their pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from swarm.training.island.channel import Channel, Word
from swarm.training.island.crew import Crew
from swarm.training.island.sharded.pieces import Pieces, local_of


class ShardedCrew(Crew):
    """Arguments as of `Crew`, and the models in the module, each of which all processes compute together."""

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
        """What each model was given last."""
        for number, root in enumerate(roots):
            root.register_forward_pre_hook(self._note(number), with_kwargs=True)

    def _vector_of(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> CrewSums:
        return CrewSums(Pieces(self._channel, model, optimizer), model)

    def _note(self, number: int):
        def note(module: nn.Module, inputs: tuple, named: dict[str, Any]) -> None:
            self._latest[number] = tree_map_only(torch.Tensor, torch.Tensor.detach, (inputs, named))

        return note

    def _travelling(self) -> list[torch.Tensor]:
        return list(self._model.buffers())

    def _hand_over_gradients(self, unit: int) -> None:
        """They stay until the first process asks for them."""

    def _obey(self, word: Word, numbers: list[int]) -> None:
        pieces = self._vector.pieces
        if word is Word.FORGET:
            self._vector.drop()
            self._start_anew()
        elif word is Word.LEND:
            self._lend(numbers[0])
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

    @torch.no_grad()
    def _lend(self, number: int) -> None:
        """The first process evaluates: whatever is computed here, its weights are gathered for that."""
        root, (inputs, named) = self._roots[number], self._latest[number]
        trains = [module for module in root.modules() if module.training]
        root.eval()
        root(*inputs, **named)
        for module in trains:
            module.training = True


class CrewSums:
    """What `Crew` does with its gradients and float buffers.

    Args:
        pieces: of this process
        model: with the buffers
    """

    def __init__(self, pieces: Pieces, model: nn.Module):
        self.pieces = pieces
        self._buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self._before: list[torch.Tensor] = []
        self.reset()

    @property
    def buffers(self) -> torch.Tensor:
        """As of `GradientVector`."""
        flat = [buffer.detach().reshape(-1).float().cpu() for buffer in self._buffers]
        return torch.cat(flat) if flat else torch.zeros(0)

    def receive(self, samples: int) -> None:
        self.pieces.receive()

    def collect(self) -> None:
        self.pieces.collect()

    def reset(self) -> None:
        """What the buffers are now counts, whatever becomes of the sums."""
        self._before = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def drop(self) -> None:
        self.pieces.forget()
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(before)
