"""Builds a recipe's model, and checks the smallest micro-batch that it can be trained with."""

from torch import nn

from recipe.config import Recipe
from recipe.errors import InputError
from recipe.registry import kind_of


def build_model(recipe: Recipe) -> nn.Module:
    """The recipe's model: it maps inputs to logits (batch, num_classes), with equal initial weights on every machine.

    Inputs are images (batch, channels, image_size, image_size), or tokens of texts (batch, length).

    Raises:
        InputError: the model cannot be built, or its pretrained weights are not available.
    """
    return kind_of(recipe.dataset).build_model(recipe)


def fewest_samples(module: nn.Module) -> int:
    """The smallest micro-batch that a model can be trained with: 2 with BatchNorm, else 1.

    BatchNorm normalises over the samples of a micro-batch. torch refuses a single sample with a map of 1 x 1. With a
    larger map, a single sample would work, but its statistics would be those of that image alone.
    """
    return 2 if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules()) else 1


def check_samples(module: nn.Module, samples: int, model: str) -> None:
    """Raises InputError if micro-batches of `samples` samples are too small for the model."""
    if samples < fewest_samples(module):
        raise InputError(
            f"{model} normalises over its micro-batch (BatchNorm), which needs 2 samples or more: give --batch-size 2, "
            "or choose a model without it, such as a ViT."
        )
