"""The options of `python -m swarm.peer`; reading them imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from recipe.command_line import arg, at_least, check_port, check_stops, read_options
from recipe.config import Recipe
from recipe.durations import parse_duration
from recipe.errors import InputError
from recipe.overrides import RecipeOverrides, apply_overrides
from recipe.presets import PRESETS, named_recipe
from recipe.training.compiler import check_compiler
from swarm.network.home.sparing import never_spared, why_spared
from swarm.peer.startup_timer import seconds_since_command

MAX_INVITE_DAYS = 3650
MIN_UPLOAD_MBPS = 4.0
"""Least limit of the upload: twice the rate for which a round has time, since a peer sends more than its rounds."""
UPLOAD_SECONDS = 300.0
"""How long a peer that ends waits for what `--upload-to` has not copied yet."""


@dataclass(frozen=True)
class MachineOptions:
    """This machine and you."""

    public_name: Annotated[str | None, arg("NAME", "a random one")] = None
    """Your name, shown to other volunteers. With the same name and --output-dir you come back as the same peer."""
    batch_size: Annotated[int | None, arg("SAMPLES", "measured when the peer starts")] = None
    """Micro-batch: samples that this device computes at once."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    data_dir: Annotated[Path, arg("FOLDER")] = Path("data")
    """Folder of the data set (not needed for digits)."""
    output_dir: Annotated[Path, arg("FOLDER")] = Path("runs")
    """Metrics and checkpoints go to OUTPUT_DIR/RUN_ID/PUBLIC_NAME, the identity to OUTPUT_DIR/identities."""
    hide_device: bool = False
    """Do not tell other peers on which device this peer computes."""

    def check(self) -> None:
        """Raises InputError: a value cannot work"""
        at_least(self, 1, "batch_size")


@dataclass(frozen=True)
class ComputingOptions:
    """How this peer computes."""

    inside: Literal["ddp", "fsdp"] = "ddp"
    """For a peer that torchrun starts as several processes. Each process holds the whole model (ddp) or a piece of it
    (fsdp). fsdp needs --averaging sync and --batch-size."""
    compile: bool = False
    """Compile the model with torch.compile. This may be faster on GPUs (no gain was measured with a ViT-B on an H200),
    but the first micro-batch takes a minute or so. It does not work with --inside fsdp."""
    num_workers: Annotated[int, arg("PROCESSES")] = 0
    """Processes that read and decode images. Data sets that lie in memory, such as digits, need none."""

    def check(self) -> None:
        """Raises InputError: a value cannot work"""
        at_least(self, 0, "num_workers")
        if self.compile:
            check_compiler()
        if self.compile and self.inside == "fsdp":
            raise InputError("--compile does not go with --inside fsdp: leave one of them out.")


@dataclass(frozen=True)
class RoleOptions:
    """What this peer does."""

    role: Literal["trainer", "helper"] = "trainer"
    """A helper trains nothing, so it needs no data and no GPU, but a port that other peers can call. It averages for
    the training peers, hands over the weights and keeps checkpoints. With a helper, a swarm can train even if all
    volunteers are behind routers."""
    data_digest: Annotated[str | None, arg("TEXT", "that of the data in --data-dir, if they are there")] = None
    """For a helper that starts a run without the data: digest of the data that the volunteers have. swarm doctor
    --check-images shows the digest of a folder of images."""
    desk_port: Annotated[int | None, arg("PORT", "no page")] = None
    """Also show the run on a web page at this port. The page is that of swarm desk, in a process of its own."""
    desk_host: Annotated[str, arg("ADDRESS")] = "127.0.0.1"
    """Address at which that page is served. With 0.0.0.0, every machine that can reach this one can see the page."""

    @property
    def helps(self) -> bool:
        """Whether this peer is a helper."""
        return self.role == "helper"

    def check(self) -> None:
        """Raises InputError: a value cannot work"""
        if self.data_digest is not None and not self.helps:
            raise InputError("--data-digest is for a helper, which has no data: leave it out, or add --role helper.")
        check_port("--desk-port", self.desk_port or 0)


@dataclass(frozen=True)
class LeavingOptions:
    """When to leave: the first of these that happens. Ctrl-C leaves as well."""

    max_steps: Annotated[int | None, arg("UPDATES", "the recipe's total steps")] = None
    """Leave when the swarm has made this many global updates, before the end of the run."""
    max_time: Annotated[str | None, arg("HH:MM:SS", "no limit")] = None
    """Leave this long after the command was given; joining and pauses count."""
    target_accuracy: Annotated[float | None, arg("FRACTION", "none")] = None
    """Leave when the validation accuracy reaches this fraction, such as 0.95."""
    max_traffic_gb: Annotated[float | None, arg("GB", "no limit")] = None
    """Leave when rounds and states have sent and received this many GB (10⁹ bytes, both together). The round that is
    under way is completed. Data sets and progress records are not counted."""
    pause_on_battery: bool = False
    """Leave while this machine runs on its battery, and come back afterwards."""
    pause_on_metered: bool = False
    """Leave while this machine's internet line is metered (it costs by the byte), and come back afterwards. This works
    only on Linux with NetworkManager."""

    @property
    def is_time_up(self) -> bool:
        """Whether the time of `--max-time` is over."""
        return self.max_time is not None and seconds_since_command() >= parse_duration(self.max_time).total_seconds()

    @property
    def why_spared(self) -> str:
        """Why this machine is to be spared now, as the beginning of a sentence; empty if it is not."""
        return why_spared(self.pause_on_battery, self.pause_on_metered)

    @property
    def never_spared(self) -> list[str]:
        """Sentences that say which of the wanted pauses never come on this machine."""
        return never_spared(self.pause_on_battery, self.pause_on_metered)

    def check(self) -> None:
        """Raises InputError: a value cannot work"""
        at_least(self, 1, "max_steps")
        check_stops(self.max_time, self.target_accuracy)
        if self.max_traffic_gb is not None and not self.max_traffic_gb > 0:
            raise InputError(f"--max-traffic-gb is {self.max_traffic_gb:g}: it has to be more than 0.")


@dataclass(frozen=True)
class ConnectionOptions:
    """How other peers reach this machine."""

    port: Annotated[int, arg("PORT", "0, any free one")] = 0
    """TCP port to listen on."""
    public_ip: Annotated[str | None, arg("IP", "none")] = None
    """Public address of your router, if it forwards --port to this machine."""
    host_maddrs: Annotated[tuple[str, ...], arg("MULTIADDRESS ...", "any address, IPv4 and IPv6")] = ()
    """Addresses to listen on."""
    announce_maddrs: Annotated[tuple[str, ...], arg("MULTIADDRESS ...", "those that are found")] = ()
    """Addresses of this peer to tell other peers."""
    identity_path: Annotated[Path | None, arg("FILE", "OUTPUT_DIR/identities/PUBLIC_NAME.key")] = None
    """File of the private key that fixes the peer id; made on first use."""
    port_mapping: bool = True
    """Ask the router of this home to open --port (UPnP, NAT-PMP) until this peer ends."""
    client_mode: bool = False
    """Only call other peers, never be called (for machines that cannot be reached)."""
    max_upload_mbps: Annotated[float | None, arg("MBIT/S", "as fast as the line is")] = None
    """Send no faster than this, so that your line stays usable for you. With less than 5, the other peers may leave
    this peer out if they are far faster."""

    def check(self) -> None:
        """Raises InputError: a value cannot work"""
        check_port("--port", self.port)
        if self.max_upload_mbps is not None and not self.max_upload_mbps >= MIN_UPLOAD_MBPS:
            raise InputError(
                f"--max-upload-mbps is {self.max_upload_mbps:g}: give {MIN_UPLOAD_MBPS:g} or more, because rounds with "
                "a slower peer fail."
            )


@dataclass(frozen=True)
class PatienceOptions:
    """How long to wait for other peers."""

    min_peers: Annotated[int, arg("PEERS")] = 1
    """Do not begin to train before this many peers are there, this one included."""
    matchmaking_time: Annotated[float, arg("SECONDS")] = 5.0
    """How long to wait at the end of a step for peers that are missing."""
    averaging_timeout: Annotated[float, arg("SECONDS")] = 60.0
    """Give up an averaging round after this time, or after the time that a line of 2 Mbit/s needs, if that is longer.
    Then try again with the peers that are left."""

    def check(self) -> None:
        """Raises InputError: a value cannot work"""
        at_least(self, 1, "min_peers")
        for name in ("matchmaking_time", "averaging_timeout"):
            if not 0 < getattr(self, name) <= 3600:
                raise InputError(f"--{name.replace('_', '-')} has to be more than 0 and at most 3600 seconds.")
        if self.averaging_timeout <= self.matchmaking_time:
            raise InputError(
                f"--averaging-timeout {self.averaging_timeout:g} has to be longer than --matchmaking-time "
                f"{self.matchmaking_time:g}: a round begins only when the peers have met."
            )


@dataclass(frozen=True)
class ResultsOptions:
    """What is done with the weights."""

    checkpoint_every_steps: Annotated[int, arg("UPDATES")] = 50
    """Write a checkpoint after this many global updates, and at the end. The last three and the best one are kept."""
    upload_to: Annotated[str | None, arg("URL", "nowhere")] = None
    """Copy the best and the newest checkpoint to URL/RUN_ID/PUBLIC_NAME while training, and the summary at the end. The
    URL is any place where fsspec can write, such as s3://bucket/folder. Do not put a password into it."""
    evaluate_every_steps: Annotated[int | None, arg("UPDATES", "never")] = None
    """Measure the swarm's weights on the test images each time this many global updates are over, after the next
    validation, and after the last update. The best checkpoint is still chosen by the validation images."""

    def check(self) -> None:
        """Raises InputError: a value cannot work"""
        at_least(self, 1, "checkpoint_every_steps", "evaluate_every_steps")
        if self.upload_to is not None:
            from recipe.remote_file import RemoteFile

            RemoteFile(self.upload_to, "--upload-to")


@dataclass(frozen=True)
class MembershipOptions:
    """Which people may take part in a new run."""

    by_invitation: bool = False
    """Only members take part: people with an invitation from you. You can remove them again."""
    open: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Anyone with the join line may become a member: its invitation has no limit. You can still remove members."""
    invite: Annotated[int, arg("PEOPLE")] = 20
    """How many people may join with the line that is printed; 0 prints none. A peer that starts again prints the same
    line, or a new one if that has expired or you give other numbers. It prints none if you have closed the line or it
    is used up. `swarm invite` makes more."""
    invite_days: Annotated[float, arg("DAYS")] = 30.0
    """For how many days people may join with that line."""
    organiser_key: Annotated[Path | None, arg("FILE", "OUTPUT_DIR/organiser/RUN_ID/organiser.key")] = None
    """File of your key as the organiser; made if it is missing. Keep a copy: without the key you cannot invite or
    remove members."""
    enrolment_port: Annotated[int, arg("PORT", "the one after --port")] = 0
    """TCP port where newcomers become members. Open it as you open --port."""

    def check(self) -> None:
        """Raises InputError: a value cannot work"""
        if self.open and not self.by_invitation:
            raise InputError("--open is for a run with members: give --by-invitation as well, or leave --open out.")
        at_least(self, 0, "invite")
        if not 0 < self.invite_days <= MAX_INVITE_DAYS:
            raise InputError(f"--invite-days is {self.invite_days:g}: give more than 0 and at most {MAX_INVITE_DAYS}.")
        check_port("--enrolment-port", self.enrolment_port, "chosen for you")


@dataclass(frozen=True)
class PeerOptions:
    """Train with a swarm: join one with --initial-peers, or start a new one from --recipe.

    All peers need the same recipe. When you join a swarm, your peer takes the recipe from it.
    """

    initial_peers: Annotated[
        tuple[str, ...] | None, arg("ADDRESS ...", "the variable INITIAL_PEERS; without it, a new swarm")
    ] = None
    """Addresses of running peers, as they print them; or a join line."""
    certificate: Annotated[str | None, arg("TEXT", "the organiser is asked for one")] = None
    """Your certificate, if the organiser has made one for this peer (swarm invite --peer-id)."""
    recipe: Annotated[
        str | None, arg("NAME", "digits", f"What a new swarm trains: {', '.join(PRESETS)}, or a recipe.json.")
    ] = None
    run_id: Annotated[str | None, arg("NAME", "the recipe and the time")] = None
    """Name of the run. To join a run, it is needed only if several runs share the addresses. A peer that is started
    again with the same --run-id, --public-name and --output-dir goes on where it was."""
    resume: bool = False
    """Go on where a peer with this --output-dir was last: with the run, the name and the recipe of its newest
    checkpoint. Without --initial-peers it asks the peers that it has met before."""
    start_from: Annotated[Path | None, arg("FILE", "random weights, or pretrained ones if the recipe says so")] = None
    """Checkpoint from which a new swarm takes its weights, at step 0 with a new optimizer. Use it to go back to an
    earlier best.ckpt, to train for longer, or to train with other settings. A peer that joins or comes back takes the
    swarm's weights instead."""
    machine: MachineOptions = field(default_factory=MachineOptions)
    leaving: LeavingOptions = field(default_factory=LeavingOptions)
    role: Annotated[RoleOptions, tyro.conf.arg(name="role")] = field(default_factory=RoleOptions)
    computing: ComputingOptions = field(default_factory=ComputingOptions)
    connection: ConnectionOptions = field(default_factory=ConnectionOptions)
    patience: PatienceOptions = field(default_factory=PatienceOptions)
    results: ResultsOptions = field(default_factory=ResultsOptions)
    membership: MembershipOptions = field(default_factory=MembershipOptions)
    overrides: Annotated[RecipeOverrides, tyro.conf.arg(name="recipe"), tyro.conf.FlagConversionOff] = field(
        default_factory=RecipeOverrides
    )
    """Changes to the recipe of a new swarm. Each option that is left out keeps the recipe's own value."""

    @property
    def wanted_recipe(self) -> dict[str, object]:
        """The recipe's fields that were given on the command line."""
        given = {item.name: getattr(self.overrides, item.name) for item in fields(self.overrides)}
        return {name: value for name, value in given.items() if value is not None}

    def check_steps(self, total_steps: int) -> None:
        """Raises InputError: --max-steps is beyond the end of the run, where no other peer would follow"""
        if (self.leaving.max_steps or 0) > total_steps:
            raise InputError(
                f"--max-steps {self.leaving.max_steps} is beyond the end of the run, which has {total_steps} updates: "
                "leave it out, or start a run with more --total-steps."
            )

    def check_micro_batch(self, target_batch_size: int) -> None:
        """Raises InputError: --batch-size is more than the whole swarm needs for an update"""
        if self.machine.batch_size and self.machine.batch_size > target_batch_size:
            raise InputError(
                f"A micro-batch of {self.machine.batch_size} does not fit the target batch size of "
                f"{target_batch_size}: give --batch-size {target_batch_size} or less, or leave it out."
            )


def parse_options(arguments: list[str] | None = None, prog: str = "python -m swarm.peer") -> PeerOptions:
    """Read the command line; dashes and underscores alike.

    Raises:
        InputError: a value that cannot work
        SystemExit: status 2 for what is not an option, 0 for `--help`
    """
    return read_options(PeerOptions, arguments, prog)


def own_recipe(options: PeerOptions) -> Recipe:
    """The recipe of a new swarm: a preset or a file, with the overrides of the command line."""
    return apply_overrides(named_recipe(options.recipe or "digits"), options.overrides)
