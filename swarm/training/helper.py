"""A peer that trains nothing: it leads, reduces and donates, for a swarm of peers that cannot be called.

It makes each update from the average as all other peers do, with the same clipping, schedulers and hooks of Lightning.
So it holds the same bits. It computes no gradient, so it needs neither data nor a GPU.

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
    """An endless stream of empty batches, which Lightning draws in place of micro-batches."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield torch.empty(0), torch.empty(0)


NO_BATCHES = NoBatches()


class HelperStrategy(SwarmStrategy):
    """A helper's strategy: in place of computing a micro-batch, it waits for an event. Arguments as of the base."""

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
        """Compute nothing; keep a pause that the organiser has ordered."""
        self.coordinator.wait_while_paused()

    def _contribute(self, loss: torch.Tensor | None) -> bool:
        coordinator = self.coordinator
        # The bell rings when a peer came, a round ended or records were read. It does not ring for a download, so that
        # is polled.
        seconds = POLL_SECONDS if coordinator.catching_up.is_running else coordinator.options.timeouts.report_seconds
        coordinator.averager.signals.bell.wait(seconds)
        return coordinator.attend()
