"""The other processes of an island that share one model with the first: they do what it says with their pieces."""

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
        self._mixed: torch.dtype | None = None
        """The format of this process's last micro-batch; None: that of the weights."""
        self._replay: Replay | None = None
        for number, root in enumerate(roots):
            root.register_forward_pre_hook(self._note(number), with_kwargs=True)

    def _vector_of(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> CrewSums:
        return CrewSums(Pieces(self._channel, model, optimizer), model)

    def check_work(self, replay: Replay, loss: Loss) -> None:
        """As of `Crew`; the first process asks for the kind of device when it has come so far."""
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
        """They stay until the first process asks for them."""

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
        """Whatever is computed here, the first process gets whole weights for what it computes, and nothing stays.

        Args:
            goes_back: 1 if it computes a gradient, which needs them a second time; 0 if it evaluates
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
        return in_a_row(self._buffers)

    @property
    def sizes(self) -> list[int]:
        """As of `GradientVector`."""
        return [param.numel() for param in self.pieces.params]

    def watch(self, places: Sequence[Place]) -> None:
        """As of `GradientVector`."""
        self.pieces.own.watch(places)

    def watched(self) -> torch.Tensor:
        """As of `GradientVector`."""
        return self.pieces.own.watched()

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
