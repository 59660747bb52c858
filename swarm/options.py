"""The options of ``python -m swarm.peer``; reading them imports nothing slow."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from recipe.durations import parse_duration
from recipe.errors import InputError
from recipe.overrides import RecipeOverrides
from recipe.presets import PRESETS


def _arg(metavar: str, default: str | None = None, text: str | None = None) -> Any:
    """How ``--help`` shows an option; ``default`` where the default itself says nothing."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else None, help=text)


@dataclass(frozen=True)
class MachineOptions:
    """This machine and you."""

    public_name: Annotated[str | None, _arg("NAME", "a random one")] = None
    """Your name, shown to the others; with the same name and --output-dir you come back as the same peer."""
    batch_size: Annotated[int | None, _arg("SAMPLES", "measured when the peer starts")] = None
    """Micro-batch: samples that this device computes at once."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    data_dir: Annotated[Path, _arg("FOLDER")] = Path("data")
    """Folder of the data set (not needed for digits)."""
    output_dir: Annotated[Path, _arg("FOLDER")] = Path("runs")
    """Metrics and checkpoints go to OUTPUT_DIR/RUN_ID/PUBLIC_NAME, the identity to OUTPUT_DIR/identities."""

    def check(self) -> None:
        """:raises InputError: a value cannot work"""
        _at_least_one(self, "batch_size")


@dataclass(frozen=True)
class LeavingOptions:
    """When to leave, whatever comes first. Ctrl-C leaves as well."""

    max_steps: Annotated[int | None, _arg("UPDATES", "the recipe's total steps")] = None
    """Leave when the swarm has made so many global updates."""
    max_time: Annotated[str | None, _arg("HH:MM:SS", "no limit")] = None
    """Leave after so long."""
    target_accuracy: Annotated[float | None, _arg("FRACTION", "none")] = None
    """Leave when the validation accuracy reaches this fraction, such as 0.95."""

    def check(self) -> None:
        """:raises InputError: a value cannot work"""
        _at_least_one(self, "max_steps")
        if self.max_time is not None:
            parse_duration(self.max_time)
        accuracy = self.target_accuracy
        if accuracy is not None and not 0 < accuracy <= 1:
            hint = f", such as {accuracy / 100:g}" if 1 < accuracy <= 100 else ""
            raise InputError(f"--target-accuracy is {accuracy:g}: give a fraction between 0 and 1{hint}.")


@dataclass(frozen=True)
class ConnectionOptions:
    """How others reach this machine."""

    port: Annotated[int, _arg("PORT", "0, any free one")] = 0
    """TCP port to listen on."""
    public_ip: Annotated[str | None, _arg("IP", "none")] = None
    """Address of your router, if it forwards --port to this machine."""
    host_maddrs: Annotated[tuple[str, ...], _arg("MULTIADDRESS ...", "/ip4/0.0.0.0/tcp/PORT")] = ()
    """Where to listen."""
    announce_maddrs: Annotated[tuple[str, ...], _arg("MULTIADDRESS ...", "those that are found")] = ()
    """Addresses to tell others."""
    identity_path: Annotated[Path | None, _arg("FILE", "OUTPUT_DIR/identities/PUBLIC_NAME.key if you give a name")] = (
        None
    )
    """Private key that fixes the peer id; made on first use."""
    client_mode: bool = False
    """Only call others, never be called (for machines that cannot be reached)."""

    def check(self) -> None:
        """:raises InputError: a value cannot work"""
        if not 0 <= self.port <= 65535:
            raise InputError(f"--port is {self.port}: give 0 (any free port) to 65535.")


@dataclass(frozen=True)
class PatienceOptions:
    """How long to wait for others."""

    min_peers: Annotated[int, _arg("PEERS")] = 1
    """Do not begin to train before so many peers are there, this one included."""
    matchmaking_time: Annotated[float, _arg("SECONDS")] = 5.0
    """How long to wait at the end of a step for peers that are missing."""
    averaging_timeout: Annotated[float, _arg("SECONDS")] = 60.0
    """Give up one averaging round after so long and try again with those who are left."""

    def check(self) -> None:
        """:raises InputError: a value cannot work"""
        _at_least_one(self, "min_peers")
        for name in ("matchmaking_time", "averaging_timeout"):
            if not 0 < getattr(self, name) <= 3600:
                raise InputError(f"--{name.replace('_', '-')} has to be more than 0 and at most 3600 seconds.")
        if self.averaging_timeout <= self.matchmaking_time:
            raise InputError(
                f"--averaging-timeout {self.averaging_timeout:g} has to be longer than --matchmaking-time "
                f"{self.matchmaking_time:g}: a round begins only when the peers have met."
            )


@dataclass(frozen=True)
class PeerOptions:
    """Train with a swarm: join one with --initial-peers, or start a new one from --recipe.

    The recipe, which has to be equal on all peers, comes from the swarm when you join one.
    """

    initial_peers: Annotated[tuple[str, ...], _arg("ADDRESS ...", "the variable INITIAL_PEERS; none: a new swarm")] = ()
    """Addresses of peers that are there already, as they print them."""
    recipe: Annotated[
        str | None, _arg("NAME", "digits", f"What a new swarm trains: {', '.join(PRESETS)}, or a recipe.json.")
    ] = None
    run_id: Annotated[str | None, _arg("NAME", "the recipe and the time")] = None
    """Name of the run; needed to join only where several runs share the addresses."""
    machine: Annotated[MachineOptions, tyro.conf.arg(name="your")] = field(default_factory=MachineOptions)
    leaving: LeavingOptions = field(default_factory=LeavingOptions)
    connection: ConnectionOptions = field(default_factory=ConnectionOptions)
    patience: PatienceOptions = field(default_factory=PatienceOptions)
    overrides: Annotated[RecipeOverrides, tyro.conf.arg(name="recipe"), tyro.conf.FlagConversionOff] = field(
        default_factory=RecipeOverrides
    )
    """Changes to the recipe of a new swarm. Each option that is left out keeps the recipe's own value."""

    @property
    def wanted_recipe(self) -> dict[str, object]:
        """The recipe's fields that were given on the command line."""
        given = {item.name: getattr(self.overrides, item.name) for item in fields(self.overrides)}
        return {name: value for name, value in given.items() if value is not None}

    def check_micro_batch(self, target_batch_size: int) -> None:
        """:raises InputError: --batch-size is more than the whole swarm needs for an update"""
        if self.machine.batch_size and self.machine.batch_size > target_batch_size:
            raise InputError(
                f"A micro-batch of {self.machine.batch_size} does not fit the target batch size of "
                f"{target_batch_size}: give --batch-size {target_batch_size} or less, or leave it out."
            )


def parse_options(arguments: list[str] | None = None, prog: str = "python -m swarm.peer") -> PeerOptions:
    """Read the command line; dashes and underscores alike.

    :raises InputError: a value that cannot work
    :raises SystemExit: status 2 for what is not an option, 0 for ``--help``
    """
    with _wide_help():
        options = tyro.cli(
            PeerOptions, args=arguments, prog=prog, config=(tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)
        )
    # Not in __post_init__: tyro would put a box with a title around the sentence.
    for group in (options.machine, options.leaving, options.connection, options.patience):
        group.check()
    return options


@contextlib.contextmanager
def _wide_help() -> Iterator[None]:
    """In a notebook or a log there is no terminal that tells its width; 80 columns are too few for the help."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        yield
        return
    os.environ["COLUMNS"] = "110"
    try:
        yield
    finally:
        del os.environ["COLUMNS"]


def _at_least_one(options: object, name: str) -> None:
    value = getattr(options, name)
    if value is not None and value < 1:
        raise InputError(f"--{name.replace('_', '-')} is {value}: it has to be at least 1.")
