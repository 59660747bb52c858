"""The weights before the latest update, for who computes again what was computed on them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from swarm.state_sync.state_version import StateVersion


class EarlierWeights:
    """A copy, made before each update of this peer.

    Args:
        params: the model's, n numbers in all; so many are kept
        lock: nobody reads the model's weights without it
    """

    def __init__(self, params: Sequence[nn.Parameter], lock: threading.Lock):
        self._params, self._lock = params, lock
        self._kept = [param.detach().clone() for param in params]
        self.lineage = b""
        """Lineage of the weights that are kept."""
        self._lineage_after = b""

    def is_not_of(self, lineage: bytes) -> bool:
        """Whether these are not the weights from which an update has made those of this lineage."""
        return self._lineage_after != lineage

    def forget(self) -> None:
        """An update is not made here, or fails."""
        self._lineage_after = b""

    @contextlib.contextmanager
    def kept_from(self, version: StateVersion) -> Iterator[None]:
        """An update is made in here, and gets its lineage."""
        self.forget()
        with torch.no_grad():
            torch._foreach_copy_(self._kept, [param.detach() for param in self._params])
        lineage = version.lineage
        yield
        self.lineage, self._lineage_after = lineage, version.lineage

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has these weights in here, and afterwards its own again, bit by bit."""
        with self._lock:
            self._swap()
            try:
                yield
            finally:
                self._swap()
                if self._params[0].device.type == "cuda":  # who reads them next does so in another stream
                    torch.cuda.current_stream(self._params[0].device).synchronize()

    @torch.no_grad()
    def _swap(self) -> None:
        for param, kept in zip(self._params, self._kept, strict=True):
            own = param.detach().clone()
            param.copy_(kept)
            kept.copy_(own)
