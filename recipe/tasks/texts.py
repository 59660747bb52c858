"""The task of classifying texts, with a small transformer encoder or DistilBERT."""

from pathlib import Path
from typing import TYPE_CHECKING

from recipe.errors import InputError, shown
from recipe.tasks.task_kind import TaskKind

if TYPE_CHECKING:
    import torch
    from torch import nn

    from recipe.config import Recipe
    from recipe.text.text_data import TextData

OWN, DISTILBERT = "transformer-encoder", "distilbert-base-uncased"
KNOWN_TEXT_MODELS = frozenset({OWN, DISTILBERT})
"""The models that a recipe may name. No others are allowed: a recipe comes from strangers, and anyone can put files on
a model hub."""

_NUM_CLASSES = {"docstrings": 4, "ag-news": 4}


class Texts(TaskKind):
    """Classifies texts."""

    def check(self, recipe: "Recipe") -> None:
        """Refuses unknown models, shapes that do not fit, and fields that are for images."""
        if recipe.model not in KNOWN_TEXT_MODELS:
            raise InputError(
                f"{shown(recipe.model)} is no model for {recipe.dataset}, which has texts: set --model {OWN} or "
                f"{DISTILBERT}."
            )
        if recipe.max_tokens is None:
            raise InputError(f"{recipe.dataset} has texts, whose length is not given: set --max-tokens.")
        if recipe.image_size or recipe.patch_size or recipe.initialisation != "timm" or recipe.drop_path:
            raise InputError(
                f"{recipe.dataset} has texts: leave out --image-size, --patch-size, --initialisation and --drop-path, "
                "which are for images."
            )
        if recipe.augmentation not in ("none", "light"):
            raise InputError(f"Texts cannot use augmentation {recipe.augmentation}: set --augmentation none or light.")
        classes = _NUM_CLASSES.get(recipe.dataset, recipe.num_classes)
        if recipe.num_classes != classes:
            raise InputError(
                f"{recipe.dataset} has {classes} classes, not {recipe.num_classes}: set --num-classes {classes}."
            )
        _check_model(recipe)

    def build_model(self, recipe: "Recipe") -> "nn.Module":
        """A model that maps tokens (batch, length) to logits (batch, num_classes)."""
        if recipe.model == DISTILBERT:
            from recipe.text.distilbert import build_distilbert

            return build_distilbert(recipe)
        from recipe.text.encoder import build_encoder

        return build_encoder(recipe)

    def build_data(
        self, recipe: "Recipe", data_dir: str | Path, batch_size: int, identity: str, num_workers: int
    ) -> "TextData":
        """Texts as tokens, and their classes."""
        from recipe.text.text_data import TextData

        return TextData(recipe, data_dir, batch_size, identity, num_workers)

    def random_inputs(self, recipe: "Recipe", num_samples: int) -> "torch.Tensor":
        """Random texts of the greatest length (num_samples, max_tokens)."""
        import torch

        from recipe.text.tokens import VOCABULARY

        return torch.randint(1, VOCABULARY, (num_samples, recipe.max_tokens))

    def inputs_in_words(self, recipe: "Recipe") -> str:
        """The greatest length of a text in tokens."""
        return f"texts of {recipe.max_tokens} tokens"


def _check_model(recipe: "Recipe") -> None:
    own_shape = recipe.embed_dim or recipe.depth or recipe.num_heads
    if recipe.model == OWN and recipe.pretrained:
        raise InputError(f"There are no pretrained weights of {OWN}: set --pretrained False.")
    if recipe.model == OWN and recipe.lora_rank:
        raise InputError(f"LoRA adapts pretrained weights, and {OWN} has none: leave out --lora-rank.")
    if recipe.pretrained and own_shape:
        raise InputError(
            "Pretrained weights fit only the model's own shape: leave out --embed-dim, --depth and --num-heads, or add "
            "--pretrained False."
        )
    width, heads = recipe.embed_dim or 128, recipe.num_heads or 4
    if recipe.model == DISTILBERT:
        width, heads = recipe.embed_dim or 768, recipe.num_heads or 12
    if width % heads:
        raise InputError(
            f"embed_dim {width} does not split into {heads} heads: choose a --num-heads that divides --embed-dim."
        )
