"""Presets: functions that return a whole recipe each."""

import difflib
from collections.abc import Callable
from pathlib import Path

from recipe.config import Recipe
from recipe.errors import InputError


def digits() -> Recipe:
    """A small ViT on scikit-learn's handwritten digits: no download, seconds of computation, few updates.

    Measured in one process on one CPU core, seeds 0 to 4 (n = 5): validation accuracy reaches 95 % after 15 to 20
    updates and ends at 99.0 % (98.1 to 100.0 %, spread 0.7 points); 60 updates take about 16 s.
    """
    return Recipe(
        name="digits",
        model="vit_tiny_patch16_224",
        image_size=8,
        patch_size=4,
        embed_dim=128,
        depth=4,
        num_heads=4,
        initialisation="balanced",
        channels=1,
        dataset="digits",
        num_classes=10,
        learning_rate=3e-3,
        beta2=0.95,
        weight_decay=0.05,
        clip_norm=1.0,
        warmup_steps=5,
        total_steps=60,
        target_batch_size=512,
        validate_every_steps=5,
    )


def cifar10_vit_base() -> Recipe:
    """Fine-tunes a pretrained ViT-B/32 on CIFAR-10 at 224 px, the classic assignment."""
    return Recipe(
        name="cifar10-vit-base",
        model="vit_base_patch32_224",
        pretrained=True,
        image_size=224,
        dataset="cifar10",
        num_classes=10,
        augmentation="crop-flip",
        learning_rate=1e-4,
        weight_decay=0.05,
        clip_norm=1.0,
        warmup_steps=50,
        total_steps=500,
        target_batch_size=512,
        validate_every_steps=50,
        precision="bf16-mixed",
    )


def cifar10_vit_tiny() -> Recipe:
    """Trains a small ViT on CIFAR-10 from scratch at the images' own 32 px.

    Width, depth and patch size follow the usual CIFAR-sized ViTs; without pretraining they need strong augmentation
    and many passes (Steiner et al. 2021, "How to train your ViT?").
    """
    return Recipe(
        name="cifar10-vit-tiny",
        model="vit_tiny_patch16_224",
        image_size=32,
        patch_size=4,
        embed_dim=192,
        depth=9,
        num_heads=3,
        drop_path=0.1,
        dataset="cifar10",
        num_classes=10,
        augmentation="randaugment",
        learning_rate=1e-3,
        weight_decay=0.05,
        clip_norm=1.0,
        label_smoothing=0.1,
        warmup_steps=500,
        total_steps=9_000,
        target_batch_size=1024,
        validate_every_steps=250,
        precision="bf16-mixed",
    )


def imagefolder_vit_small() -> Recipe:
    """Trains a ViT-S/16 from scratch on ImageNet, or on any folder of images by class.

    The plain recipe of Beyer et al. 2022 ("Better plain ViT baselines for ImageNet-1k"): batch 1024, learning rate
    1e-3, 10,000 warm-up steps, 90 passes over 1.28 million images.
    """
    return Recipe(
        name="imagefolder-vit-small",
        model="vit_small_patch16_224",
        image_size=224,
        dataset="imagefolder",
        num_classes=1000,
        augmentation="randaugment",
        learning_rate=1e-3,
        weight_decay=0.1,
        clip_norm=1.0,
        warmup_steps=10_000,
        total_steps=112_600,
        target_batch_size=1024,
        validate_every_steps=1_251,
        precision="bf16-mixed",
    )


def synthetic() -> Recipe:
    """Random images for benchmarks: a ViT of 2.69 million parameters, enough work to time, nothing to load."""
    return Recipe(
        name="synthetic",
        model="vit_tiny_patch16_224",
        image_size=32,
        patch_size=4,
        embed_dim=192,
        depth=6,
        num_heads=3,
        dataset="synthetic",
        num_classes=10,
        learning_rate=1e-3,
        weight_decay=0.05,
        clip_norm=1.0,
        warmup_steps=10,
        total_steps=200,
        target_batch_size=1024,
        validate_every_steps=50,
    )


def glyphs() -> Recipe:
    """A ViT of 2.70 million parameters on characters of typefaces that it has not seen: `python -m recipe.glyphs`.

    Measured in a swarm of three on two busy CPU cores, seed 0 (n = 1): validation accuracy ends at 74.6 % after
    888 s, test accuracy at 70.7 %. It has not converged by then.
    """
    return Recipe(
        name="glyphs",
        model="vit_tiny_patch16_224",
        image_size=32,
        patch_size=4,
        embed_dim=192,
        depth=6,
        num_heads=3,
        initialisation="balanced",
        channels=1,
        dataset="glyphs",
        num_classes=62,
        learning_rate=2e-3,
        beta2=0.95,
        weight_decay=0.05,
        clip_norm=1.0,
        warmup_steps=20,
        total_steps=240,
        target_batch_size=256,
        validate_every_steps=120,
        precision="bf16-mixed",
    )


def docstrings() -> Recipe:
    """A small transformer encoder tells which of four Python libraries a docstring is from: bundled, no download.

    It is meant to reach 75 % of validation accuracy. Measured on two busy CPU cores, seed 0 (n = 1 each): 78.9 % in a
    swarm of three after 111 s, and in one process 78.2 % after 93 s, with 82.9 % of the test texts.
    """
    return Recipe(
        name="docstrings",
        model="transformer-encoder",
        max_tokens=64,
        embed_dim=128,
        depth=2,
        num_heads=4,
        dataset="docstrings",
        num_classes=4,
        augmentation="light",
        learning_rate=2e-3,
        weight_decay=0.05,
        clip_norm=1.0,
        warmup_steps=5,
        total_steps=40,
        target_batch_size=256,
        validate_every_steps=10,
    )


def ag_news_distilbert() -> Recipe:
    """Fine-tunes DistilBERT on AG News, four classes of news. It downloads both, and needs the extra `text`."""
    return Recipe(
        name="ag-news-distilbert",
        model="distilbert-base-uncased",
        pretrained=True,
        max_tokens=128,
        dataset="ag-news",
        num_classes=4,
        learning_rate=5e-5,
        weight_decay=0.01,
        clip_norm=1.0,
        schedule="linear",
        warmup_steps=100,
        total_steps=1_800,
        target_batch_size=128,
        validate_every_steps=200,
        precision="bf16-mixed",
    )


PRESETS: dict[str, Callable[[], Recipe]] = {
    "digits": digits,
    "glyphs": glyphs,
    "cifar10-vit-base": cifar10_vit_base,
    "cifar10-vit-tiny": cifar10_vit_tiny,
    "imagefolder-vit-small": imagefolder_vit_small,
    "synthetic": synthetic,
    "docstrings": docstrings,
    "ag-news-distilbert": ag_news_distilbert,
}


def preset(name: str) -> Recipe:
    """The recipe of the preset with this name.

    Raises:
        InputError: there is no preset of this name; the message lists them.
    """
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise InputError(f"There is no recipe {name[:64]!r}{hint}: choose one of {', '.join(PRESETS)}.")
    return PRESETS[name]()


def named_recipe(name: str) -> Recipe:
    """The recipe in the file, if the name ends with .json, or else the preset of this name.

    Raises:
        InputError: there is no such preset, or the file cannot be read or holds no recipe.
    """
    path = Path(name)
    if path.suffix != ".json":
        return preset(name)
    try:
        return Recipe.from_json(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): give a preset or a recipe.json.") from error
