"""Writes checkpoints so that a reader sees each one whole or not at all, and reads them."""

import contextlib
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn

from recipe.config import Recipe
from recipe.errors import InputError
from recipe.run_folder import RunFolder, whole_file

logger = logging.getLogger(__name__)

BEST = "best.ckpt"
"""File name of the checkpoint with the highest validation accuracy.

Test images do not choose it: their accuracy would be biased upwards then.
"""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside the old one and then puts it in its place.

    If the disk is full or gone, this checkpoint is lost and the training goes on. The old checkpoint stays, and the
    next one is tried when it is due. One warning says so, and no more until a checkpoint could be written again.

    Args:
        on_saved: called with the path of each checkpoint after it was written; None for no call.
    """

    def __init__(self, on_saved: Callable[[Path], None] | None = None) -> None:
        self.on_saved = on_saved
        self._has_warned = False
        self._outdated: list[Path] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Writes a checkpoint; Lightning calls it in the first process."""
        path = Path(path)
        content = io.BytesIO()  # so that writing raises the disk's own error, not that of torch's writer
        torch.save(checkpoint, content)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as file:
                file.write(content.getbuffer())
            self._has_warned = False
            if self.on_saved is not None:
                self.on_saved(path)
        except OSError as error:
            self.failed(path, error)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes an outdated checkpoint, for Lightning. It stays until a newer one could be written."""
        self._outdated.append(Path(path))
        if not self._has_warned:
            for outdated in self._outdated:
                with contextlib.suppress(OSError):
                    super().remove_checkpoint(outdated)
            self._outdated.clear()

    def failed(self, path: Path, error: OSError) -> None:
        """Warns that a checkpoint could not be written; the previous one is untouched."""
        if not self._has_warned:
            logger.warning(f"No checkpoint could be written to {path} ({error.strerror}): make room; training goes on.")
        self._has_warned = True


class BestCheckpoint(ModelCheckpoint):
    """Keeps the best score when the run folder is moved, or mounted elsewhere. Lightning forgets it then, and the next
    validation overwrites the checkpoint."""

    @property
    def state_key(self) -> str:
        """The key of Lightning's own class, under which earlier snapshots have the state as well."""
        return super().state_key.replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state over, with all files in the folder where they are now."""
        names = ("best_model_path", "kth_best_model_path", "last_model_path")
        paths = {name: self._here(state_dict[name]) for name in names}
        scores = {self._here(path): score for path, score in state_dict["best_k_models"].items()}
        super().load_state_dict({**state_dict, **paths, "dirpath": self.dirpath, "best_k_models": scores})

    def _here(self, path: str) -> str:
        return path and str(Path(self.dirpath, Path(path).name))


def best_checkpoint(folder: Path) -> ModelCheckpoint:
    """The callback that writes the checkpoint `BEST`.

    Args:
        folder: folder of the checkpoint.
    """
    return BestCheckpoint(
        folder,
        BEST.removesuffix(".ckpt"),
        monitor="val/top1",
        mode="max",
        save_on_train_epoch_end=False,  # the loader never ends, so save at validations
        enable_version_counter=False,
    )


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a Lightning checkpoint of a `ClassificationTask` as plain data: loading it runs no code of its author.

    Raises:
        InputError: the file is missing, damaged, or no checkpoint of a training.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise InputError(f"The checkpoint {path} cannot be read ({error.strerror}): name another file.") from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise InputError(
            f"{path} is no checkpoint, or is damaged ({type(error).__name__}): name a .ckpt file of this project."
        ) from error
    if not isinstance(checkpoint, dict) or not {"state_dict", "global_step"} <= checkpoint.keys():
        raise InputError(f"{path} is no checkpoint of a training: name a .ckpt file of this project.")
    if type(step := checkpoint["global_step"]) is not int or step < 0:
        raise InputError(f"{path} does not say after which update it was made: name another file.")
    return checkpoint


def checkpoint_recipe(checkpoint: dict[str, Any], path: Path) -> Recipe:
    """The recipe in the checkpoint, or else that of the run folder that holds the checkpoint.

    Raises:
        InputError: neither has a recipe.
    """
    beside = RunFolder(path.absolute().parent.parent).recipe
    if isinstance(text := checkpoint.get("recipe"), str):
        return Recipe.from_json(text)
    if beside.exists():
        return Recipe.from_json(beside.read_bytes())
    raise InputError(f"{path} does not say which recipe it is of: put the run's recipe.json into {beside.parent}.")


def load_weights(task: nn.Module, checkpoint: dict[str, Any], path: Path) -> None:
    """Loads the weights of a checkpoint, of a swarm or of the baseline, into a task.

    Args:
        task: a `ClassificationTask`.
        checkpoint: as `read_checkpoint` returns it.
        path: its file, for messages.

    Raises:
        InputError: the weights are of another model, or not finite.
    """
    try:
        task.load_state_dict(checkpoint["state_dict"])
    except (RuntimeError, TypeError, AttributeError) as error:
        raise InputError(f"{path} does not hold the weights of this recipe's model: name another file.") from error
    if not all(torch.isfinite(tensor).all() for tensor in task.state_dict().values()):
        raise InputError(f"The weights in {path} are not finite: name another file.")
