"""A peer whose weights are divided among its processes; to the swarm it looks like any other peer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from swarm.averaging.compression.fragments import Fragments
from swarm.protocol.messages import RoundFailed
from swarm.state_sync.training_state import SharedState
from swarm.training.coordinator import Coordinator
from swarm.training.gradient_buffer import GradientVector, Place, averaged_tensors
from swarm.training.island.sharded.lead import ShardedLead
from swarm.training.island.sharded.pieces import STATISTICS, WEIGHT, is_divided


class ShardedCoordinator(Coordinator):
    """The coordinator of the first process, which takes part in the swarm for all processes that share its model.

    Args:
        lead: the connection to the other processes
        clip: largest norm of the averaged gradient; None for no limit
    """

    def __init__(self, *arguments: Any, lead: ShardedLead, clip: float | None, **options: Any):
        self._lead, self._clip = lead, clip
        super().__init__(*arguments, **options)

    def _share(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[GradientVector, SharedState]:
        params, buffers = averaged_tensors(model, optimizer)
        vector = ShardedVector(params, buffers, self._lead, self._clip)
        return vector, ShardedState(model, [optimizer], lead=self._lead)


class ShardedVector(GradientVector):
    """A `GradientVector` whose sum lies in pieces beside the weights; for a round, it is copied to the wire.

    Args:
        params, buffers: as in `GradientVector`
        lead: the connection to the other processes
        clip: largest norm of the gradient that the optimizer gets; None for no limit
    """

    def __init__(self, params: list[nn.Parameter], buffers: list[torch.Tensor], lead: ShardedLead, clip: float | None):
        self.params, self._buffers, self._lead, self._clip = params, buffers, lead, clip
        sizes = [param.numel() for param in params]
        self.fragments = Fragments.of(sizes, rest=sum(buffer.numel() for buffer in buffers))
        self.wire = torch.zeros(*self.fragments.sizes, dtype=torch.float32).share_memory_()
        self.average = self._sum = self.wire[: sum(sizes)]
        self._unit, self.clears = 1, 0
        self._buffers_before = [buffer.clone() for buffer in buffers]

    @property
    def own_tensors(self) -> list[torch.Tensor]:
        return []

    def receive(self, samples: int) -> None:
        self._lead.pieces.receive()

    def collect(self) -> None:
        self._lead.pieces.collect()

    def release(self) -> None:
        self._lead.pieces.release()

    def watch(self, places: Sequence[Place]) -> None:
        self._lead.pieces.own.watch(places)

    def watched(self) -> torch.Tensor:
        return self._lead.pieces.own.watched()

    def gradient_of(self, loss: Callable[[], torch.Tensor], places: Sequence[Place]) -> torch.Tensor:
        return self._lead.gradient_of(loss, places)

    def _clear(self) -> None:
        self._lead.forget()

    @property
    def _has_finite_sum(self) -> bool:
        return self._lead.is_finite()

    @torch.no_grad()
    def to_wire(self, samples: int) -> None:
        self.average_alone(max(1, samples))
        self._write_buffers()
        self._buffers_before = [buffer.clone() for buffer in self._buffers]

    def take_back(self, samples: int) -> None:
        if samples:
            self._lead.hand_out(self.views_of(self.wire), samples, adds=True)

    def _take_vector(self, average: torch.Tensor) -> None:
        self.average = average.float()  # a fetched average may be in fp16, but the other processes expect fp32

    @torch.no_grad()
    def average_alone(self, samples: int) -> None:
        self._lead.collect(self.views_of(self._sum))
        self.average = self._sum.mul_(1 / samples)

    def show(self) -> None:
        self._write_buffers()

    def hand_over(self) -> None:
        """Put the average into `param.grad` of all processes, clipped by the norm of the whole, as torch does it."""
        views, factor = self.views_of(self.average), torch.ones(())
        if self._clip:
            norm = nn.utils.get_total_norm(views)
            factor = (self._clip / (norm + 1e-6)).clamp(max=1.0)
        self._lead.hand_out(views, factor, adds=False)


@dataclass
class ShardedState(SharedState):
    """A `SharedState` whose tensors lie in pieces; each one is put together when it is read.

    Args:
        model, optimizers, anchors: as in `SharedState`
        lead: the connection to the other processes
    """

    lead: ShardedLead = field(kw_only=True)

    def __post_init__(self) -> None:
        # Read only once, here: while the model computes, whole weights take the place of its pieces.
        self._all = self.model.state_dict(keep_vars=True)
        self._numbers = {id(weight): number for number, weight in enumerate(self.lead.pieces.weights)}
        self._statistics: dict[int, tuple[int, int]] = {}
        """Kind and number of each statistic, by the id of its tensor."""

    def _named(self) -> dict[str, torch.Tensor]:
        return self._all

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        if not is_divided(tensor):
            return tensor.detach()
        if id(tensor) in self._numbers:
            return self.lead.read(WEIGHT, self._numbers[id(tensor)])
        return self.lead.read(*self._statistics[id(tensor)])

    def held(self) -> tuple[list[tuple[int, str]], list[torch.Tensor]]:
        tensors, statistics = list(self.named_tensors.values()), []
        for index, (optimizer, param) in enumerate(self.optimized):
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    statistics.append((index, key))
                    tensors.append(value)
                    self._statistics[id(value)] = STATISTICS.index(key) + 1, index
        return statistics, tensors

    def whole(self) -> dict[str, torch.Tensor]:
        """The module's `state_dict`, as a peer of one process has it."""
        return {name: self.read(tensor) for name, tensor in self._all.items()}

    def whole_optimizer(self) -> dict[str, Any]:
        """The optimizer's `state_dict`, as a peer of one process has it."""
        self.held()
        found = self.optimizers[0].state_dict()
        whole = {
            index: {key: self.read(value) if torch.is_tensor(value) else value for key, value in statistics.items()}
            for index, statistics in found["state"].items()
        }
        return found | {"state": whole}

    def check(self, description: dict, tensors: Sequence[torch.Tensor]) -> None:
        super().check(description, tensors)
        statistics = zip(description["statistics"], tensors[len(self.named_tensors) :], strict=True)
        for (index, key), new in statistics:
            if key not in STATISTICS or (key != "step" and new.shape != self.optimized[index][1].shape):
                raise RoundFailed(f"the state holds {key[:20]!r}, which this peer's optimizer does not know")

    @torch.no_grad()
    def take(self, description: dict, tensors: Sequence[torch.Tensor]) -> tuple[int, bytes]:
        named = list(self.named_tensors.values())
        for own, new in zip(named, tensors[: len(named)], strict=True):
            if is_divided(own):
                self.lead.write(WEIGHT, self._numbers[id(own)], new)
            else:
                own.detach().copy_(new)
        self._statistics.clear()
        self.lead.renew()
        for (index, key), new in zip(description["statistics"], tensors[len(named) :], strict=True):
            self.lead.write_statistic(index, key, new)
        self.lead.note_written()
        return description["step"], description["lineage"]
