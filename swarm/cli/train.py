"""`swarm start` and `swarm join`: the options of a peer in the order in which a volunteer needs them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

import tyro

from recipe.command_line import arg, read_options
from recipe.errors import InputError
from recipe.overrides import RecipeOverrides
from recipe.presets import PRESETS
from swarm.network.addresses import VARIABLE, is_loopback
from swarm.peer.main import run
from swarm.peer.options import (
    ComputingOptions,
    ConnectionOptions,
    LeavingOptions,
    MachineOptions,
    MembershipOptions,
    PatienceOptions,
    PeerOptions,
    ResultsOptions,
    RoleOptions,
)

SECOND_PEER = 2
"""Peers with which `swarm start` begins to train, itself included: else a small run could end before anyone joins."""


AdvancedRole = Annotated[RoleOptions, tyro.conf.arg(name="advanced: role")]
AdvancedComputing = Annotated[ComputingOptions, tyro.conf.arg(name="advanced: computing")]
AdvancedConnection = Annotated[ConnectionOptions, tyro.conf.arg(name="advanced: connection")]
AdvancedResults = Annotated[ResultsOptions, tyro.conf.arg(name="advanced: results")]


@dataclass(frozen=True)
class JoinOptions:
    """Join a swarm. Your computer trains with the others until you press Ctrl-C; the recipe comes from the swarm."""

    addresses: tyro.conf.Positional[Annotated[tuple[str, ...], arg("ADDRESS ...", "the variable INITIAL_PEERS")]] = ()
    """The join line that the organiser has sent, or addresses of peers as they print them."""
    initial_peers: Annotated[tuple[str, ...], arg("ADDRESS ...", "none")] = ()
    """Another way to give ADDRESS, as other programs name it."""
    certificate: Annotated[str | None, arg("TEXT", "the organiser is asked for one")] = None
    """Your certificate, if the organiser has made one for this peer (swarm invite --peer-id)."""
    run_id: Annotated[str | None, arg("NAME", "the only one there")] = None
    """Name of the run, if there are several runs at the addresses."""
    resume: bool = False
    """Go on where a peer with this --output-dir was last: with the run and the name of its newest checkpoint."""
    machine: MachineOptions = field(default_factory=MachineOptions)
    leaving: LeavingOptions = field(default_factory=LeavingOptions)
    role: AdvancedRole = field(default_factory=RoleOptions)
    computing: AdvancedComputing = field(default_factory=ComputingOptions)
    connection: AdvancedConnection = field(default_factory=ConnectionOptions)
    patience: Annotated[PatienceOptions, tyro.conf.arg(name="advanced: patience")] = field(
        default_factory=PatienceOptions
    )
    results: AdvancedResults = field(default_factory=ResultsOptions)

    @property
    def as_peer(self) -> PeerOptions:
        """The same options as `python -m swarm.peer` reads them."""
        same = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "addresses"}
        same["initial_peers"] = (*self.addresses, *self.initial_peers) or None
        return PeerOptions(**same)


@dataclass(frozen=True)
class StartPatience(PatienceOptions):
    """How long to wait for other peers."""

    min_peers: Annotated[int, arg("PEERS")] = SECOND_PEER
    """Begin to train when this many peers are there, this one included; 1 begins at once."""


@dataclass(frozen=True)
class StartMembership(MembershipOptions):
    """Which peers may take part."""

    by_invitation: bool = True
    """Only members take part: people with an invitation of yours. You can remove them again. Without this, anyone with
    the address can join, and can corrupt the run. Off if --host-maddrs has addresses of this machine only."""


@dataclass(frozen=True)
class StartOptions:
    """Start a new swarm. It prints the line with which others join, and waits for the first of them."""

    recipe: Annotated[
        str | None, arg("NAME", "digits", f"What the swarm trains: {', '.join(PRESETS)}, or a recipe.json.")
    ] = None
    run_id: Annotated[str | None, arg("NAME", "the recipe and the time")] = None
    """Name of the run. A peer that is started again with the same --run-id, --public-name and --output-dir goes on
    where it was."""
    resume: bool = False
    """Go on where a peer with this --output-dir was last: with the run, the name and the recipe of its newest
    checkpoint."""
    start_from: Annotated[Path | None, arg("FILE", "random weights, or pretrained ones if the recipe says so")] = None
    """Checkpoint whose weights the swarm starts from, at step 0 with a new optimizer."""
    machine: MachineOptions = field(default_factory=MachineOptions)
    leaving: LeavingOptions = field(default_factory=LeavingOptions)
    membership: StartMembership = field(default_factory=StartMembership)
    role: AdvancedRole = field(default_factory=RoleOptions)
    computing: AdvancedComputing = field(default_factory=ComputingOptions)
    connection: AdvancedConnection = field(default_factory=ConnectionOptions)
    patience: Annotated[StartPatience, tyro.conf.arg(name="advanced: patience")] = field(default_factory=StartPatience)
    results: AdvancedResults = field(default_factory=ResultsOptions)
    overrides: Annotated[RecipeOverrides, tyro.conf.arg(name="advanced: recipe"), tyro.conf.FlagConversionOff] = field(
        default_factory=RecipeOverrides
    )

    @property
    def stays_on_this_machine(self) -> bool:
        """Whether the swarm cannot be reached from other machines."""
        listening = self.connection.host_maddrs
        return bool(listening) and all(is_loopback(address) for address in listening)

    @property
    def as_peer(self) -> PeerOptions:
        """The same options as `python -m swarm.peer` reads them."""
        return PeerOptions(**{item.name: getattr(self, item.name) for item in fields(self)})


def start(arguments: list[str]) -> int:
    """`swarm start`. Returns the exit status."""
    return run(lambda: _read_own(arguments))


def _read_own(arguments: list[str]) -> PeerOptions:
    """The options of a peer that begins a run of its own.

    The variable INITIAL_PEERS is taken away: it names another run, which must not be joined unasked.
    """
    options = read_start(arguments).as_peer
    if os.environ.pop(VARIABLE, "").strip():
        said = f"{VARIABLE} is not used: swarm start begins a run of its own, and swarm join joins another one."
        print(said, file=sys.stderr, flush=True)
    return options


def read_start(arguments: list[str]) -> StartOptions:
    """The options of `swarm start`. A swarm that stays on this machine is by invitation only if that is asked for.

    Raises:
        InputError: a value that cannot work
    """
    options = read_options(StartOptions, arguments, "swarm start")
    if options.stays_on_this_machine:  # then the default is that no peer needs an invitation
        without = StartOptions(membership=StartMembership(by_invitation=False))
        options = read_options(StartOptions, arguments, "swarm start", without)
    return options


def join(arguments: list[str]) -> int:
    """`swarm join`. Returns the exit status."""
    return run(lambda: _read_join(arguments))


def _read_join(arguments: list[str]) -> PeerOptions:
    """The options of a peer that joins a run.

    Raises:
        InputError: there is no address to join
    """
    options = read_options(JoinOptions, arguments, "swarm join").as_peer
    if options.initial_peers is None and VARIABLE not in os.environ and not options.resume:
        raise InputError(
            "swarm join needs a join line or an address: paste the one that the organiser sent, as in swarm join "
            "swarm://... (swarm start begins a new swarm.)"
        )
    return options
