"""Checkpoints that a reader sees whole or not at all, whatever happens while they are written."""

import contextlib
import io
import logging
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

logger = logging.getLogger(__name__)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside the old one and then puts it in its place.

    A full or lost disk costs the checkpoint and not the training: the old one stays, and the next one is tried when it
    is due. That is said once, until one could be written again.
    """

    def __init__(self) -> None:
        self._has_warned = False
        self._outdated: list[Path] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Called by Lightning in the first process."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        content = io.BytesIO()  # the disk's own error, not the one that torch's writer makes of it
        torch.save(checkpoint, content)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(content.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            self._has_warned = False
        except OSError as error:
            self.failed(path, error)
        finally:
            _remove(temporary)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Called by Lightning for one that is outdated; it stays until a newer one could be written."""
        self._outdated.append(Path(path))
        if not self._has_warned:
            for outdated in self._outdated:
                with contextlib.suppress(OSError):
                    super().remove_checkpoint(outdated)
            self._outdated.clear()

    def failed(self, path: Path, error: OSError) -> None:
        """The checkpoint could not be written; the one before is untouched."""
        if not self._has_warned:
            logger.warning(f"No checkpoint could be written to {path} ({error.strerror}): make room; training goes on.")
        self._has_warned = True


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:  # the folder has become unwritable
        pass
