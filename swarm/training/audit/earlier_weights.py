"""The weights before the latest update, on which a peer recomputes what another member computed on them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from swarm.state_sync.state_version import StateVersion


class EarlierWeights:
    """A copy of the weights, made before each update of this peer.

    Args:
        params: the model's parameters, n numbers in all; as many are kept
        lock: the lock that every reader of the model's weights holds
    """

    def __init__(self, params: Sequence[nn.Parameter], lock: threading.Lock):
        self._params, self._lock = params, lock
        self._kept = [param.detach().clone() for param in params]
        self.lineage = b""
        """Lineage of the weights that are kept."""
        self._lineage_after = b""

    def is_not_of(self, lineage: bytes) -> bool:
        """Whether the copy is not that of the weights from which an update made the weights of this lineage."""
        return self._lineage_after != lineage

    def forget(self) -> None:
        """Make the copy invalid, because an update was not made in `kept_from`, or failed."""
        self._lineage_after = b""

    @contextlib.contextmanager
    def kept_from(self, version: StateVersion) -> Iterator[None]:
        """A context for an update: keep the weights before it, and note the lineages before and after."""
        self.forget()
        with torch.no_grad():
            torch._foreach_copy_(self._kept, [param.detach() for param in self._params])
        lineage = version.lineage
        yield
        self.lineage, self._lineage_after = lineage, version.lineage

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the model has the kept weights; afterwards it has its own again, bit by bit."""
        with self._lock:
            self._swap()
            try:
                yield
            finally:
                self._swap()

    def _swap(self) -> None:
        # Storages change hands and nothing is copied: if memory ran out halfway, the model would mix two versions.
        for param, kept in zip(self._params, self._kept, strict=True):
            param.data, kept.data = kept.data, param.data
