"""The recipe: everything that has to agree between peers for them to train one model."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args, get_origin

from recipe.errors import InputError, shown
from recipe.registry import DATASETS, kind_of

FORMAT = 1
"""Version of the JSON form. It is part of the fingerprint, so peers with different formats never meet."""

MAX_JSON_BYTES = 64 * 1024
"""Largest JSON that is read: a recipe arrives from strangers, and a real one takes less than 1 KiB."""

UNWRITTEN: dict[str, Any] = {"max_tokens": None, "lora_rank": None, "fragments": 1, "slowest_line_mbps": None}
"""Fields that the JSON leaves out when they have these values, their defaults. So recipes without these fields keep
their fingerprints."""

ADDED_LATER = frozenset({"robust"}) | UNWRITTEN.keys()
"""Fields that a recipe of an earlier version may lack: they have their defaults then."""

_BOUNDS: dict[str, tuple[float, float]] = {
    "image_size": (4, 1024),
    "patch_size": (1, 256),
    "embed_dim": (1, 4096),
    "depth": (1, 128),
    "num_heads": (1, 128),
    "max_tokens": (8, 512),
    "lora_rank": (1, 256),
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
    "fragments": (1, 64),
    "outer_learning_rate": (1e-6, 10.0),
    "outer_momentum": (0.0, 0.9999),
    "slowest_line_mbps": (0.1, 100_000.0),
    "seed": (0, 2**32 - 1),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, and how, except how the training is distributed. All fields are plain JSON values.

    Raises:
        InputError: a value has the wrong type, is out of range, or contradicts another one. Every value is checked
            because recipes also arrive from unknown peers.
    """

    name: str
    """Name of the preset this recipe started from."""
    model: str
    """Images: timm model name, such as vit_tiny_patch16_224 or resnet50. Texts: transformer-encoder, or
    distilbert-base-uncased."""
    pretrained: bool = False
    """Start from pretrained weights; they are downloaded once."""
    image_size: int | None = None
    """Images: side of the squares the model sees, in pixels."""
    patch_size: int | None = None
    """Side of a ViT patch, in pixels; without it the model's own."""
    max_tokens: int | None = None
    """Texts: longest text the model sees, in tokens; the rest is cut off."""
    embed_dim: int | None = None
    """Width of the transformer, in features per token; without it the model's own."""
    depth: int | None = None
    """Number of transformer blocks; without it the model's own."""
    num_heads: int | None = None
    """Attention heads per transformer block; without it the model's own."""
    lora_rank: int | None = None
    """Texts, distilbert: freeze its weights and train LoRA adapters of this rank, and the classifier; only they travel
    in averages."""
    initialisation: Literal["timm", "balanced"] = "timm"
    """Untrained weights: timm's own, or for a ViT balanced ones, which learn positions within tens of updates."""
    channels: Literal[1, 3] = 3
    """Colour channels of the images: 1 (grey) or 3 (RGB)."""
    drop_path: float = 0.0
    """Stochastic depth: probability of skipping a residual branch in the last block, 0 to 0.9."""
    dataset: Literal[*DATASETS]
    """Which data, and so which task. Images: digits (bundled; a fold validates another fifth of all), cifar10
    (downloaded), glyphs (made by a command), imagefolder (yours) or synthetic (for benchmarks). Texts: docstrings
    (bundled), ag-news (downloaded) or csv (yours)."""
    num_classes: int
    """Number of classes to tell apart."""
    augmentation: Literal["none", "light", "crop-flip", "randaugment"] = "none"
    """Random changes to training data: none, light (shifted images, hidden words), crop-flip (and mirroring),
    randaugment (and more)."""
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
    averaging: Literal["sync", "overlap", "local", "auto"] = "sync"
    """Swarms: sync waits for averages; overlap computes on meanwhile, on old weights; local averages steps (DiLoCo);
    auto is local, and the swarm chooses codec and local steps by its measurements."""
    local_steps: int = 16
    """Averaging local: optimizer steps that each of equal peers makes on its own between two global updates."""
    fragments: int = 1
    """Averaging local: parts of the model that are averaged in turn, one with each global update (Streaming DiLoCo)."""
    outer_learning_rate: float = 1.0
    """Averaging local: learning rate that applies the mean of the changes that these steps made."""
    outer_momentum: float = 0.0
    """Averaging local: Nesterov momentum of that mean; DiLoCo's 0.9 overshoots if averages arrive a round late."""
    codec: Literal["none", "fp16", "int8", "int4", "powersgd", "topk"] = "none"
    """Swarms: how numbers travel: fp16, int8 or int4; powersgd: matrices of low rank; topk: only the largest, and with
    averaging local."""
    powersgd_rank: int = 8
    """Codec powersgd: rank of these matrices; bytes grow with it."""
    robust: Literal["auto", "off", "clip"] = "auto"
    """Swarms: clip limits what a single member can do to an average; auto is clip, but off with powersgd, which cannot
    be clipped."""
    slowest_line_mbps: float | None = None
    """Swarms: a member that sends less than this, and makes each update take three times as long, is left out after
    three updates; none is 4 Mbit/s, which lines at home carry."""
    seed: int = 0
    """Seed of the initial weights and of the order of samples."""

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _checked_value(field.name, field.type, getattr(self, field.name)))
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", self.name):
            raise InputError(
                f"The recipe name {shown(self.name)} does not work: use 1 to 64 characters of a-z, 0-9, dot and dash."
            )
        kind_of(self.dataset).check(self)
        if self.warmup_steps >= self.total_steps:
            raise InputError(
                f"The warm-up of {self.warmup_steps} steps does not end before total_steps {self.total_steps}: "
                "set --warmup-steps lower or --total-steps higher."
            )
        if self.averaging == "auto" and self.codec != "none":
            raise InputError(
                f"With averaging auto the swarm chooses the codec: leave out --codec {self.codec}, or set --averaging "
                "local."
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
        if self.fragments > 1 and self.averaging != "local":
            raise InputError(
                f"Fragments need local steps, and averaging is {self.averaging}: set --averaging local, or leave out "
                "--fragments."
            )
        if self.fragments > 1 and self.codec == "powersgd":
            raise InputError(
                "The codec powersgd averages whole models only: leave out --fragments, or set --codec int8."
            )
        if self.averaging == "local" and self.local_steps > self.target_batch_size:
            raise InputError(
                f"{self.target_batch_size} samples do not make {self.local_steps} local steps: "
                "set --local-steps lower or --target-batch-size higher."
            )

    def to_json(self) -> str:
        """The canonical JSON form: one line, keys sorted, no spaces, with the format version."""
        values = asdict(self).items()
        written = {name: value for name, value in values if name not in UNWRITTEN or value != UNWRITTEN[name]}
        return json.dumps({"format": FORMAT, **written}, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Recipe":
        """Reads a recipe that `to_json` wrote; the text may come from a stranger.

        Raises:
            InputError: the only exception, whatever the input. It is too large or no JSON, has another format version,
                lacks fields or has unknown ones, or has values that `Recipe` refuses.
        """
        values = _parse_object(text)
        version = values.pop("format", None)
        if type(version) is not int or version != FORMAT:
            raise InputError(
                f"The recipe has format {shown(version)} and this program reads format {FORMAT}: "
                "use the same version of swarm-vit on all peers."
            )
        expected = {field.name for field in fields(cls)}
        missing, unknown = sorted(expected - values.keys() - ADDED_LATER), sorted(values.keys() - expected)
        if missing or unknown:
            raise InputError(
                f"The recipe lacks the fields {shown(missing)} and has the unknown fields {shown(unknown)}: "
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
            f"The recipe is not valid JSON ({shown(str(error))}): give the text that to_json wrote."
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
    """The value, if it has the annotated type and is within its bounds; an int becomes a float where one is due."""
    kinds = get_args(annotation) if get_origin(annotation) is not Literal else (annotation,)
    kinds = kinds or (annotation,)
    if value is None and type(None) in kinds:
        return None
    kind = kinds[0]
    if get_origin(kind) is Literal:
        options = get_args(kind)
        if not any(type(value) is type(option) and value == option for option in options):
            raise InputError(f"{name} is {shown(value)}: choose one of {', '.join(map(str, options))}.")
        return value
    accepted = (int, float) if kind is float else (kind,)
    if type(value) not in accepted:
        raise InputError(f"{name} is {shown(value)}: give a value of type {kind.__name__}.")
    if name in _BOUNDS:
        low, high = _BOUNDS[name]
        if not low <= value <= high:  # also refuses NaN, for which all comparisons are false
            raise InputError(f"{name} is {shown(value)}: give a number from {low} to {high}.")
    # Adding 0.0 turns -0.0 into 0.0. Else equal recipes could have different fingerprints.
    return float(value) + 0.0 if kind is float else value
