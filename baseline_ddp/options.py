"""The options of `baseline_ddp/train.py`; reading them imports nothing slow."""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from baseline_ddp.batching import scaled_learning_rate
from recipe.config import Recipe
from recipe.durations import parse_duration
from recipe.errors import InputError
from recipe.overrides import RecipeOverrides, apply_overrides
from recipe.presets import PRESETS, preset
from recipe.run_folder import check_name

LOGGERS = ("tensorboard", "wandb")


def _arg(metavar: str, default: str | None = None, text: str | None = None) -> Any:
    """How `--help` shows an option; `default` where the default itself says nothing."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else None, help=text)


# --precision has one value more here than in a recipe, which peers without loss scaling have to follow.
BaselineOverrides = make_dataclass(
    "BaselineOverrides",
    [(item.name, item.type, field(default=None)) for item in fields(RecipeOverrides) if item.name != "precision"],
    frozen=True,
    namespace={"__doc__": RecipeOverrides.__doc__, "__module__": __name__},
)


@dataclass(frozen=True)
class ComputeOptions:
    """How the recipe is computed."""

    strategy: Annotated[
        Literal["single", "ddp", "fsdp"] | None,
        tyro.conf.arg(metavar="{single,ddp,fsdp}", help_behavior_hint="(default: ddp if torchrun starts several)"),
    ] = None
    """How many processes train one model: one, several with copies (DDP), or several with shards (FSDP2)."""
    batch_size: Annotated[int | Literal["auto"] | None, _arg("{SAMPLES,auto}", "at most 32")] = None
    """Micro-batch: samples that a process computes at once; auto takes the largest that fits into memory."""
    precision: Annotated[
        Literal["32", "bf16-mixed", "16-mixed"] | None, _arg("{32,bf16-mixed,16-mixed}", "the recipe's")
    ] = None
    """Number format; 16-mixed scales the loss and needs a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes GPUs if there are any."""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """Scale the learning rate with the target batch size over --lr-base-batch."""
    lr_base_batch: Annotated[int | None, _arg("SAMPLES", "the preset's target batch size")] = None
    """Batch size that the learning rate was chosen for."""
    compile: bool = False
    """Compile the model with torch.compile."""
    channels_last: bool = False
    """Channels-last memory format, for convolutions on GPUs."""
    sync_batchnorm: bool = False
    """BatchNorm over the micro-batches of all processes; needs GPUs."""
    comm_hook: Literal["none", "fp16", "powersgd"] = "none"
    """Compress the gradients that DDP sends, with torch's own hooks; a resumed run starts powersgd's memory anew."""
    num_workers: Annotated[int, _arg("PROCESSES")] = 0
    """Processes per training process that load images; data sets in memory use none."""
    connect_timeout: Annotated[int, _arg("SECONDS")] = 60
    """Give up when the processes have not found each other after so long."""
    collective_timeout: Annotated[int, _arg("SECONDS")] = 300
    """Give up when another process has not answered for so long during training."""

    def check(self) -> None:
        """Raises InputError for values that cannot work."""
        for name in ("batch_size", "lr_base_batch", "connect_timeout", "collective_timeout"):
            _at_least(self, name, 1)
        _at_least(self, "num_workers", 0)


@dataclass(frozen=True)
class StopOptions:
    """When to stop, whatever comes first; all processes stop at the same step."""

    max_steps: Annotated[int | None, _arg("UPDATES", "the recipe's total steps")] = None
    """Stop after so many updates, counted from the beginning of the run."""
    max_time: Annotated[str | None, _arg("HH:MM:SS", "no limit")] = None
    """Stop after so much training; a resumed run goes on counting."""
    target_accuracy: Annotated[float | None, _arg("FRACTION", "none")] = None
    """Stop when the validation accuracy reaches this fraction, such as 0.95."""

    def check(self) -> None:
        """Raises InputError for values that cannot work."""
        _at_least(self, "max_steps", 1)
        if self.max_time is not None:
            parse_duration(self.max_time)
        accuracy = self.target_accuracy
        if accuracy is not None and not 0 < accuracy <= 1:
            hint = f", such as {accuracy / 100:g}" if 1 < accuracy <= 100 else ""
            raise InputError(f"--target-accuracy is {accuracy:g}: give a fraction between 0 and 1{hint}.")


@dataclass(frozen=True)
class FileOptions:
    """What is read and written."""

    data_dir: Annotated[Path, _arg("FOLDER")] = Path("data")
    """Folder of the data set (not needed for digits)."""
    output_dir: Annotated[Path, _arg("FOLDER")] = Path("runs")
    """Everything goes to OUTPUT_DIR/RUN_ID/NAME; several nodes need a folder that they share."""
    run_id: Annotated[str | None, _arg("NAME", "the recipe and the time")] = None
    """Name of the run."""
    name: Annotated[str | None, _arg("NAME", "strategy and processes, such as ddp-2")] = None
    """Name of the folder within the run."""
    snapshot_every: Annotated[int, _arg("UPDATES")] = 50
    """Write checkpoints/last.ckpt after so many updates."""
    resume: bool = False
    """Go on from the snapshot of --run-id; a worker that torchrun restarts does so by itself."""
    best_checkpoint_url: Annotated[str | None, _arg("URL", "none")] = None
    """Also copy the best checkpoint to any fsspec address, such as s3://bucket/best.ckpt, with its .sha256."""
    logger: Annotated[str, _arg("NAME[,NAME]")] = "tensorboard"
    """Where curves go beside metrics.jsonl: tensorboard, wandb or tensorboard,wandb."""

    def check(self) -> None:
        """Raises InputError for values that cannot work."""
        _at_least(self, "snapshot_every", 1)
        for option, name in (("--run-id", self.run_id), ("--name", self.name)):
            if name is not None:
                check_name(name, option)
        if unknown := set(self.logger_names) - set(LOGGERS):
            raise InputError(f"There is no logger {min(unknown)[:40]!r}: give --logger {', '.join(LOGGERS)} or both.")
        if self.resume and self.run_id is None:
            raise InputError(f"--resume has to know the run: give --run-id, a folder's name in {self.output_dir}.")

    @property
    def logger_names(self) -> tuple[str, ...]:
        """The names in `logger`."""
        return tuple(self.logger.split(","))


@dataclass(frozen=True)
class LaunchOptions:
    """Only for --print-launch; torchrun itself takes these options before the script's name."""

    print_launch: bool = False
    """Print the line that each node has to run, and stop."""
    nnodes: Annotated[int, _arg("NODES")] = 1
    """Number of machines."""
    nproc_per_node: Annotated[int, _arg("PROCESSES")] = 1
    """Processes per machine: one per GPU."""
    master_addr: Annotated[str | None, _arg("ADDRESS", "none")] = None
    """Name or address of the first machine, reachable from the others."""
    master_port: Annotated[int, _arg("PORT")] = 29500
    """TCP port on the first machine."""
    max_restarts: Annotated[int, _arg("TIMES")] = 0
    """How often torchrun may restart the workers when one dies."""

    def check(self) -> None:
        """Raises InputError for values that cannot work."""
        for name, least in (("nnodes", 1), ("nproc_per_node", 1), ("master_port", 1), ("max_restarts", 0)):
            _at_least(self, name, least)
        if not self.print_launch and replace(self, print_launch=True) != LaunchOptions(print_launch=True):
            raise InputError("torchrun starts the processes: put its options before the script, or add --print-launch.")


@dataclass(frozen=True)
class BaselineOptions:
    """Train a recipe on one machine or on a cluster, in one process, with DDP or with FSDP."""

    recipe: Annotated[str, _arg("NAME", text=f"What to train: {', '.join(PRESETS)}, or a recipe.json.")] = "digits"
    test: Annotated[Path | None, _arg("CHECKPOINT", "none")] = None
    """Only measure this checkpoint, of the baseline or of a swarm, on the official test split."""
    compute: ComputeOptions = field(default_factory=ComputeOptions)
    stops: StopOptions = field(default_factory=StopOptions)
    files: FileOptions = field(default_factory=FileOptions)
    launch: LaunchOptions = field(default_factory=LaunchOptions)
    overrides: Annotated[BaselineOverrides, tyro.conf.arg(name="recipe"), tyro.conf.FlagConversionOff] = field(
        default_factory=BaselineOverrides
    )
    """Changes to the recipe. Each option that is left out keeps the recipe's own value."""

    def build_recipe(self) -> Recipe:
        """The recipe with the changes of the command line, learning rate scaled.

        Raises:
            InputError: there is no such recipe, or the result is not a valid one.
        """
        base = _named_recipe(self.recipe)
        recipe = apply_overrides(base, self.overrides)
        if self.compute.precision in ("32", "bf16-mixed"):
            recipe = replace(recipe, precision=self.compute.precision)
        base_batch = self.compute.lr_base_batch or base.target_batch_size
        learning_rate = scaled_learning_rate(
            recipe.learning_rate, self.compute.lr_scaling, recipe.target_batch_size, base_batch
        )
        return replace(recipe, learning_rate=learning_rate)


def _named_recipe(name: str) -> Recipe:
    path = Path(name)
    if path.suffix != ".json":
        return preset(name)
    try:
        return Recipe.from_json(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): give a preset or a recipe.json.") from error


def parse_options(arguments: list[str] | None = None) -> BaselineOptions:
    """Reads the command line; dashes and underscores alike.

    Raises:
        InputError: a value that cannot work.
        SystemExit: status 2 for what is not an option, 0 for `--help`.
    """
    with _wide_help():
        options = tyro.cli(
            BaselineOptions,
            args=arguments,
            prog="python baseline_ddp/train.py",
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone),
        )
    # Not in __post_init__: tyro would put the sentence into a box of its own.
    for group in (options.compute, options.stops, options.files, options.launch):
        group.check()
    return options


@contextlib.contextmanager
def _wide_help() -> Iterator[None]:
    """In a log there is no terminal that tells its width; 80 columns are too few for the help."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        yield
        return
    os.environ["COLUMNS"] = "110"
    try:
        yield
    finally:
        del os.environ["COLUMNS"]


def _at_least(options: object, name: str, least: int) -> None:
    value = getattr(options, name)
    if isinstance(value, int) and value < least:
        raise InputError(f"--{name.replace('_', '-')} is {value}: it has to be at least {least}.")
