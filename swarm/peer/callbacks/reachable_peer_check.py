"""Makes a client-mode peer leave when no peer is left that it could call: it would train alone unnoticed."""

from __future__ import annotations

import threading
import time

import lightning as L

PATIENCE_SECONDS = 120.0  # a server-mode peer is back by then if its machine restarts
LOOK_SECONDS = 1.0


class ReachablePeerCheck(L.Callback):
    """Makes a client-mode peer leave when no server-mode peer has been in the swarm for a while.

    Client-mode peers cannot call each other: each would wait for the others, or go on by itself for nothing. The check
    has a thread of its own, because a round that finds no peer takes long.

    Args:
        client_mode: whether this is a client-mode peer; nothing happens otherwise
        stop_requested: set to leave
    """

    def __init__(self, client_mode: bool, stop_requested: threading.Event):
        self._stop_requested = stop_requested
        self._client_mode, self._strategy = client_mode, None
        self._ended = threading.Event()
        self.complaint: str | None = None
        """What to tell the person when this peer leaves for this reason; None otherwise."""

    def setup(self, trainer, pl_module, stage) -> None:
        self._strategy = trainer.strategy
        if self._client_mode:
            threading.Thread(target=self._look, name="company", daemon=True).start()

    def teardown(self, trainer, pl_module, stage) -> None:
        self._ended.set()

    def _look(self) -> None:
        alone_since = None
        while not self._ended.wait(LOOK_SECONDS) and not self._stop_requested.is_set():
            coordinator = self._strategy.coordinator
            others = [] if coordinator is None else list(coordinator.tracker.others.values())
            if coordinator is None or any(not record.client_mode for record in others):
                alone_since = None
                continue
            alone_since = alone_since or time.monotonic()
            if time.monotonic() - alone_since >= PATIENCE_SECONDS:
                self.complaint = complaint(len(others))
                self._stop_requested.set()


def complaint(num_others: int) -> str:
    """Return what is wrong and what a person can do about it.

    Args:
        num_others: client-mode peers that are there besides this one
    """
    there = f"{num_others + 1} client-mode peers are" if num_others else "one client-mode peer is"
    return (
        f"No peer of this swarm can be called (only {there} there), and client-mode peers cannot average "
        "with each other: start a peer that can be reached, with --port 31337 on a machine where that TCP port is open "
        "or forwarded, then join again."
    )
