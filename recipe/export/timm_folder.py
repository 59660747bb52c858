"""Writes `model.safetensors` and `config.json`, as `timm.create_model("local-dir:FOLDER", pretrained=True)` reads
them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import save_for_hf

from recipe.config import Recipe
from recipe.data.augmentation import CROP_FRACTION, normalisation
from recipe.errors import InputError
from recipe.export.trained import Trained

WEIGHTS, CONFIG = "model.safetensors", "config.json"

_OF_OTHER_WEIGHTS = ("origin_url", "paper_name", "paper_ids", "notes", "description")
"""Fields that describe timm's own weights of such a model; they are emptied."""


def write_timm_folder(
    trained: Trained, folder: Path, class_names: Sequence[str] = (), license_name: str | None = None
) -> None:
    """Writes both files, and checks that timm loads them: the same images have to give the same logits, bit for bit.

    Args:
        trained: the model to write.
        folder: the target, which exists.
        class_names: names of the classes in the order of their labels; empty if they are not known.
        license_name: name of the licence on the hub, such as "apache-2.0".

    Raises:
        InputError: this version of timm does not load what it wrote.
        OSError: the folder cannot be written.
    """
    config: dict[str, Any] = {"pretrained_cfg": preprocessing(trained.recipe) | {"license": license_name}}
    config["pretrained_cfg"] |= {"tag": trained.recipe.name, **dict.fromkeys(_OF_OTHER_WEIGHTS)}
    if class_names:
        config["label_names"] = list(class_names)
    save_for_hf(trained.model, folder, model_config=config, safe_serialization=True)
    if not torch.equal(_logits_of_loaded(folder, trained.example), trained.logits(trained.example)):
        raise InputError(
            f"timm {timm.__version__} does not load {trained.recipe.model} as it was trained: pip install --upgrade "
            "timm."
        )


def preprocessing(recipe: Recipe) -> dict[str, Any]:
    """The preprocessing of images, as timm's configuration describes it."""
    mean, std = normalisation(recipe)
    return {
        "input_size": (recipe.channels, recipe.image_size, recipe.image_size),
        "mean": tuple(mean),
        "std": tuple(std),
        "interpolation": "bilinear",
        "crop_pct": CROP_FRACTION if recipe.dataset == "imagefolder" else 1.0,
        "crop_mode": "center",
    }


def _logits_of_loaded(folder: Path, images: torch.Tensor) -> torch.Tensor:
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.no_grad():
        return model(images)
