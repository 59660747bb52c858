"""`model.safetensors` and `config.json`, as `timm.create_model("local-dir:FOLDER", pretrained=True)` reads them."""

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
"""What timm knows of the weights that it has itself for such a model."""


def write_timm_folder(
    trained: Trained, folder: Path, class_names: Sequence[str] = (), license_name: str | None = None
) -> None:
    """Writes both files, and loads them again: the same images have to give the same logits, bit for bit.

    Args:
        trained: what is written.
        folder: there already.
        class_names: in the order of their labels; empty if they are not known.
        license_name: as the hub has it, such as "apache-2.0".

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
    """How an image becomes what the model sees, in timm's words."""
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
