"""What the strategy does differently if the processes of its peer share one model (`inside="fsdp"`)."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from recipe.errors import InputError
from swarm.training.averaging_mode import Averaging
from swarm.training.coordinator import Coordinator
from swarm.training.island.channel import Channel
from swarm.training.island.crew import Crew
from swarm.training.island.lost import IslandLost
from swarm.training.island.sharded.crew import ShardedCrew
from swarm.training.island.sharded.lead import ShardedLead
from swarm.training.island.sharded.peer import ShardedCoordinator

CHANGE_GRADIENTS = ("configure_gradient_clipping", "on_before_optimizer_step", "optimizer_step")
"""Hooks of a LightningModule that would see the pieces of one process only."""


class Divided:
    """The part of the strategy that differs in each process of a peer whose processes share one model.

    Args:
        averaging: how the swarm averages

    Raises:
        InputError: the mode is not sync
    """

    def __init__(self, averaging: Averaging):
        if averaging.overlaps or averaging.auto:
            raise InputError(
                "Processes that share one model (fsdp) wait for each average: give --averaging sync, or --inside ddp."
            )
        self._roots: list[torch.nn.Module] = []
        self._lead: ShardedLead | None = None
        self._clip: float | None = None
        self._kept: tuple[dict[str, Any], dict[str, Any]] | None = None
        """The whole states of the model and of the optimizer, kept for when the other processes have ended."""

    def divide(self, module: LightningModule, channel: Channel) -> None:
        """Copy the weights of the first process to all processes, and divide the model.

        Raises:
            InputError: this model cannot be divided
        """
        from swarm.training.island.sharded.division import divide  # here, because the import takes long

        channel.begin_default_group()
        channel.spread([*module.parameters(), *module.buffers()])
        self._roots = divide(module, channel.device, channel.size)
        module.to(channel.device)

    def begin(self, trainer: Trainer, optimizer: Optimizer, channel: Channel) -> None:
        """Check the training, and set it up, once Lightning has made the optimizer over the pieces.

        Raises:
            InputError: the training of pieces would not equal the training of the whole model
        """
        from swarm.training.island.sharded.division import check_optimizer

        module = trainer.lightning_module
        check_optimizer(optimizer)
        if hook := next((hook for hook in CHANGE_GRADIENTS if is_overridden(hook, module)), None):
            raise InputError(f"{hook} would see pieces of gradients only: leave it out, or take inside='ddp'.")
        if any(param.dtype != torch.float32 for param in module.parameters()):
            raise InputError("Processes that share one model need weights in float32: set precision='bf16-mixed'.")
        if trainer.gradient_clip_algorithm == "value":
            raise InputError("Gradients in pieces are clipped by norm: set gradient_clip_algorithm='norm'.")
        self._clip, trainer.gradient_clip_val = trainer.gradient_clip_val, None  # the norm is that of the whole
        warnings.filterwarnings("ignore", ".*sync_dist=True.*")  # only the first process validates
        trainer.num_sanity_val_steps = 0  # the others cannot compute along before they have begun
        if channel.is_first:
            self._lead = ShardedLead(channel, module, self._roots, optimizer)

    def coordinator(self, *arguments: Any, **options: Any) -> Coordinator:
        """Make the coordinator of the first process; arguments as in `Coordinator`."""
        coordinator = ShardedCoordinator(*arguments, lead=self._lead, clip=self._clip, **options)
        coordinator.lead(self._lead, self._lead.module)
        return coordinator

    def crew(self, channel: Channel, module: LightningModule, *arguments: Any) -> Crew:
        """Make what the other processes have in place of a coordinator; arguments as in `Crew`."""
        return ShardedCrew(channel, module, self._roots, *arguments)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Whether this process can get the whole state now."""
        return self._kept is not None or (self._lead is not None and self._lead.is_between)

    def keep(self, coordinator: ShardedCoordinator | None) -> None:
        """Keep the whole state for the last checkpoint, before the other processes end."""
        if coordinator is not None and self._lead is not None and self._lead.is_between:
            state = coordinator.version.state
            with contextlib.suppress(IslandLost):
                self._kept = state.whole(), state.whole_optimizer()

    def model_state(self, coordinator: ShardedCoordinator | None) -> dict[str, Any]:
        """The `state_dict` of the whole module."""
        return self._last[0] if coordinator is None else coordinator.version.state.whole()

    def optimizer_state(self, coordinator: ShardedCoordinator | None) -> dict[str, Any]:
        """The `state_dict` of the optimizer, with the whole of each statistic."""
        return self._last[1] if coordinator is None else coordinator.version.state.whole_optimizer()

    @property
    def _last(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if self._kept is None:
            raise IslandLost
        return self._kept

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Hand out the whole `state_dict` of an optimizer to all processes; only the first one does this."""
        if self._lead is not None:
            self._lead.load_optimizer(state)
