"""Loads the model in a checkpoint, of a peer of a swarm or of the baseline."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from recipe.config import Recipe
from recipe.errors import InputError
from recipe.registry import build_task, kind_of
from recipe.run_folder import RunFolder
from recipe.tasks.images import Images
from recipe.training.checkpoint_io import BEST, checkpoint_recipe, load_weights, read_checkpoint

PREFERRED = (BEST, "last.ckpt")
"""Checkpoints of a run folder in order of preference: that with the highest validation accuracy, then the last one."""


@dataclass(frozen=True)
class Trained:
    """A model with its trained weights.

    Args:
        model: timm's module, on the CPU, in evaluation mode.
        recipe: the recipe that it was trained with.
        step: global updates that the weights have seen.
        checkpoint: the file that the weights come from.
    """

    model: nn.Module
    recipe: Recipe
    step: int
    checkpoint: Path

    @property
    def run_folder(self) -> RunFolder | None:
        """The run folder of the checkpoint; None if it was moved out of one."""
        folder = RunFolder(self.checkpoint.absolute().parent.parent)
        return folder if folder.recipe.exists() else None

    @property
    def example(self) -> torch.Tensor:
        """Two images of noise, always the same: (2, channels, image_size, image_size)."""
        side = self.recipe.image_size
        generator = torch.Generator().manual_seed(0)
        return torch.randn(2, self.recipe.channels, side, side, generator=generator)

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """The model's logits of images: (batch, num_classes)."""
        with torch.no_grad():
            return self.model(images)


def load_trained(path: Path) -> Trained:
    """Reads a checkpoint as plain data: no code of its author runs.

    Args:
        path: a checkpoint file, or a run folder, of which the best checkpoint is taken.

    Raises:
        InputError: there is no checkpoint, or it cannot be used.
    """
    path = chosen_checkpoint(path)
    content = read_checkpoint(path)
    recipe = checkpoint_recipe(content, path)
    if not isinstance(kind_of(recipe.dataset), Images):
        raise InputError(
            f"{path} holds a model of {recipe.dataset}, and only models of images can be exported: read its weights "
            "with torch.load."
        )
    # So building needs no network and no random state: the weights are replaced anyway.
    task = build_task(replace(recipe, pretrained=False, initialisation="timm", drop_path=0.0))
    load_weights(task, content, path)
    return Trained(task.model.eval(), recipe, content["global_step"], path)


def chosen_checkpoint(path: Path) -> Path:
    """The checkpoint file itself, or of a run folder the best checkpoint, or else the last one.

    Raises:
        InputError: the folder has no checkpoint.
    """
    path = path.expanduser()
    if not path.is_dir():
        return path
    folder = RunFolder(path)
    for name in PREFERRED:
        if (folder.checkpoints / name).exists():
            return folder.checkpoints / name
    steps = sorted(folder.checkpoints.glob("step=*.ckpt"), key=lambda file: file.stat().st_mtime)
    if steps:
        return steps[-1]
    peers = sorted(file.parent.parent.name for file in path.glob("*/checkpoints/*.ckpt"))
    hint = f"name one of its peers, such as {path / peers[0]}" if peers else "name runs/RUN_ID/NAME, or a .ckpt file"
    raise InputError(f"There is no checkpoint in {path / folder.checkpoints.name}: {hint}.")
