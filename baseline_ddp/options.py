"""The options of `baseline_ddp/train.py`; reading them imports nothing slow."""

from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from baseline_ddp.batching import scaled_learning_rate
from recipe.command_line import arg, at_least, check_stops, read_options
from recipe.config import Recipe
from recipe.errors import InputError
from recipe.overrides import RecipeOverrides, apply_overrides
from recipe.presets import PRESETS, named_recipe
from recipe.run_folder import check_name

LOGGERS = ("tensorboard", "wandb")


# --precision has one value more here than in a recipe, which peers without loss scaling have to follow. --averaging,
# --codec and --robust concern peers only.
BaselineOverrides = make_dataclass(
    "BaselineOverrides",
    [
        (item.name, item.type, field(default=None))
        for item in fields(RecipeOverrides)
        if item.name not in ("precision", "averaging", "codec", "robust")
    ],
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
    batch_size: Annotated[int | Literal["auto"] | None, arg("{SAMPLES,auto}", "at most 32")] = None
    """Micro-batch: samples that a process computes at once; auto takes the largest that fits into memory."""
    precision: Annotated[
        Literal["32", "bf16-mixed", "16-mixed"] | None, arg("{32,bf16-mixed,16-mixed}", "the recipe's")
    ] = None
    """Number format; 16-mixed scales the loss and needs a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes GPUs if there are any."""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """Scale the learning rate with the target batch size over --lr-base-batch."""
    lr_base_batch: Annotated[int | None, arg("SAMPLES", "the preset's target batch size")] = None
    """Batch size that the learning rate was chosen for."""
    compile: bool = False
    """Compile the model with torch.compile."""
    channels_last: bool = False
    """Channels-last memory format, for convolutions on GPUs."""
    sync_batchnorm: bool = False
    """BatchNorm over the micro-batches of all processes; needs GPUs."""
    comm_hook: Literal["none", "fp16", "powersgd"] = "none"
    """Compress the gradients that DDP sends, with torch's own hooks; a resumed run starts powersgd's memory anew."""
    powersgd_warmup_steps: Annotated[int, arg("UPDATES")] = 10
    """Updates with plain averaging before powersgd starts, at least 2; torch recommends not too few."""
    num_workers: Annotated[int, arg("PROCESSES")] = 0
    """Processes per training process that load images; data sets in memory use none."""
    connect_timeout: Annotated[int, arg("SECONDS")] = 60
    """Give up when the processes have not found each other after this time."""
    collective_timeout: Annotated[int, arg("SECONDS")] = 300
    """Give up when another process has not answered for this time during training."""

    def check(self) -> None:
        """Raises InputError for values that cannot work."""
        at_least(self, 1, "batch_size", "lr_base_batch", "connect_timeout", "collective_timeout")
        at_least(self, 0, "num_workers")
        at_least(self, 2, "powersgd_warmup_steps")


@dataclass(frozen=True)
class StopOptions:
    """When to stop, whatever comes first; all processes stop at the same step."""

    max_steps: Annotated[int | None, arg("UPDATES", "the recipe's total steps")] = None
    """Stop after this many updates, counted from the beginning of the run."""
    max_time: Annotated[str | None, arg("HH:MM:SS", "no limit")] = None
    """Stop after so much training; a resumed run goes on counting."""
    target_accuracy: Annotated[float | None, arg("FRACTION", "none")] = None
    """Stop when the validation accuracy reaches this fraction, such as 0.95."""

    def check(self) -> None:
        """Raises InputError for values that cannot work."""
        at_least(self, 1, "max_steps")
        check_stops(self.max_time, self.target_accuracy)


@dataclass(frozen=True)
class FileOptions:
    """What is read and written."""

    data_dir: Annotated[Path, arg("FOLDER")] = Path("data")
    """Folder of the data set (not needed for digits)."""
    output_dir: Annotated[Path, arg("FOLDER")] = Path("runs")
    """Everything goes to OUTPUT_DIR/RUN_ID/NAME; several nodes need a folder that they share."""
    run_id: Annotated[str | None, arg("NAME", "the recipe and the time")] = None
    """Name of the run."""
    name: Annotated[str | None, arg("NAME", "strategy and processes, such as ddp-2")] = None
    """Name of the folder within the run."""
    snapshot_every: Annotated[int, arg("UPDATES")] = 50
    """Write checkpoints/last.ckpt each time this many updates are made."""
    resume: bool = False
    """Go on from the snapshot of --run-id; a worker that torchrun restarts does so by itself."""
    best_checkpoint_url: Annotated[str | None, arg("URL", "none")] = None
    """Also copy the best checkpoint to any fsspec address, such as s3://bucket/best.ckpt, with its .sha256."""
    logger: Annotated[str, arg("NAME[,NAME]")] = "tensorboard"
    """Where curves go beside metrics.jsonl: tensorboard, wandb or tensorboard,wandb."""

    def check(self) -> None:
        """Raises InputError for values that cannot work."""
        at_least(self, 1, "snapshot_every")
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
    nnodes: Annotated[int, arg("NODES")] = 1
    """Number of machines."""
    nproc_per_node: Annotated[int, arg("PROCESSES")] = 1
    """Processes per machine: one per GPU."""
    master_addr: Annotated[str | None, arg("ADDRESS", "none")] = None
    """Name or address of the first machine, reachable from the others."""
    master_port: Annotated[int, arg("PORT")] = 29500
    """TCP port on the first machine."""
    max_restarts: Annotated[int, arg("TIMES")] = 0
    """How often torchrun may restart the workers when one dies."""

    def check(self) -> None:
        """Raises InputError for values that cannot work."""
        at_least(self, 1, "nnodes", "nproc_per_node", "master_port")
        at_least(self, 0, "max_restarts")
        for option, value, most in (("--nnodes", self.nnodes, 10_000), ("--master-port", self.master_port, 65_535)):
            if value > most:
                raise InputError(f"{option} is {value}: it has to be at most {most}.")
        if not self.print_launch and replace(self, print_launch=True) != LaunchOptions(print_launch=True):
            raise InputError("torchrun starts the processes: put its options before the script, or add --print-launch.")


@dataclass(frozen=True)
class BaselineOptions:
    """Train a recipe on one machine or on a cluster, in one process, with DDP or with FSDP."""

    recipe: Annotated[str, arg("NAME", text=f"What to train: {', '.join(PRESETS)}, or a recipe.json.")] = "digits"
    test: Annotated[Path | None, arg("CHECKPOINT", "none")] = None
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
        """The recipe with the changes of the command line and the scaled learning rate.

        Raises:
            InputError: the recipe does not exist, or the result is not a valid one.
        """
        base = named_recipe(self.recipe)
        recipe = apply_overrides(base, self.overrides)
        if self.compute.precision in ("32", "bf16-mixed"):
            recipe = replace(recipe, precision=self.compute.precision)
        base_batch = self.compute.lr_base_batch or base.target_batch_size
        learning_rate = scaled_learning_rate(
            recipe.learning_rate, self.compute.lr_scaling, recipe.target_batch_size, base_batch
        )
        return replace(recipe, learning_rate=learning_rate)


def parse_options(arguments: list[str] | None = None) -> BaselineOptions:
    """Reads the command line; dashes and underscores are alike.

    Raises:
        InputError: a value cannot work.
        SystemExit: with status 2 for an unknown option, with 0 for `--help`.
    """
    return read_options(BaselineOptions, arguments, "python baseline_ddp/train.py")
