"""Says when a peer has made its first contribution, and how long each phase of its start took."""

from __future__ import annotations

from collections.abc import Callable

import lightning as L

from swarm.peer.startup_timer import StartupTimer


class FirstContribution(L.Callback):
    """Ends the phases `state` (with `waiting` for others) and `first micro-batch` of a clock, and prints all phases.

    Args:
        clock: times the start; its earlier phases have ended
        say: prints one line
    """

    def __init__(self, clock: StartupTimer, say: Callable[[str], None]):
        self._clock, self._say = clock, say
        self._contributed = False

    def on_train_start(self, trainer, pl_module) -> None:
        self._clock.ends("state", trainer.strategy.coordinator.waited_seconds)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        coordinator = trainer.strategy.coordinator
        counts = coordinator.samples > 0 or coordinator.last_step is not None  # not dropped while catching up
        if not self._contributed and counts:
            self._contributed = True
            self._clock.ends("first micro-batch")
            self._say(str(self._clock))
