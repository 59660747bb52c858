"""Earlier states that a peer keeps, so that all peers can go back to the same one."""

from __future__ import annotations

import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from hivemind.utils import get_logger

from swarm.runtime.once import Once
from swarm.state_sync.training_state import SharedState

logger = get_logger(__name__)

MAX_SMALL_BYTES = 2**23
"""Largest model whose states are kept in memory. States of larger models are written to disk, and less often."""
KEEP_EVERY = 16
"""Updates from one kept state to the next. It follows from the model alone, so that all peers keep the same steps."""
NUM_KEPT = 4
"""Number of states that are kept."""
KEEP_LARGE_EVERY = 64
"""Updates from one kept state of a large model to the next. For a ViT-B this writes 16 MB per update on average."""
NUM_LARGE_KEPT = 2
"""Number of states of a large model that are kept."""


@dataclass
class Kept:
    """A kept state.

    Args:
        description: description of the state, as `SharedState.export` returns it
        tensors: its tensors, or a future of the file that they are written to
    """

    description: dict
    tensors: list[torch.Tensor] | Future[IO[bytes]]

    def load(self) -> tuple[dict, list[torch.Tensor]]:
        """Return the description and the tensors; raise OSError or RuntimeError if the file cannot be read."""
        if isinstance(self.tensors, list):
            return self.description, self.tensors
        file = self.tensors.result()
        file.seek(0)
        return self.description, torch.load(file, weights_only=True)

    def close(self) -> None:
        """Close the file, if there is one: the state is not needed any more."""
        if isinstance(self.tensors, Future) and self.tensors.exception() is None:
            self.tensors.result().close()


class SoundStates:
    """Keeps the last few states of one peer whose step is a multiple of `every`.

    All peers that have made the same updates keep the same states. Files have no name, so that none is left behind.

    Args:
        state: the state that is copied
        folder: folder for large states; by default that of temporary files
    """

    def __init__(self, state: SharedState, folder: Path | None = None):
        self._state, self._folder = state, folder
        self._is_small = sum(tensor.nbytes for tensor in state.model_tensors) <= MAX_SMALL_BYTES
        self.every, self._most = (KEEP_EVERY, NUM_KEPT) if self._is_small else (KEEP_LARGE_EVERY, NUM_LARGE_KEPT)
        self._kept: dict[int, Kept] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="states")
        self._writing: Future | None = None
        self._complaints = Once()

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the states to which this peer can go back, in order."""
        return tuple(self._kept)

    def note(self, step: int, lineage: bytes) -> None:
        """Keep the present state if its step is due: this peer made an update, or begins. The caller holds the lock."""
        if step % self.every or step in self._kept:
            return
        while len(self._kept) >= self._most:
            self._kept.pop(next(iter(self._kept))).close()
        if self._writing is not None:
            self._writing.exception()  # waits, so that no more than one copy is in memory
        description, tensors = self._state.export(step, lineage)
        if self._is_small:
            self._kept[step] = Kept(description, tensors)
        else:
            self._writing = self._writer.submit(self._write, tensors)
            self._kept[step] = Kept(description, self._writing)

    def _write(self, tensors: list[torch.Tensor]) -> IO[bytes]:
        try:
            file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (it lives as long as the state)
            torch.save(tensors, file)
        except (OSError, RuntimeError) as error:
            if self._complaints.first():
                logger.warning(f"This peer cannot keep a copy of the weights to go back to: {error} (said once)")
            raise
        return file

    def load(self, step: int) -> tuple[dict, list[torch.Tensor]] | None:
        """The description and the tensors of the state of this step; None if it is not kept or cannot be read."""
        try:
            return self._kept[step].load() if step in self._kept else None
        except (OSError, RuntimeError) as error:
            logger.warning(f"The state of step {step} cannot be read: {error}")
            self._kept.pop(step).close()  # else a group whose disks are all full would wish for it again and again
            return None

    def rename(self, step: int, to: int) -> None:
        """Keep this state as that of a later step, and drop all others."""
        kept = self._kept.pop(step)
        self.forget()
        self._kept[to] = kept

    def forget(self) -> None:
        """Drop all kept states; other peers do not hold the states that this one held before a takeover."""
        for kept in self._kept.values():
            kept.close()
        self._kept.clear()
