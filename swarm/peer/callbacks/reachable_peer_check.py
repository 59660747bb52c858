"""Makes a client-mode peer leave when no peer is left that it could call: it would train alone unnoticed."""

from __future__ import annotations

import threading
import time

import lightning as L

from swarm.peer.rejoin import RETURN_SECONDS

PATIENCE_SECONDS = 120.0  # a server-mode peer is back by then if its machine restarts
LOOK_SECONDS = 1.0


class ReachablePeerCheck(L.Callback):
    """Makes a client-mode peer leave when no server-mode peer has been in the swarm for a while.

    Client-mode peers cannot call each other: each would wait for the others, or go on by itself for nothing. If no
    record arrives at all, this peer's own network may be away, or its clock wrong: then it has more patience. The check
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
        since, seen_alone_seconds = None, 0.0
        now = time.monotonic()
        while not self._ended.wait(LOOK_SECONDS) and not self._stop_requested.is_set():
            coordinator = self._strategy.coordinator
            others = [] if coordinator is None else list(coordinator.tracker.others.values())
            before, now = now, time.monotonic()
            if coordinator is None or any(not record.client_mode for record in others):
                since, seen_alone_seconds = None, 0.0
                continue
            since = since or now
            # Only while records arrive: when this peer's line is back, the first ones may be of client-mode peers.
            seen_alone_seconds += (now - before) if others else 0.0
            is_alone = bool(others) and seen_alone_seconds >= PATIENCE_SECONDS
            if is_alone or now - since >= RETURN_SECONDS:
                self.complaint = complaint(len(others))
                self._stop_requested.set()


def complaint(num_others: int) -> str:
    """Return what is wrong and what a person can do about it.

    Args:
        num_others: client-mode peers that are there besides this one
    """
    start_one = "with --port 31337 on a machine where that TCP port is open or forwarded, then join again."
    if not num_others:
        return (
            "No record of any peer arrives: is this machine's network or clock wrong? If not, no peer is left that can "
            f"be called: start one that can be reached, {start_one}"
        )
    return (
        f"No peer of this swarm can be called (only {num_others + 1} client-mode peers are there), and client-mode "
        f"peers cannot average with each other: start a peer that can be reached, {start_one}"
    )
