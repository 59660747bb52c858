"""With `--averaging auto`: keeps in the checkpoint what the swarm has chosen, for a run that goes on from there."""

from __future__ import annotations

from typing import Any

import lightning as L
import msgspec

from swarm.protocol.auto_mode import Plan
from swarm.training.strategy import SwarmStrategy


class PlanKeeper(L.Callback):
    """Keeps the plan that this peer follows. If other peers train when it comes back, their plan counts instead.

    Args:
        strategy: of this peer
    """

    def __init__(self, strategy: SwarmStrategy):
        self._strategy = strategy

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs, batch, batch_idx) -> None:
        auto = self._strategy.coordinator.control.auto
        if auto is not None:
            self._strategy.plan = auto.plan

    def state_dict(self) -> dict[str, Any]:
        plan = self._strategy.plan
        return {} if plan is None else {"plan": msgspec.to_builtins(plan)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "plan" in state_dict:
            self._strategy.plan = msgspec.convert(state_dict["plan"], Plan)
