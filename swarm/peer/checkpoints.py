"""Which checkpoints a peer keeps, and which one it goes on from."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from recipe.errors import InputError
from recipe.run_folder import OWN_PREFIX, resumable
from recipe.training.checkpoint_io import best_checkpoint

logger = logging.getLogger(__name__)

KEPT_CHECKPOINTS = 3


def kept_checkpoints(folder: Path, every_steps: int) -> list[ModelCheckpoint]:
    """Callbacks that keep the best checkpoint and the last ones.

    Args:
        folder: where they go
        every_steps: global updates from one to the next
    """
    latest = ModelCheckpoint(
        folder,
        "{step}",
        monitor="step",
        mode="max",
        save_top_k=KEPT_CHECKPOINTS,
        every_n_train_steps=every_steps,
    )
    return [best_checkpoint(folder), latest]


def newest_checkpoint(folder: Path, needed: bool, data_name: str) -> tuple[Path | None, dict[str, Any] | None]:
    """Return the latest checkpoint that can be read, and the parts of it that are used; None and None without one.

    Args:
        needed: no other peer holds a state, so it is an error if all checkpoints are damaged
        data_name: class name of the data, under which a checkpoint has their position

    Raises:
        InputError: a checkpoint is needed, and all are damaged
    """
    found = resumable(folder)
    read = [(path, content) for path in found if (content := _read(path, data_name)) is not None]
    # The greatest step comes before the latest time, since a clock may have been wrong.
    for path, content in sorted(read, key=lambda one: (one[1]["global_step"], one[0].stat().st_mtime), reverse=True):
        weights = [value for value in content["state_dict"].values() if isinstance(value, torch.Tensor)]
        if all(torch.isfinite(weight).all() for weight in weights):
            return path, content
        logger.warning(f"The weights of the checkpoint {path} are not finite: it is left out")
    if found and needed:
        raise InputError(f"No checkpoint in {folder} can be read: delete the folder to begin anew.")
    return None, None


def save_own(folder: Path, step: int, save: Callable[[Path], None]) -> Path | None:
    """Save this peer's own weights of this step, and delete those that were kept before.

    Args:
        folder: of the checkpoints
        step: of the weights
        save: writes them to a path; on a full disk it writes nothing

    Returns:
        the path; None if it could not be written, so that what was kept before stays
    """
    path = folder / f"{OWN_PREFIX}{step}.ckpt"
    save(path)
    if not path.exists():
        return None
    for older in folder.glob(f"{OWN_PREFIX}*.ckpt"):
        if older != path:
            older.unlink(missing_ok=True)
    return path


def _read(path: Path, data_name: str) -> dict[str, Any] | None:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
        content = {key: checkpoint[key] for key in ("global_step", "state_dict")}
        content[data_name] = checkpoint.get(data_name)  # a helper has no data
        return content | {"global_step": int(content["global_step"]), "state_dict": dict(content["state_dict"])}
    except Exception as error:  # a pickle can fail in any way
        logger.warning(f"The checkpoint {path} cannot be read ({type(error).__name__}) and is left out")
        return None


def sweep_checkpoints(folder: Path, step: int) -> None:
    """Delete the checkpoints before `step`, where this peer goes on, except the last ones.

    Lightning never deletes a checkpoint from which a training went on: a peer that dies often would fill its disk.
    """
    names = {path: re.fullmatch(r"step=(\d+)\.ckpt", path.name) for path in folder.glob("step=*.ckpt")}
    older = sorted((int(name[1]), path) for path, name in names.items() if name and int(name[1]) < step)
    for _, path in older[: -(KEPT_CHECKPOINTS - 1)]:
        path.unlink(missing_ok=True)
