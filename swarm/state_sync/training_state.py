"""The state that a peer needs to go on where the swarm is: parameters, buffers, optimizers' statistics and the step.

It is sent as a flat list of tensors with a small description. A received state is untrusted: names, shapes and values
are checked against this peer's own model before anything is changed.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from hivemind.utils import get_logger
from torch import nn

from swarm.protocol.attestation import DIGEST_BYTES
from swarm.protocol.certificates import printed
from swarm.protocol.messages import RoundFailed
from swarm.protocol.wire import LINEAGE_BYTES, MAX_STEP

logger = get_logger(__name__)

MAX_SCALARS = 16
"""Statistics that an optimizer may have for each parameter."""
NEVER_NEGATIVE = {
    *("step", "exp_avg_sq", "max_exp_avg_sq", "exp_inf"),  # Adam and its kin
    *("square_avg", "sum"),  # RMSprop, Adagrad
}
"""Statistics that count or add up squares. An optimizer takes their root, or a power of them."""


ON_DEVICES = ("fused", "capturable", "foreach")
"""Settings of an optimizer that change how it computes, but not the result."""
COUNTS = ("step", "mu_product")
"""Statistics that torch keeps on the CPU, even where the parameter is on a GPU."""


def made_statistics(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], param: torch.Tensor
) -> dict[str, torch.Tensor] | None:
    """The statistics that a step of this optimizer makes for a small parameter of this kind; None if that step fails.

    Args:
        optimizer: the optimizer, which is not changed
        group: the parameter's group, with its settings
        param: a parameter; the small one has as many dimensions, each of size 2
    """
    small = nn.Parameter(torch.zeros([2] * param.dim(), dtype=param.dtype))
    small.grad = torch.zeros_like(small)
    tried = copy(optimizer)  # the copy has no wrappers that a scheduler, for example, put around `step`
    tried.param_groups = [{**group, **dict.fromkeys(ON_DEVICES, False), "params": [small]}]
    tried.state = defaultdict(dict)
    try:
        tried.step()
    except Exception as error:  # each optimizer raises its own kinds
        logger.debug(f"{type(optimizer).__name__} does not show what it remembers: {error!r}")
        return None
    return {key: value for key, value in tried.state[small].items() if isinstance(value, torch.Tensor)}


def counts_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether such an optimizer needs its counts on the device of its parameters."""
    return bool(optimizer.defaults.get("fused") or optimizer.defaults.get("capturable"))


@dataclass
class SharedState:
    """The tensors of a model and its optimizers, seen as one list.

    Args:
        model: its trained parameters and buffers are sent, in the order of `state_dict`, and nothing frozen
        optimizers: torch optimizers; their statistics are sent
        anchors: tensors that are sent in place of some parameters; a peer that loads them has them in the parameters
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    anchors: Mapping[torch.Tensor, torch.Tensor] = field(default_factory=dict)

    def _named(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict(keep_vars=True)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole of a tensor, held or received, without its autograd history."""
        return tensor.detach()

    @property
    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the model that are sent: each once, however many names it has, and no frozen weights."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in self._named().items():
            if not _is_frozen(tensor):
                found.setdefault(id(tensor), (name, tensor))
        return dict(found.values())

    @property
    def model_tensors(self) -> list[torch.Tensor]:
        return [tensor.detach() for tensor in self.named_tensors.values()]

    @cached_property
    def frozen(self) -> bytes:
        """A digest of the frozen weights, which have to be the same on all peers; empty if there are none."""
        weights = {name: one for name, one in self._named().items() if _is_frozen(one)}
        digest = hashlib.sha256()
        for name, tensor in weights.items():
            _add(digest, name, self.read(tensor))
        return digest.digest()[:DIGEST_BYTES] if weights else b""

    @property
    def optimized(self) -> list[tuple[torch.optim.Optimizer, torch.Tensor]]:
        """Every optimized parameter, with its optimizer; the description of a state counts them in this order."""
        return [
            (optimizer, param)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for param in group["params"]
        ]

    @property
    def max_bytes(self) -> int:
        """More than an honest peer ever sends: up to four fp32 statistics for each parameter, and some room."""
        model = sum(tensor.numel() * tensor.element_size() for tensor in self.model_tensors)
        statistics = sum(4 * 4 * param.numel() for _, param in self.optimized)
        return 2 * (model + statistics) + 2**20

    @torch.no_grad()
    def digest(self) -> bytes:
        """A digest of the model's names, types, shapes and bytes: peers with the same one hold the same weights."""
        digest = hashlib.sha256()
        for name, tensor in self._named().items():
            _add(digest, name, self.read(tensor))
        return digest.digest()[:LINEAGE_BYTES]

    @torch.no_grad()
    def digest_of(self, statistics: Sequence[tuple[int, str]], tensors: Sequence[torch.Tensor]) -> bytes:
        """A digest of all that peers have in common after the same updates: with the same one, no bit differs.

        It covers the parameters and the statistics of their optimizer. It leaves out buffers, which drift apart between
        two updates and are averaged by them. It leaves out the optimizer of local steps, which is each peer's own.

        Args:
            statistics, tensors: from `held`, or from a downloaded state that was checked
        """
        digest, model, optimized = hashlib.sha256(), self.named_tensors, self.optimized
        for (name, own), tensor in zip(model.items(), tensors, strict=False):
            if isinstance(own, nn.Parameter):
                _add(digest, name, self.read(tensor))
        of_optimizers = zip(statistics, tensors[len(model) :], strict=True)
        for (index, key), tensor in sorted(of_optimizers, key=lambda statistic: statistic[0]):
            if optimized[index][1] not in self.anchors:
                _add(digest, (index, key), self.read(tensor))
        return digest.digest()[:DIGEST_BYTES]

    def places_of(self, weights: Sequence[torch.Tensor]) -> list[int]:
        """Indices of these weights in the list of tensors that is sent."""
        own = [self.anchors.get(tensor, tensor) for tensor in self.named_tensors.values()]
        places = {id(tensor): place for place, tensor in enumerate(own)}
        return [places[id(weight)] for weight in weights]

    def held(self) -> tuple[list[tuple[int, str]], list[torch.Tensor]]:
        """The names of the statistics, and all tensors, in the order of `export`. The tensors are not copied."""
        tensors = [self.anchors.get(tensor, tensor).detach() for tensor in self.named_tensors.values()]
        statistics = []
        for index, (optimizer, param) in enumerate(self.optimized):
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    statistics.append((index, key))
                    tensors.append(value.detach())
        return statistics, tensors

    @torch.no_grad()
    def export(self, step: int, lineage: bytes) -> tuple[dict, list[torch.Tensor]]:
        """Copy everything to the CPU.

        Returns:
            (description, tensors): the model's tensors first, then the optimizer's, in the described order
        """
        statistics, tensors = self.held()
        copies = [self.read(tensor).to("cpu", copy=True) for tensor in tensors]
        return {"step": step, "lineage": lineage, "statistics": statistics, "frozen": self.frozen}, copies

    @torch.no_grad()
    def take(self, description: dict, tensors: Sequence[torch.Tensor]) -> tuple[int, bytes]:
        """Take over a state that has been checked; returns its step and lineage."""
        optimized, model_tensors = self.optimized, self.model_tensors
        for own, new in zip(model_tensors, tensors[: len(model_tensors)], strict=True):
            own.copy_(new)
        for optimizer, param in optimized:
            optimizer.state[param] = {}
        for (index, key), new in zip(description["statistics"], tensors[len(model_tensors) :], strict=True):
            optimizer, param = optimized[index]
            device = "cpu" if key in COUNTS and not counts_on_device(optimizer) else param.device
            optimizer.state[param][key] = new.to(device, copy=True)
        return description["step"], description["lineage"]

    @torch.no_grad()
    def check(self, description: dict, tensors: Sequence[torch.Tensor]) -> None:
        """Check a received state.

        Raises:
            RoundFailed: it is not a state of this model, or it would break the optimizer
        """
        optimized = self.optimized
        step, statistics = self._check_description(description, optimized)
        if description.get("frozen", b"") != self.frozen:
            raise RoundFailed("the peer's frozen weights are others: start all peers with the same pretrained weights")
        model_tensors = self.model_tensors
        if len(tensors) != len(model_tensors) + len(statistics):
            raise RoundFailed("the state has another number of tensors")
        received, received_statistics = tensors[: len(model_tensors)], tensors[len(model_tensors) :]
        for own, new in zip(model_tensors, received, strict=True):
            self._check_tensor(new, (own.shape,), own.dtype)
        # There are more local steps than global ones. How many more depends on each peer's pace, so they have no bound.
        most_steps = MAX_STEP if self.anchors else step
        for (index, key), new in zip(statistics, received_statistics, strict=True):
            self._check_tensor(new, (optimized[index][1].shape, torch.Size(()), torch.Size((1,))), None)
            self._check_range(key, new, most_steps)
        self._check_kinds(statistics, received_statistics)

    def _check_kinds(self, statistics: Sequence[tuple[int, str]], received: Sequence[torch.Tensor]) -> None:
        """Check names, types and shapes of statistics: wrong ones would make the next optimizer step fail."""
        optimized, made = self.optimized, {}
        groups = [group for one in self.optimizers for group in one.param_groups for _ in group["params"]]
        by_index: dict[int, dict[str, torch.Tensor]] = {}
        for (index, key), tensor in zip(statistics, received, strict=True):
            by_index.setdefault(index, {})[key] = tensor
        for index, found in by_index.items():
            (optimizer, param), group = optimized[index], groups[index]
            kind = id(group), param.dtype, param.dim()
            if kind not in made:
                made[kind] = made_statistics(optimizer, group, param)
            if made[kind] is not None and not _are_like(found, made[kind], param):
                names = printed(", ".join(sorted(found)))[:200]
                raise RoundFailed(f"the state's statistics {names} are not this optimizer's")

    @torch.no_grad()
    def distance_to(self, tensors: Sequence[torch.Tensor]) -> float:
        """Relative distance ‖new - own‖ / ‖own‖ of the float tensors of a model whose state has been checked."""
        difference, norm = 0.0, 0.0
        for own, new in zip(self.named_tensors.values(), tensors, strict=False):
            if own.is_floating_point():
                held = self.read(self.anchors.get(own, own))
                difference += float((new.to(held.device, torch.float32) - held.float()).square().sum())
                norm += float(held.float().square().sum())
        return math.sqrt(difference / norm) if norm > 0 else 0.0

    @staticmethod
    def _check_description(
        description: dict, optimized: Sequence[tuple[torch.optim.Optimizer, torch.Tensor]]
    ) -> tuple[int, list[tuple[int, str]]]:
        try:
            step, lineage = description["step"], description["lineage"]
            statistics = [(index, key) for index, key in description["statistics"]]
        except Exception as error:
            raise RoundFailed(f"the state's description is malformed: {error!r}") from error
        num_params = len(optimized)
        if type(step) is not int or not 0 <= step <= MAX_STEP or len(statistics) > MAX_SCALARS * num_params:
            raise RoundFailed("the state's description is out of bounds")
        for index, key in statistics:
            if type(index) is not int or not 0 <= index < num_params or type(key) is not str or len(key) > 64:
                raise RoundFailed("the state's description is out of bounds")
        if type(lineage) is not bytes or len(lineage) != LINEAGE_BYTES:
            raise RoundFailed("the state's lineage is out of bounds")
        keys: dict[int, set[tuple[str, ...]]] = {}
        for index in {index for index, _ in statistics}:
            found = tuple(sorted(key for i, key in statistics if i == index))
            keys.setdefault(id(optimized[index][0]), set()).add(found)
        if any(len(different) > 1 for different in keys.values()):
            raise RoundFailed("the state's optimizer statistics are incomplete")
        return step, statistics

    @staticmethod
    def _check_tensor(tensor: torch.Tensor, shapes: Sequence[torch.Size], dtype: torch.dtype | None) -> None:
        if tensor.shape not in shapes or (dtype is not None and tensor.dtype != dtype):
            raise RoundFailed(f"the state holds a tensor of shape {tuple(tensor.shape)} that does not fit this model")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise RoundFailed("the state is not finite")

    @staticmethod
    def _check_range(key: str, tensor: torch.Tensor, most_steps: int) -> None:
        """Refuse a negative count or sum of squares, which would later turn into a complex number or NaN."""
        if key not in NEVER_NEGATIVE or not tensor.numel():
            return
        if float(tensor.min()) < 0:
            raise RoundFailed(f"the state's statistic {key} is negative")
        if key == "step" and float(tensor.max()) > most_steps:
            raise RoundFailed(f"the state's optimizer has made {float(tensor.max()):.0f} steps, and not {most_steps}")


def _are_like(found: Mapping[str, torch.Tensor], made: Mapping[str, torch.Tensor], param: torch.Tensor) -> bool:
    """Whether statistics of a parameter have the names, types and shapes of those that `made_statistics` shows."""
    for key, one in made.items():
        # A statistic of the small parameter, whose sizes are all 2, has either the parameter's shape or a fixed one.
        is_whole = one.dim() == param.dim() and one.numel() == 2 ** param.dim()
        shape = param.shape if is_whole else one.shape
        if key not in found or (found[key].dtype, found[key].shape) != (one.dtype, shape):
            return False
    return found.keys() == made.keys()


def _is_frozen(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def _add(digest, name: object, tensor: torch.Tensor) -> None:
    """Add name, type, shape and bytes of a tensor to a running hash."""
    digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
