"""Counts what a peer sends and receives, and makes it leave when its owner's limit is reached."""

from __future__ import annotations

import math
import os
import threading

import lightning as L

from swarm.peer.callbacks.owners_limit import OwnersLimit
from swarm.runtime.line_use import LineUse

_EARLIER = "SWARM_TRAFFIC_BYTES"
"""Environment variable: bytes of the earlier lives of a peer that starts itself again."""


class TrafficLimit(OwnersLimit):
    """Makes the peer leave when its line has carried this much.

    Args:
        line: of this peer
        max_gb: gigabytes (10⁹ bytes) that it may carry; None for no limit
        stop_requested: set to leave
    """

    def __init__(self, line: LineUse, max_gb: float | None, stop_requested: threading.Event):
        super().__init__(stop_requested)
        self._line, self._max_bytes = line, math.inf if max_gb is None else max_gb * 1e9
        self._earlier = int(os.environ.get(_EARLIER, 0))

    @property
    def num_bytes(self) -> int:
        """Bytes sent and received since the first start."""
        return self._earlier + self._line.num_bytes

    def keep(self) -> None:
        """Keep the count for this peer's next life. Call it only before a restart: each value takes memory for good."""
        os.environ[_EARLIER] = str(self.num_bytes)

    def is_reached(self, trainer: L.Trainer) -> bool:
        return self.num_bytes >= self._max_bytes
