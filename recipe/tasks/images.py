"""The task of classifying images, with timm's models."""

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from recipe.errors import InputError, shown
from recipe.registry import DIGITS_FOLDS
from recipe.tasks.task_kind import TaskKind

if TYPE_CHECKING:
    import torch
    from torch import nn

    from recipe.config import Recipe
    from recipe.data.vision_data import VisionData

KNOWN_MODELS = frozenset({"vit_tiny_patch16_224", "vit_base_patch32_224", "vit_small_patch16_224"})
"""The presets' models. They are not looked up, because importing timm (and torch) takes seconds."""

_NUM_CLASSES = {"cifar10": 10, "glyphs": 62, **dict.fromkeys(("digits", *DIGITS_FOLDS), 10)}
_MAX_PATCHES_PER_SIDE = 128  # 16,384 tokens: for more, attention needs too much memory


class Images(TaskKind):
    """Classifies images."""

    def check(self, recipe: "Recipe") -> None:
        """Refuses models that timm lacks, shapes that do not fit, and settings that the data set does not allow."""
        _check_model(recipe)
        _check_model_shape(recipe)
        _check_data(recipe)

    def build_model(self, recipe: "Recipe") -> "nn.Module":
        """timm's model: it maps images (batch, channels, image_size, image_size) to logits (batch, num_classes)."""
        from recipe.timm_model import build_timm_model

        return build_timm_model(recipe)

    def build_data(
        self, recipe: "Recipe", data_dir: str | Path, batch_size: int, identity: str, num_workers: int
    ) -> "VisionData":
        """Images and their classes."""
        from recipe.data.vision_data import VisionData

        return VisionData(recipe, data_dir, batch_size, identity, num_workers)

    def random_inputs(self, recipe: "Recipe", num_samples: int) -> "torch.Tensor":
        """Noise (num_samples, channels, image_size, image_size)."""
        import torch

        return torch.randn(num_samples, recipe.channels, recipe.image_size, recipe.image_size)

    def inputs_in_words(self, recipe: "Recipe") -> str:
        """The size of an image in pixels."""
        return f"images of {recipe.image_size} px"


def _check_model(recipe: "Recipe") -> None:
    # timm also loads weights from "hf-hub:" and "local-dir:". They hold no code, but a recipe from the network must not
    # choose them.
    if not re.fullmatch(r"[A-Za-z0-9_]{1,80}(\.[A-Za-z0-9_]{1,80})?", recipe.model) or not _is_timm_model(recipe.model):
        raise InputError(
            f"{shown(recipe.model)} is no timm model{_similar_models(recipe.model)}: choose another --model."
        )


@cache
def _is_timm_model(name: str) -> bool:
    if name in KNOWN_MODELS:
        return True
    import timm  # here because it imports torch, which takes seconds

    return timm.is_model(name)


def _similar_models(name: str) -> str:
    import difflib

    import timm

    close = difflib.get_close_matches(name[:80], timm.list_models(), n=3)
    return f" (did you mean {', '.join(close)}?)" if close else ""


def _check_model_shape(recipe: "Recipe") -> None:
    if recipe.image_size is None:
        raise InputError(f"{recipe.dataset} has images, whose size is not given: set --image-size.")
    if recipe.max_tokens or recipe.lora_rank:
        raise InputError(f"{recipe.dataset} has images: leave out --max-tokens and --lora-rank, which are for texts.")
    if recipe.patch_size and recipe.image_size % recipe.patch_size:
        raise InputError(
            f"Patches of {recipe.patch_size} px do not tile images of {recipe.image_size} px: "
            "choose a --patch-size that divides --image-size."
        )
    if recipe.embed_dim and recipe.num_heads and recipe.embed_dim % recipe.num_heads:
        raise InputError(
            f"embed_dim {recipe.embed_dim} does not split into {recipe.num_heads} heads: "
            "choose a --num-heads that divides --embed-dim."
        )
    if recipe.patch_size and recipe.image_size // recipe.patch_size > _MAX_PATCHES_PER_SIDE:
        raise InputError(
            f"Patches of {recipe.patch_size} px on images of {recipe.image_size} px need too much memory: "
            f"choose a --patch-size of at least {-(-recipe.image_size // _MAX_PATCHES_PER_SIDE)}."
        )
    own_weights = recipe.embed_dim or recipe.depth or recipe.num_heads or recipe.initialisation != "timm"
    if recipe.pretrained and own_weights:
        raise InputError(
            "Pretrained weights fit only the model's own shape and initialisation: "
            "leave out --embed-dim, --depth, --num-heads and --initialisation, or add --pretrained False."
        )


def _check_data(recipe: "Recipe") -> None:
    classes = _NUM_CLASSES.get(recipe.dataset, recipe.num_classes)
    if recipe.num_classes != classes:
        raise InputError(
            f"{recipe.dataset} has {classes} classes, not {recipe.num_classes}: set --num-classes {classes}."
        )
    # A mirrored character is another character, and synthetic images have no content that more augmentation would keep.
    if recipe.dataset not in ("cifar10", "imagefolder") and recipe.augmentation not in ("none", "light"):
        raise InputError(
            f"{recipe.dataset} images cannot use augmentation {recipe.augmentation}: set --augmentation none or light."
        )
