"""A peer that trains nothing: it leads, averages and hands over the state for peers that cannot be called.

It makes each update from the average as all others do, with the same clipping, schedulers and hooks of Lightning, so it
holds the same bits. It computes no gradient, so it needs neither data nor a GPU.

    trainer = L.Trainer(strategy=HelperStrategy(256, "mine"), max_steps=20, max_epochs=-1)
    trainer.fit(MyModule(), NO_BATCHES)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from recipe.errors import InputError
from swarm.runtime.async_utils import POLL_SECONDS
from swarm.training.strategy import SwarmStrategy


class NoBatches:
    """What Lightning draws in place of micro-batches, without an end."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield torch.empty(0), torch.empty(0)


NO_BATCHES = NoBatches()


class HelperStrategy(SwarmStrategy):
    """A helper's: where others compute a micro-batch, it waits until something has happened. Arguments as there."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        if options.get("inside") is not None:
            raise InputError("A helper computes nothing: leave out inside=, and start it without torchrun.")
        self.options = replace(self.options, helps=True, min_peers=0)
        for said in (".training_step. returned .None.", ".*have no .val_dataloader."):
            warnings.filterwarnings("ignore", message=said)

    def _join(self) -> None:
        super()._join()
        self.coordinator.tracker.exchange.on_refreshed = self.coordinator.averager.signals.bell.ring

    def training_step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is computed; a pause that the organiser has ordered is kept as by all others."""
        self.coordinator.wait_while_paused()

    def _contribute(self, loss: torch.Tensor | None) -> bool:
        coordinator = self.coordinator
        # Somebody has come, a round has ended or records were read; a download tells nobody how far it is.
        seconds = POLL_SECONDS if coordinator.is_catching_up else coordinator.options.timeouts.report_seconds
        coordinator.averager.signals.bell.wait(seconds)
        return coordinator.attend()
