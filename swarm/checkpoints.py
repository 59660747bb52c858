"""Which checkpoints a peer keeps, and which one it goes on from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from recipe.data import VisionData
from recipe.errors import InputError

logger = logging.getLogger(__name__)

KEPT_CHECKPOINTS = 3


def kept_checkpoints(folder: Path, every_steps: int) -> list[ModelCheckpoint]:
    """Callbacks that keep the best checkpoint and the last ones.

    :param folder: where they go
    :param every_steps: global updates from one to the next
    """
    best = ModelCheckpoint(
        folder,
        "best",
        monitor="val/top1",
        mode="max",
        save_on_train_epoch_end=False,  # the loader never ends: at validations
        enable_version_counter=False,
    )
    latest = ModelCheckpoint(
        folder,
        "{step}",
        monitor="step",
        mode="max",
        save_top_k=KEPT_CHECKPOINTS,
        every_n_train_steps=every_steps,
    )
    return [best, latest]


def newest_checkpoint(folder: Path, needed: bool) -> tuple[Path | None, dict[str, Any] | None]:
    """The latest checkpoint that can be read, and what matters of it now; None and None if there is none.

    :param needed: nobody else holds a state: that all are damaged is an error then
    :raises InputError: all are damaged
    """
    found = sorted(folder.glob("[!.]*.ckpt"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in found:
        try:
            checkpoint = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
            if not all(torch.isfinite(tensor).all() for tensor in checkpoint["state_dict"].values()):
                raise FloatingPointError("its weights are not finite")
            return path, {key: checkpoint[key] for key in ("global_step", VisionData.__qualname__, "state_dict")}
        except Exception as error:  # a pickle can fail in any way
            logger.warning(f"The checkpoint {path} cannot be read ({type(error).__name__}) and is left out")
    if found and needed:
        raise InputError(f"No checkpoint in {folder} can be read: delete the folder to begin anew.")
    return None, None
