"""Earlier states that a peer keeps, so that all can go back to the same one."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from hivemind.utils import get_logger

from swarm.state_sync.training_state import SharedState

logger = get_logger(__name__)

KEEP_EVERY = 16
"""Updates from one state that is kept to the next; equal on all peers, or they could not name the same one."""
NUM_KEPT = 2
"""A lie is proven an update or two after it was told: by then, the newest state may already be a spoilt one."""
MAX_IN_MEMORY_BYTES = 2**26
"""Of a state. A larger one is written to disk, since two copies of it would be a lot of memory."""


@dataclass
class Kept:
    """A state.

    Args:
        description: as `SharedState.export` gives it
        tensors: of the same; or the file that they are in
    """

    description: dict
    tensors: list[torch.Tensor] | IO[bytes]

    def load(self) -> tuple[dict, list[torch.Tensor]]:
        """Raises OSError: the disk does not give it back"""
        if isinstance(self.tensors, list):
            return self.description, self.tensors
        self.tensors.seek(0)
        return self.description, torch.load(self.tensors, weights_only=True)

    def close(self) -> None:
        """Nobody goes back to it any more."""
        if not isinstance(self.tensors, list):
            self.tensors.close()


class SoundStates:
    """Of one peer: the last two that a multiple of `KEEP_EVERY` updates has made.

    All peers who have made the same updates keep the same ones. Files have no name, so that nothing stays behind.

    Args:
        state: what is kept
        folder: in which large ones are written; by default that of temporary files
    """

    def __init__(self, state: SharedState, folder: Path | None = None):
        self._state, self._folder = state, folder
        self._kept: dict[int, Kept] = {}
        self._has_complained = False

    @property
    def steps(self) -> tuple[int, ...]:
        """To which this peer can go back, in order."""
        return tuple(self._kept)

    def note(self, step: int, lineage: bytes) -> None:
        """This peer has come to a step by an update, or begins at it; whoever calls holds the lock."""
        if step % KEEP_EVERY or step in self._kept:
            return
        while len(self._kept) >= NUM_KEPT:
            self._kept.pop(next(iter(self._kept))).close()
        try:
            self._kept[step] = self._copy(step, lineage)
        except OSError as error:
            if not self._has_complained:
                self._has_complained = True
                logger.warning(f"The state of step {step} cannot be kept: {error} (said once)")

    def _copy(self, step: int, lineage: bytes) -> Kept:
        statistics, tensors = self._state.held()
        if sum(tensor.nbytes for tensor in tensors) <= MAX_IN_MEMORY_BYTES:
            return Kept(*self._state.export(step, lineage))
        file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (it lives as long as the state)
        try:
            torch.save(tensors, file)
        except RuntimeError as error:  # so it says that the disk is full
            file.close()
            raise OSError(str(error)) from error
        return Kept({"step": step, "lineage": lineage, "statistics": statistics}, file)

    def load(self, step: int) -> tuple[dict, list[torch.Tensor]] | None:
        """The description and the tensors of a state; None if this peer has none of this step."""
        try:
            return self._kept[step].load() if step in self._kept else None
        except (OSError, RuntimeError) as error:
            logger.warning(f"The state of step {step}, which was kept, cannot be read: {error}")
            return None

    def rename(self, step: int, to: int) -> None:
        """This state has become that of a later step; there is no way back from there."""
        kept = self._kept.pop(step)
        self.forget()
        self._kept[to] = kept

    def forget(self) -> None:
        """This peer has taken over a state: what it held before is not what others hold."""
        for kept in self._kept.values():
            kept.close()
        self._kept.clear()
