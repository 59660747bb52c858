"""The options of ``python -m swarm.peer``; reading them imports nothing slow."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from recipe.errors import InputError
from recipe.overrides import RecipeOverrides


@dataclass(frozen=True)
class PeerOptions:
    """Train with a swarm: join one with --initial-peers, or start a new one from --recipe.

    What has to be equal on all peers (the recipe) comes from the swarm when you join one.
    """

    initial_peers: tuple[str, ...] = ()
    """Addresses of peers that are there already (also the variable INITIAL_PEERS); none starts a new swarm."""
    recipe: str | None = None
    """Preset (digits, cifar10-vit-tiny, cifar10-vit-base, imagefolder-vit-small, synthetic) or a recipe.json to start a
    new swarm with; default digits."""
    run_id: str | None = None
    """Name of the run; needed to join only where several runs share the addresses."""
    public_name: str | None = None
    """Your name, shown to the others; with the same name and --output-dir you come back as the same peer."""
    batch_size: int | None = None
    """Micro-batch: samples that this device computes at once; default 32, or the target batch size if that is less."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    data_dir: Path = Path("data")
    """Folder of the data set (not needed for digits)."""
    output_dir: Path = Path("runs")
    """Folder for metrics, checkpoints and the identity: OUTPUT_DIR/RUN_ID/PUBLIC_NAME."""
    port: int = 0
    """TCP port to listen on; 0 takes any free one."""
    public_ip: str | None = None
    """Address of your router, if it forwards --port to this machine."""
    host_maddrs: tuple[str, ...] = ()
    """Multiaddresses to listen on; default /ip4/0.0.0.0/tcp/PORT."""
    announce_maddrs: tuple[str, ...] = ()
    """Multiaddresses to tell others instead of those that are found."""
    identity_path: Path | None = None
    """Private key that fixes the peer id; default OUTPUT_DIR/identities/PUBLIC_NAME.key if you give a name."""
    client_mode: bool = False
    """Only call others, never be called (for machines that cannot be reached)."""
    min_peers: int = 1
    """Do not begin to train before so many peers are there."""
    max_steps: int | None = None
    """Leave when the swarm has made so many global updates; default the recipe's total steps."""
    max_time: str | None = None
    """Leave after so long, as HH:MM:SS."""
    target_accuracy: float | None = None
    """Leave when validation accuracy reaches this fraction, such as 0.95."""
    matchmaking_time: float = 5.0
    """How long to wait at the end of a step for peers that are missing, in seconds."""
    averaging_timeout: float = 60.0
    """Give up one averaging round after so many seconds and try again with those who are left."""
    overrides: Annotated[RecipeOverrides, tyro.conf.OmitArgPrefixes] = field(default_factory=RecipeOverrides)
    """Changes to the recipe of a new swarm."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "min_peers", "max_steps"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} is {getattr(self, name)}: it has to be at least 1.")
        for name in ("matchmaking_time", "averaging_timeout"):
            if not 0 < getattr(self, name) <= 3600:
                raise InputError(f"--{name.replace('_', '-')} has to be more than 0 and at most 3600 seconds.")
        if self.averaging_timeout <= self.matchmaking_time:
            raise InputError(
                f"--averaging-timeout {self.averaging_timeout:g} has to be longer than --matchmaking-time "
                f"{self.matchmaking_time:g}: a round begins only when the peers have met."
            )
        if self.target_accuracy is not None and not 0 < self.target_accuracy <= 1:
            hint = f", such as {self.target_accuracy / 100:g}" if 1 < self.target_accuracy <= 100 else ""
            raise InputError(f"--target-accuracy is {self.target_accuracy:g}: give a fraction between 0 and 1{hint}.")
        if not 0 <= self.port <= 65535:
            raise InputError(f"--port is {self.port}: give 0 (any free port) to 65535.")

    @property
    def wanted_recipe(self) -> dict[str, object]:
        """The recipe's fields that were given on the command line."""
        given = {item.name: getattr(self.overrides, item.name) for item in fields(self.overrides)}
        return {name: value for name, value in given.items() if value is not None}


def parse_options(arguments: list[str] | None = None) -> PeerOptions:
    """Read the command line; dashes and underscores alike.

    :raises InputError: a value that cannot work
    :raises SystemExit: status 2 for what is not an option, 0 for ``--help``
    """
    os.environ.setdefault("COLUMNS", "110")  # help text in a notebook or a log, where there is no terminal
    return tyro.cli(PeerOptions, args=arguments, prog="python -m swarm.peer", description=PeerOptions.__doc__)
