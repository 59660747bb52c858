"""Builds timm's image models with equal initial weights on every machine."""

import timm
import torch
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.utils import get_session
from torch import nn

from recipe.config import Recipe
from recipe.drop_path import make_portable
from recipe.errors import InputError, first_line
from recipe.seeding import seeded_on_cpu

_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
_VIT_SHAPE = ("patch_size", "embed_dim", "depth", "num_heads")
# Passed only where the model's constructor takes them: a ResNet, for example, is built for no particular image size.
_OPTIONAL_ARGUMENTS = ("img_size", "drop_path_rate")


def build_timm_model(recipe: Recipe) -> nn.Module:
    """A module that maps images (batch, channels, image_size, image_size) to logits (batch, num_classes).

    Weights that are not pretrained depend on `recipe.seed` alone. They are drawn on the CPU, and the caller's random
    state stays unchanged.

    Raises:
        InputError: the model does not take the recipe's ViT shape or image size, or its pretrained weights are not
            available.
    """
    if recipe.pretrained:
        _check_weights_reachable(recipe)
    with seeded_on_cpu(recipe.seed):
        module = _create(recipe, _arguments(recipe))
        if recipe.initialisation == "balanced":
            _enlarge_positions(module)
    make_portable(module)
    _check_forward(module, recipe)
    return module


def _enlarge_positions(module: nn.Module) -> None:
    """Draws position embeddings as large as the patch embeddings they are added to (both have a deviation near 1).

    With timm's 0.02, the position of a patch is hidden until the embedding has grown, which takes AdamW hundreds of
    updates. "jax" (Xavier, as in the code of Dosovitskiy et al. 2020) does the same for the narrow layers of a small
    ViT.
    """
    if isinstance(getattr(module, "pos_embed", None), nn.Parameter):
        nn.init.trunc_normal_(module.pos_embed, std=1.0)


def _arguments(recipe: Recipe) -> dict[str, int | float | str]:
    arguments = {
        "num_classes": recipe.num_classes,
        "in_chans": recipe.channels,
        "img_size": recipe.image_size,
        "drop_path_rate": recipe.drop_path or None,
        "weight_init": "jax" if recipe.initialisation == "balanced" else None,
        **{name: getattr(recipe, name) for name in _VIT_SHAPE},
    }
    return {name: value for name, value in arguments.items() if value is not None}


def _create(recipe: Recipe, arguments: dict[str, int | float | str]) -> nn.Module:
    try:
        return timm.create_model(recipe.model, pretrained=recipe.pretrained, **arguments)
    except TypeError as error:
        refused = [name for name in arguments if f"'{name}'" in str(error)]
        if "unexpected keyword argument" not in str(error) or not refused:
            raise
        return _create(recipe, _without(recipe, arguments, refused[0]))
    except (AssertionError, ValueError, RuntimeError, OSError, ArithmeticError, LookupError) as error:
        if recipe.pretrained:
            raise _weights_missing(recipe, error) from error
        raise InputError(
            f"timm cannot build {recipe.model} for {recipe.image_size} px images ({first_line(error)}): "
            "change --model, --image-size or the ViT shape."
        ) from error


def _check_weights_reachable(recipe: Recipe) -> None:
    """Checks with one request that the hub answers: a download would retry for most of a minute before it fails."""
    try:
        weights = timm.get_pretrained_cfg(recipe.model)
    except RuntimeError as error:
        raise InputError(f"timm has no weights {recipe.model} ({error}): choose another --model.") from error
    hub_id = weights.hf_hub_id if weights is not None else None
    if hub_id is None or any(isinstance(try_to_load_from_cache(hub_id, name), str) for name in _WEIGHT_FILES):
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # the hub's client changed its HTTP library, and its exceptions with it
        raise _weights_missing(recipe, error) from error


def _weights_missing(recipe: Recipe, error: Exception) -> InputError:
    return InputError(
        f"The pretrained weights of {recipe.model} cannot be loaded ({first_line(error)}): "
        "connect this machine to the network, or add --pretrained False."
    )


def _without(recipe: Recipe, arguments: dict[str, int | float | str], name: str) -> dict[str, int | float | str]:
    if name in _VIT_SHAPE:
        raise InputError(f"{recipe.model} has no {name} to set: leave out --{name.replace('_', '-')}, or choose a ViT.")
    if name == "weight_init":
        raise InputError(f"{recipe.model} has no balanced initialisation: set --initialisation timm.")
    if name == "drop_path_rate" and recipe.drop_path:
        raise InputError(f"{recipe.model} has no stochastic depth: set --drop-path 0.")
    assert name in _OPTIONAL_ARGUMENTS, f"timm's {recipe.model} refuses {name}"
    return {key: value for key, value in arguments.items() if key != name}


def _check_forward(module: nn.Module, recipe: Recipe) -> None:
    """Checks that the model computes: some accept any image size when built, and fail or see no patch when they run."""
    grid_size = getattr(getattr(module, "patch_embed", None), "grid_size", None)
    too_small = grid_size is not None and 0 in grid_size
    if not too_small:
        images = torch.zeros(1, recipe.channels, recipe.image_size, recipe.image_size)
        module.eval()
        try:
            with torch.no_grad():
                module(images)
        except (AssertionError, ValueError, RuntimeError, ArithmeticError, LookupError):
            too_small = True
        module.train()
    if too_small:
        raise InputError(
            f"{recipe.model} cannot see images of {recipe.image_size} px: set a larger --image-size, "
            "or for a ViT a smaller --patch-size."
        )
