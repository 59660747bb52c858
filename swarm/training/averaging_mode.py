"""How a swarm averages: what travels, and whether peers wait for it. All peers of a run do it in the same way."""

from __future__ import annotations

from dataclasses import dataclass, field

from recipe.config import Recipe
from recipe.errors import InputError
from swarm.averaging.compression.codec import FOR_LOCAL_STEPS, Codec
from swarm.averaging.robust_mean import Combination
from swarm.protocol.auto_mode import MODES as AUTO_MODES

MODES = ("sync", "overlap", "local", "auto")
ROBUST = ("auto", "off", "clip")


@dataclass(frozen=True)
class LocalSteps:
    """Optimizer steps that each peer makes by itself between two global updates (DiLoCo).

    Args:
        steps: local steps of each peer, where all peers are equally fast
        learning_rate: of the outer optimizer, SGD with Nesterov momentum; 1 without momentum takes over the average
        momentum: of the outer optimizer; DiLoCo's 0.9 (at a rate of 0.7) overshoots where averages arrive late
        fragments: parts of the model that are averaged in turn, one in each update; 1 for all of it

    Raises:
        InputError: a value is out of its range
    """

    steps: int = 16
    learning_rate: float = 1.0
    momentum: float = 0.0
    fragments: int = 1

    def __post_init__(self):
        if self.steps < 1 or self.learning_rate <= 0 or not 0 <= self.momentum < 1 or self.fragments < 1:
            raise InputError(
                f"{self!r} cannot work: at least 1 local step, a positive outer learning rate, a momentum from 0 to 1, "
                "at least 1 fragment."
            )

    def __str__(self) -> str:
        """A name that is equal for peers that can average with each other."""
        name = f"{self.steps}-{self.learning_rate}-{self.momentum}"
        return name if self.fragments == 1 else f"{name}-{self.fragments}"


@dataclass(frozen=True)
class Averaging:
    """What a swarm averages, and when. Make one with `sync`, `overlap`, `local` or `named`.

    Args:
        codec: how numbers travel
        overlaps: a peer computes for the next update while an average is on its way
        local_steps: peers average how far their own optimizer steps have moved the weights; None: they average
            gradients
        robust: clip limits how far a single member can move an average. off weights each member by the samples that it
            claims. auto is clip where the codec allows it
        auto: the swarm chooses the codec and the number of local steps while it trains; those given here are the first

    Raises:
        InputError: the codec does not work with the other settings
    """

    codec: Codec = field(default_factory=Codec)
    overlaps: bool = False
    local_steps: LocalSteps | None = None
    robust: str = "auto"
    auto: bool = False

    def __post_init__(self):
        if self.robust not in ROBUST:
            raise InputError(f"There is no robust {self.robust!r}: give one of {', '.join(ROBUST)}.")
        if self.robust == "clip" and self.codec.name == "powersgd":
            raise InputError("The codec powersgd cannot be clipped: set robust='off', or another codec.")
        if self.codec.name in FOR_LOCAL_STEPS and self.local_steps is None:
            raise InputError(f"The codec {self.codec.name} needs local steps: set --averaging local, or another codec.")
        if self.codec.name == "powersgd" and self.local_steps is not None and self.local_steps.fragments > 1:
            raise InputError("The codec powersgd averages whole models only: set fragments=1, or another codec.")

    @classmethod
    def sync(cls, codec: str = "none", rank: int = 8, robust: str = "auto") -> Averaging:
        """Synchronous averaging: a peer waits for the mean gradient, as if one machine had computed the whole batch.

        Args:
            codec: none (float32), fp16, int8, int4 or powersgd
            rank: columns of powersgd's thin matrices
            robust: auto, off or clip
        """
        return cls(Codec(codec, rank), robust=robust)

    @classmethod
    def overlap(cls, codec: str = "none", rank: int = 8, robust: str = "auto") -> Averaging:
        """As `sync`, but a peer computes on while a round runs, on weights that are one update old."""
        return cls(Codec(codec, rank), overlaps=True, robust=robust)

    @classmethod
    def local(
        cls,
        steps: int = 16,
        codec: str = "none",
        learning_rate: float = 1.0,
        momentum: float = 0.0,
        rank: int = 8,
        robust: str = "auto",
        fragments: int = 1,
    ) -> Averaging:
        """Peers make optimizer steps of their own, and average how far these have moved the weights (DiLoCo).

        Args:
            steps: local steps between two global updates, for each peer where all are equally fast
            learning_rate: of the outer optimizer
            momentum: of the outer optimizer
            fragments: parts of the model that are averaged in turn, one in each update
        """
        local_steps = LocalSteps(steps, learning_rate, momentum, fragments)
        return cls(Codec(codec, rank), overlaps=True, local_steps=local_steps, robust=robust)

    @classmethod
    def choosing(
        cls, codec: str = "", learning_rate: float = 1.0, momentum: float = 0.0, robust: str = "auto"
    ) -> Averaging:
        """As `local`, but the swarm measures and chooses the codec and the number of local steps (`--averaging auto`).

        Args:
            codec: must be empty or "none", since the swarm chooses it
            learning_rate: of the outer optimizer
            momentum: of the outer optimizer

        Raises:
            InputError: a codec is given
        """
        if codec not in ("", "none"):
            raise InputError(f"With --averaging auto the swarm chooses the codec: leave out {codec}.")
        first = AUTO_MODES[0]
        local_steps = LocalSteps(first.local_steps, learning_rate, momentum)
        return cls(Codec(first.codec), overlaps=True, local_steps=local_steps, robust=robust, auto=True)

    @classmethod
    def named(cls, name: str) -> Averaging:
        """The averaging of this name: a mode, or a mode and a codec, such as "sync", "overlap" or "local-int8".

        Raises:
            InputError: there is no such mode or codec, or they do not work together
        """
        mode, _, codec = name.partition("-")
        if mode not in MODES:
            raise InputError(
                f"There is no averaging {name!r}: give {', '.join(MODES)}, or one with a codec: sync-fp16."
            )
        make = cls.choosing if mode == "auto" else getattr(cls, mode)
        return make(codec=codec or "none")

    @classmethod
    def of(cls, recipe: Recipe) -> Averaging:
        """The averaging that a recipe sets."""
        if recipe.averaging == "auto":
            return cls.choosing(recipe.codec, recipe.outer_learning_rate, recipe.outer_momentum, recipe.robust)
        codec = Codec(recipe.codec, recipe.powersgd_rank)
        steps = None
        if recipe.averaging == "local":
            outer = recipe.outer_learning_rate, recipe.outer_momentum
            steps = LocalSteps(recipe.local_steps, *outer, recipe.fragments)
        return cls(codec, overlaps=recipe.averaging != "sync", local_steps=steps, robust=recipe.robust)

    @property
    def rule(self) -> Combination:
        """How reducers combine what members send."""
        clips = self.robust == "clip" or (self.robust == "auto" and self.codec.name != "powersgd")
        return Combination(clips, self.local_steps.steps if self.local_steps else 0)

    @property
    def checks_work(self) -> bool:
        """Whether members can recompute each other's work. With local steps they cannot: each has its own weights."""
        return self.rule.clips and self.local_steps is None

    @property
    def protection(self) -> str:
        """What averages are protected against, in words for the volunteer."""
        if self.rule.clips:
            checked = "compared" if self.codec.name == "topk" else "checked at random"
            return (
                f"Averages are clipped and {checked}: gradients far from those of the other members count for little, "
                "and a proven false average is undone. This needs three or more members with samples, fewer than half "
                "of them lying. Small falsifications, and those before the proven one, stay in the weights "
                "(docs/explanation/checks.md)."
            )
        why = "--robust off" if self.robust == "off" else f"codec {self.codec.name}"
        return f"Averages are not clipped ({why}): one member that sends false gradients can corrupt the run."

    def protection_of_work(self, has_shared_data: bool) -> str:
        """Whether work that members claim to have computed is checked, in words for the volunteer.

        Args:
            has_shared_data: all members train on the same samples
        """
        if self.checks_work and has_shared_data:
            return (
                "Members recompute about 1 % of each other's micro-batches, chosen at random. They leave out a member "
                "whose stated results differ (docs/explanation/checks.md says what this does not find)."
            )
        needs = "that needs --averaging sync or overlap, and clipped averages"
        why = "each member has samples of its own" if self.checks_work else needs
        return f"Members do not recompute each other's micro-batches: {why}."

    def __str__(self) -> str:
        """A name that is equal for peers that can average with each other."""
        local = self.local_steps
        if self.auto:
            return f"auto-{local.learning_rate}-{local.momentum}{'-clip' * self.rule.clips}"
        name = f"{self.codec}" if local is None else f"{self.codec}-{local}"
        return f"{name}-clip" if self.rule.clips else name
