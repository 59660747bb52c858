"""Writes into this peer's ledger what each member gave, for each update that this peer has made."""

from __future__ import annotations

import lightning as L

from swarm.ledger.ledger import Ledger


class LedgerKeeper(L.Callback):
    """Keeps a ledger while this peer trains.

    Args:
        ledger: of this peer
    """

    def __init__(self, ledger: Ledger):
        self._ledger = ledger

    def on_train_start(self, trainer, pl_module) -> None:
        self._ledger.begin()
        coordinator = trainer.strategy.coordinator
        coordinator.on_update = lambda report: self._ledger.note(report, coordinator.tracker.own.attested)

    def on_train_end(self, trainer, pl_module) -> None:
        self._ledger.close()

    def on_exception(self, trainer, pl_module, exception) -> None:
        self._ledger.close()
