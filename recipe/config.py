"""The recipe: everything that has to agree between peers for them to train one model."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin

from recipe.errors import InputError

FORMAT = 1
"""Version of the JSON form. It is hashed into the fingerprint, so peers with different formats never meet."""

MAX_JSON_BYTES = 64 * 1024
"""A recipe arrives from strangers; a real one takes less than 1 KiB."""

ADDED_LATER = frozenset({"robust"})
"""Fields that a recipe of an earlier version lacks: they have their defaults then."""

KNOWN_MODELS = frozenset({"vit_tiny_patch16_224", "vit_base_patch32_224", "vit_small_patch16_224"})
"""The presets' models. They need no look-up, because importing timm (and torch) takes seconds."""

DIGITS_FOLDS = tuple(f"digits-fold-{number}" for number in range(1, 6))
"""Data sets of the same digits: each validates another fifth of them, so that all five validate every image once."""

_NUM_CLASSES = {"cifar10": 10, "glyphs": 62, **dict.fromkeys(("digits", *DIGITS_FOLDS), 10)}
_MAX_PATCHES_PER_SIDE = 128  # 16,384 tokens: beyond it attention fits into no volunteer's memory

_BOUNDS: dict[str, tuple[float, float]] = {
    "image_size": (4, 1024),
    "patch_size": (1, 256),
    "embed_dim": (1, 4096),
    "depth": (1, 128),
    "num_heads": (1, 128),
    "drop_path": (0.0, 0.9),
    "num_classes": (2, 100_000),
    "learning_rate": (1e-12, 100.0),
    "momentum": (0.0, 0.9999),
    "beta1": (0.0, 0.9999),
    "beta2": (0.0, 0.999999),
    "weight_decay": (0.0, 100.0),
    "clip_norm": (0.0, 1e6),
    "label_smoothing": (0.0, 0.99),
    "warmup_steps": (0, 10**7),
    "total_steps": (1, 10**7),
    "final_lr_fraction": (0.0, 1.0),
    "target_batch_size": (1, 2**20),
    "validate_every_steps": (1, 10**7),
    "powersgd_rank": (1, 1024),
    "local_steps": (1, 10**4),
    "outer_learning_rate": (1e-6, 10.0),
    "outer_momentum": (0.0, 0.9999),
    "seed": (0, 2**32 - 1),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, and how, apart from how it is distributed. All fields are plain JSON values.

    Raises:
        InputError: a value has the wrong type, is out of range, or contradicts another one. Every value is checked
            because recipes also arrive from peers that nobody knows.
    """

    name: str
    """Name of the preset this recipe started from."""
    model: str
    """timm model name, such as vit_tiny_patch16_224 or resnet50."""
    pretrained: bool = False
    """Start from timm's pretrained weights; they are downloaded once."""
    image_size: int
    """Side of the square images the model sees, in pixels."""
    patch_size: int | None = None
    """Side of a ViT patch, in pixels; without it the model's own."""
    embed_dim: int | None = None
    """Width of the ViT, in features per token; without it the model's own."""
    depth: int | None = None
    """Number of ViT blocks; without it the model's own."""
    num_heads: int | None = None
    """Attention heads per ViT block; without it the model's own."""
    initialisation: Literal["timm", "balanced"] = "timm"
    """Untrained weights: timm's own, or for a ViT balanced ones, which learn positions within tens of updates."""
    channels: Literal[1, 3] = 3
    """Colour channels of the images: 1 (grey) or 3 (RGB)."""
    drop_path: float = 0.0
    """Stochastic depth: probability of skipping a residual branch in the last block, 0 to 0.9."""
    dataset: Literal[
        *("digits", "digits-fold-1", "digits-fold-2", "digits-fold-3", "digits-fold-4", "digits-fold-5"),
        *("cifar10", "glyphs", "imagefolder", "synthetic"),
    ]
    """Which images: digits (bundled; a fold validates another fifth of all), cifar10 (downloaded), glyphs (made by a
    command), imagefolder (yours) or synthetic (for benchmarks)."""
    num_classes: int
    """Number of classes to tell apart."""
    augmentation: Literal["none", "light", "crop-flip", "randaugment"] = "none"
    """Random changes to training images: none, light (shifts), crop-flip (and mirroring), randaugment (and more)."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Update rule: adamw, or sgd with Nesterov momentum."""
    learning_rate: float
    """Highest learning rate, per global update."""
    momentum: float = 0.9
    """Momentum; sgd only."""
    beta1: float = 0.9
    """Decay of AdamW's running mean of gradients; adamw only."""
    beta2: float = 0.999
    """Decay of AdamW's running mean of squared gradients; adamw only."""
    weight_decay: float = 0.0
    """Decoupled (adamw) or L2 (sgd) weight decay; biases, norms and tokens are spared."""
    clip_norm: float = 0.0
    """Largest norm of the averaged gradient; 0 turns clipping off."""
    label_smoothing: float = 0.0
    """Share of each label that is spread over all classes, 0 to 0.99."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: int = 0
    """Length of the linear warm-up, in global updates."""
    total_steps: int
    """Length of the whole training, in global updates."""
    final_lr_fraction: float = 0.0
    """Learning rate at the end, as a fraction of the highest."""
    target_batch_size: int
    """Samples that all peers together contribute to one global update."""
    validate_every_steps: int
    """Global updates between two validations."""
    precision: Literal["32", "bf16-mixed"] = "32"
    """Number format of the computation: 32 (float32) or bf16-mixed."""
    averaging: Literal["sync", "overlap", "local"] = "sync"
    """Swarms: sync waits for averages; overlap computes on meanwhile, on old weights; local averages steps (DiLoCo)."""
    local_steps: int = 16
    """Averaging local: optimizer steps that each of equal peers makes on its own between two global updates."""
    outer_learning_rate: float = 1.0
    """Averaging local: learning rate with which the mean of what these steps changed is applied."""
    outer_momentum: float = 0.0
    """Averaging local: Nesterov momentum of that; DiLoCo's 0.9 overshoots where averages arrive a round late."""
    codec: Literal["none", "fp16", "int8", "int4", "powersgd", "topk"] = "none"
    """Swarms: how numbers travel: fp16, int8 or int4; powersgd: matrices of low rank; topk: only the largest, and with
    averaging local."""
    powersgd_rank: int = 8
    """Codec powersgd: rank of these matrices; bytes grow with it."""
    robust: Literal["auto", "off", "clip"] = "auto"
    """Swarms: clip lets no single member carry an average off; auto is clip, and off with powersgd, which cannot."""
    seed: int = 0
    """Seed of the initial weights and of the order of samples."""

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _checked_value(field.name, field.type, getattr(self, field.name)))
        _check_names(self)
        _check_model_shape(self)
        _check_data(self)
        if self.warmup_steps >= self.total_steps:
            raise InputError(
                f"The warm-up of {self.warmup_steps} steps does not end before total_steps {self.total_steps}: "
                "set --warmup-steps lower or --total-steps higher."
            )
        if self.codec == "topk" and self.averaging != "local":
            raise InputError(
                f"The codec topk needs local steps, and averaging is {self.averaging}: set --averaging local, or "
                "--codec int4."
            )
        if self.codec == "powersgd" and self.robust == "clip":
            raise InputError(
                "The codec powersgd averages thin matrices twice, which cannot be clipped: set --robust off, or "
                "--codec int8."
            )
        if self.averaging == "local" and self.local_steps > self.target_batch_size:
            raise InputError(
                f"{self.target_batch_size} samples do not make {self.local_steps} local steps: "
                "set --local-steps lower or --target-batch-size higher."
            )

    def to_json(self) -> str:
        """Canonical form: one line, keys sorted, no spaces, with the format version."""
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Recipe":
        """Reads what `to_json` wrote, from anyone.

        Raises:
            InputError: the only exception, whatever the input: too large, no JSON, another format version, missing or
                unknown fields, or values that `Recipe` refuses.
        """
        values = _parse_object(text)
        version = values.pop("format", None)
        if type(version) is not int or version != FORMAT:
            raise InputError(
                f"The recipe has format {_shown(version)} and this program reads format {FORMAT}: "
                "use the same version of swarm-vit on all peers."
            )
        expected = {field.name for field in fields(cls)}
        missing, unknown = sorted(expected - values.keys() - ADDED_LATER), sorted(values.keys() - expected)
        if missing or unknown:
            raise InputError(
                f"The recipe lacks the fields {_shown(missing)} and has the unknown fields {_shown(unknown)}: "
                "use the same version of swarm-vit on all peers."
            )
        return cls(**values)

    @property
    def fingerprint(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical JSON: equal on every machine, for equal recipes only."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def difference(self, other: "Recipe") -> dict[str, tuple[Any, Any]]:
        """Fields that differ, as {field: (mine, other's)}; empty when the recipes are equal."""
        mine, others = asdict(self), asdict(other)
        return {name: (mine[name], others[name]) for name in mine if mine[name] != others[name]}


def _parse_object(text: str | bytes) -> dict[str, Any]:
    if not isinstance(text, str | bytes) or len(text) > MAX_JSON_BYTES:
        raise InputError(f"A recipe is JSON text of at most {MAX_JSON_BYTES} bytes: give the text that to_json wrote.")
    try:
        values = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"The recipe is not valid JSON ({_shown(str(error))}): give the text that to_json wrote."
        ) from None
    if not isinstance(values, dict):
        raise InputError("The recipe is not a JSON object: give the text that to_json wrote.")
    return values


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key appears twice")
    return values


def _checked_value(name: str, annotation: Any, value: Any) -> Any:
    """The value if it has the annotated type and lies within its bounds; an int becomes a float where one is due."""
    kinds = get_args(annotation) if get_origin(annotation) is not Literal else (annotation,)
    kinds = kinds or (annotation,)
    if value is None and type(None) in kinds:
        return None
    kind = kinds[0]
    if get_origin(kind) is Literal:
        options = get_args(kind)
        if not any(type(value) is type(option) and value == option for option in options):
            raise InputError(f"{name} is {_shown(value)}: choose one of {', '.join(map(str, options))}.")
        return value
    accepted = (int, float) if kind is float else (kind,)
    if type(value) not in accepted:
        raise InputError(f"{name} is {_shown(value)}: give a value of type {kind.__name__}.")
    if name in _BOUNDS:
        low, high = _BOUNDS[name]
        if not low <= value <= high:  # also refuses NaN, which compares false
            raise InputError(f"{name} is {_shown(value)}: give a number from {low} to {high}.")
    # Adding 0.0 turns -0.0 into 0.0, which would otherwise be an equal recipe with another fingerprint.
    return float(value) + 0.0 if kind is float else value


def _check_names(recipe: Recipe) -> None:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", recipe.name):
        raise InputError(
            f"The recipe name {_shown(recipe.name)} does not work: use 1 to 64 characters of a-z, 0-9, dot and dash."
        )
    # timm also loads code-free but foreign weights from "hf-hub:" and "local-dir:"; a recipe from the network must not.
    if not re.fullmatch(r"[A-Za-z0-9_]{1,80}(\.[A-Za-z0-9_]{1,80})?", recipe.model) or not _is_timm_model(recipe.model):
        raise InputError(
            f"{_shown(recipe.model)} is no timm model{_similar_models(recipe.model)}: choose another --model."
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


def _check_model_shape(recipe: Recipe) -> None:
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


def _check_data(recipe: Recipe) -> None:
    classes = _NUM_CLASSES.get(recipe.dataset, recipe.num_classes)
    if recipe.num_classes != classes:
        raise InputError(
            f"{recipe.dataset} has {classes} classes, not {recipe.num_classes}: set --num-classes {classes}."
        )
    # Mirrored characters are others, and synthetic images have no content that more augmentation would keep.
    if recipe.dataset not in ("cifar10", "imagefolder") and recipe.augmentation not in ("none", "light"):
        raise InputError(
            f"{recipe.dataset} images cannot use augmentation {recipe.augmentation}: set --augmentation none or light."
        )


def _shown(value: Any) -> str:
    """A value in a message: escaped, so that it cannot fake lines or colours, and short."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, lists in lists
        text = "something very long"
    return text if len(text) <= 80 else text[:77] + "..."
