"""Join a swarm, or start one.

    python -m swarm.peer                                      # start a new swarm with the digits recipe
    python -m swarm.peer --recipe cifar10-vit-tiny --port 31337 --public-ip 203.0.113.5
    python -m swarm.peer --initial-peers /ip4/203.0.113.5/tcp/31337/p2p/QmYyQSo1c1...    # join it: nothing else needed

Ctrl-C leaves cleanly: the last averaged weights stay in checkpoints/, and the other peers train on.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from recipe.errors import InputError
from recipe.interrupts import raise_again
from recipe.registry import OWN_DATA
from recipe.run_folder import RunFolder, check_name, make_writable
from swarm.enrolment.join_line import JoinLine
from swarm.enrolment.removed import EXIT_STATUS, Removed
from swarm.network.addresses import NobodyAnswers, OthersAnswer, check_port_free
from swarm.network.home.sparing import wait_while_spared
from swarm.peer.bootstrap import Bootstrap, resolve_bootstrap, unfolded
from swarm.peer.island.launch import check_one_process, connected, is_island, offer, one_voice, settled, speaks
from swarm.peer.membership.entry import Entry, how_to_join, open_door
from swarm.peer.options import PeerOptions, own_recipe, parse_options
from swarm.peer.rejoin import TIME_IS_UP, come_back, resumed, trained_before
from swarm.peer.startup_timer import StartupTimer
from swarm.runtime.hivemind_version import check_hivemind_version
from swarm.runtime.imports import quick_imports
from swarm.runtime.log_filters import silence_libraries
from swarm.runtime.processes import descendants, kill, reap
from swarm.runtime.threads import yield_cores
from swarm.training.island.lost import IslandLost

if TYPE_CHECKING:
    from swarm.training.island.channel import Channel

HELPS = "Helper: it averages for the others, hands over the weights and keeps checkpoints. It trains nothing."
LEAVE_SECONDS = 10.0
"""How long a peer that lost a process may take to leave in order. Then it starts again without a last checkpoint."""


def main(arguments: list[str] | None = None) -> int:
    """Run `python -m swarm.peer`; returns the exit status."""
    return run(lambda: parse_options(arguments))


def run(read: Callable[[], PeerOptions]) -> int:
    """Run a peer until it is done.

    Args:
        read: reads the command line

    Returns:
        the exit status: 0; 1 if another process of an island is lost; 2 for input that cannot work; 3 if the organiser
            has removed this peer; 130 after Ctrl-C
    """
    clock = StartupTimer()
    reap()
    try:
        raise_again()
        with one_voice():
            options, line = unfolded(read())
        if not is_island():
            check_one_process(options)
            options = resumed(options)
            if not _may_begin(options, clock.again):
                return 0
        if speaks():
            print("Starting; importing torch takes 5 s or more …", flush=True)
        silence_libraries()
        yield_cores()
        check_hivemind_version()
        channel = connected(options) if is_island() else None
        if channel is not None and not channel.is_first:
            return importlib.import_module("swarm.peer.island.computing").compute(options, channel)
        if channel is not None:
            options = resumed(settled(options))
        before = trained_before(options)

        def make_peer(alone: bool) -> Peer:
            own, stored = (replace(options, run_id=before[0]), before[1]) if alone else (options, None)
            _check_machine(own)
            return Peer(own, resolve_bootstrap(own, line, stored), clock, line, channel)

        return come_back(make_peer, clock.again, before is not None, _leave_at_once, lambda: options.leaving.is_time_up)
    except InputError as error:
        with one_voice():
            print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_STATUS if isinstance(error, Removed) else 2
    except IslandLost as lost:
        print(f"error: {lost}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("Interrupted before the training began.", file=sys.stderr, flush=True)
        return 130


def _may_begin(options: PeerOptions, again: bool) -> bool:
    """Wait as long as this machine is to be spared (on battery, or on a metered line).

    Args:
        again: this peer started again by itself, perhaps because its machine was to be spared

    Returns:
        whether the peer may begin; False if its time is up, or if it has trained before and was asked to leave while it
            waited

    Raises:
        KeyboardInterrupt: a peer that has not trained before was asked to leave while it waited
    """
    leaving = options.leaving
    for sentence in [] if again else leaving.never_spared:
        print(sentence, flush=True)
    try:
        wait_while_spared(lambda: "" if leaving.is_time_up else leaving.why_spared)
    except KeyboardInterrupt:
        if not again or trained_before(options) is None:
            raise
        _say("Stopped while paused (battery or metered line).")
    else:
        if not leaving.is_time_up:
            return True
        _say(TIME_IS_UP)
    if again and (before := trained_before(options)) is not None:
        folder = options.machine.output_dir.expanduser() / before[0] / options.machine.public_name
        _say(f"Weights: {RunFolder(folder).checkpoints}")
    return False


class State(Enum):
    """How far a peer has come, which decides what an interrupt does."""

    IMPORTING = auto()
    """Modules are imported: an import would swallow an exception that a signal handler raises."""
    JOINING = auto()
    """The peer has child processes, which have to be ended."""
    TRAINING = auto()
    """The training loop checks at each micro-batch whether a stop was requested."""
    ENDED = auto()
    """The training is over, and the peer cleans up."""


class Interrupts:
    """Handles Ctrl-C, SIGTERM and a closed terminal: the first signal asks the peer to leave, the second one ends it.

    Args:
        leave_at_once: ends this process and its children
    """

    def __init__(self, leave_at_once: Callable[[int], None]):
        self._leave_at_once = leave_at_once
        self.state = State.IMPORTING
        self.stop_requested = threading.Event()
        """Set to leave: by the first signal, or by a part of this peer, such as the traffic limit."""
        self.first_signal: int | None = None
        """Number of the first signal that came; None as long as none has."""

    def listen(self) -> None:
        """Handle these signals from now on."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # not under nohup
            signal.signal(signal.SIGHUP, self._on_hangup)

    def interrupt(self, signal_number: int) -> None:
        """Leave in the way that the state allows.

        Raises:
            KeyboardInterrupt: the peer is joining, or its training has ended
        """
        has_left = self.state is State.ENDED and self.stop_requested.is_set()  # by itself: its checkpoint is written
        if self.first_signal is not None or has_left or self.state is State.IMPORTING:
            self._leave_at_once(signal_number)
        self.first_signal = signal_number
        self.stop_requested.set()
        if self.state is not State.TRAINING:
            raise KeyboardInterrupt

    def _on_signal(self, signal_number: int, _frame) -> None:
        self.interrupt(signal_number)

    def _on_hangup(self, signal_number: int, _frame) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)  # the terminal is closed: writing to it would fail
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        self.interrupt(signal_number)


def _check_machine(options: PeerOptions) -> None:
    """Raises InputError: a name, the output folder or the port cannot be used; checked before the slow imports"""
    if options.machine.public_name:
        check_name(options.machine.public_name, "--public-name")
    make_writable(options.machine.output_dir)
    if options.run_id is not None:
        check_name(options.run_id, "--run-id")
    if not options.connection.host_maddrs:
        check_port_free(options.connection.port)


class Peer:
    """One volunteer's peer, from the command line to the summary.

    Args:
        options: the command line
        bootstrap: the peers to begin with, and the recipe
        clock: times the start
        line: the join line, if the peer was invited
        channel: to the other processes of this peer; None if it is one process

    Raises:
        InputError: something that a person gave cannot work; `run` raises it as well
    """

    def __init__(
        self,
        options: PeerOptions,
        bootstrap: Bootstrap,
        clock: StartupTimer,
        line: JoinLine | None = None,
        channel: Channel | None = None,
    ):
        self._channel = channel
        self.options, self.bootstrap, self.clock = options, bootstrap, clock
        self._entry = Entry(options, line)
        self.name = options.machine.public_name or f"peer-{secrets.token_hex(3)}"
        self._interrupts = Interrupts(_leave_at_once)
        self._began = time.monotonic()
        self._session = None
        self._run: list[str] = []
        self._restart: threading.Timer | None = None
        self._shown, self._desk = line, None
        self.reachability = None
        """Whether other peers can call this one; None until that is known."""

    @property
    def has_joined(self) -> bool:
        """Whether the training of this peer has begun."""
        return self._session is not None and self._session.metrics.seconds > 0

    def run(self) -> int:
        """Join or start the swarm, train, and write the summary; returns the exit status."""
        self._interrupts.listen()
        with quick_imports():
            from swarm.network.dht_options import stop_dht, visible_addresses
        self.clock.ends("imports")
        self._interrupts.state = State.JOINING
        dht, asked = self._dht()
        try:
            manifest, joins = self._manifest(dht, asked)
            addresses = tuple(visible_addresses(dht))
            self._entry.take_part(dht, manifest, addresses)
            self.clock.ends("join")
            self._train(dht, manifest, joins, addresses, asked)
        finally:
            if self._restart is not None:
                self._start_again()
            self._entry.stop()
            if self._desk is not None:
                self._desk.stop()
            stop_dht(dht)
        if self._session.pause.has_stopped and self._interrupts.first_signal is None:
            self._wait_in_another_life()
        return 0

    def _dht(self):
        """Return this peer's DHT, and the addresses through which it has joined the swarm; none if it is alone."""
        from swarm.network.dht_options import start_dht

        asked = self.bootstrap.addresses
        try:
            return start_dht(self._network(asked), meanwhile=self._import_the_rest), asked
        except (NobodyAnswers, OthersAnswer):
            if self.bootstrap.joins:
                raise
        print("None of the peers that this peer met before answers: it starts alone.", flush=True)
        return start_dht(self._network(())), ()  # without other peers, the reachability is found in another way

    def _import_the_rest(self) -> None:
        self.clock.ends("join")
        self._interrupts.state = State.IMPORTING
        with quick_imports():
            importlib.import_module("swarm.peer.session")
        self._interrupts.state = State.JOINING
        self.clock.ends("imports")

    def _manifest(self, dht, asked: tuple[str, ...]):
        """Return what is trained, and whether other peers train it already."""
        from swarm.membership.run_manifest import (
            PROTOCOL,
            check_overrides,
            choose_manifest,
            read_manifests,
        )

        recipe, run_id = self.bootstrap.new_recipe, self.options.run_id
        organiser = self._entry.organiser
        may_begin = recipe is not None
        manifests = read_manifests(dht, asked, run_id, organiser, may_begin=may_begin) if asked else {}
        if may_begin and run_id not in manifests:
            if self.bootstrap.joins:
                print(f"No peer trains run {run_id} there yet: this peer starts it.", flush=True)
            return self._entry.new_manifest(PROTOCOL, recipe), False
        manifest = choose_manifest(manifests, run_id, b"" if self._entry.line is None else organiser)
        check_overrides(manifest, vars(own_recipe(self.options)) if self.options.recipe else self.options.wanted_recipe)
        return manifest, True

    def _train(self, dht, manifest, joins: bool, addresses: tuple[str, ...], asked: tuple[str, ...]) -> None:
        from swarm.membership.announcer import Announcer
        from swarm.peer.session import Session

        self._session = session = Session(
            self.options,
            self.name,
            dht,
            manifest,
            joins,
            addresses,
            self._interrupts.stop_requested,
            self.clock,
            self._part_died,
            self._entry,
            self._channel,
        )
        self._introduce(session, asked)
        self._run = ["--run-id", manifest.run_id]
        announcer = Announcer(dht, session.manifest, addresses, session.folder.peers, admission=session.admission)
        self._show_desk(manifest.run_id, addresses, asked)
        prefix = session.manifest.key_prefix
        self._entry.watch(dht, session.admission, prefix, session.tell_members, session.end)
        try:
            self._interrupts.state = State.TRAINING
            _say(f"\n{session.train()}")
        finally:
            self._interrupts.state = State.ENDED
            announcer.stop()
            self._entry.stop_watching()
            if session.supervisor.found and self._restart is None:
                self._part_died(session.supervisor.found)

    def _show_desk(self, run_id: str, addresses: tuple[str, ...], asked: tuple[str, ...]) -> None:
        from swarm.peer.helping.desk_process import DeskProcess

        if self.options.role.desk_port is not None:
            output_dir = self.options.machine.output_dir
            self._desk = DeskProcess(self.options.role, run_id, addresses, asked, self._shown, output_dir)

    def _part_died(self, process: str) -> None:
        """Leave in order, as far as that is possible without this process, and start again as the same peer.

        A process that has died cannot be replaced while the peer runs.
        """
        _say(f"{process} has died: this peer starts again.")
        self._restart = threading.Timer(LEAVE_SECONDS, self._start_again)
        self._restart.daemon = True
        self._restart.start()
        self._interrupts.stop_requested.set()

    def _start_again(self) -> None:
        from swarm.peer.supervisor import start_again

        self._restart.cancel()
        if self._session is not None:
            self._session.traffic.keep()
        if self._interrupts.first_signal is not None:  # the person wants it to end
            _leave_at_once(self._interrupts.first_signal)
        if self._channel is not None:  # torchrun starts all of its processes again
            kill(descendants(os.getpid()))
            os._exit(1)
        start_again(["--public-name", self.name, *self._run], time.monotonic() - self._began)
        print(
            "error: Processes of this peer die again and again; the lines above name them. If memory is short (see "
            "`swarm doctor`), free some. If it is not, this peer may be under attack.",
            file=sys.stderr,
            flush=True,
        )
        kill(descendants(os.getpid()))
        os._exit(2)

    def _wait_in_another_life(self) -> None:
        """Start again as the same peer, which waits before it imports and joins. Until then it needs little memory."""
        from swarm.peer.supervisor import start_again

        self._session.traffic.keep()
        start_again(["--public-name", self.name, *self._run], math.inf)

    def _network(self, asked: tuple[str, ...]):
        """Prepare the identity, become a member if this peer was invited, and return the network options.

        The options combine what a person gave with the reachability that the asked peers have measured.
        """
        from swarm.network.dht_options import NetworkOptions
        from swarm.network.signed_records import claim_identity, prepare_identity
        from swarm.peer.role import measured

        machine, connection = self.options.machine, self.options.connection
        identity = connection.identity_path
        if identity is None:
            identity = machine.output_dir / "identities" / f"{self.name}.key"
        identity = identity.expanduser()
        prepare_identity(identity)
        claim_identity(identity)
        self._entry.ask_to_be_let_in(identity, self.name)
        if machine.public_name is None and self._entry.membership is not None:
            print(f"Let in as {self.name}. To come back as this member, add --public-name {self.name}.", flush=True)
        may_serve = self._entry.may_serve
        network = NetworkOptions(
            initial_peers=asked,
            port=connection.port,
            host_maddrs=connection.host_maddrs,
            announce_maddrs=connection.announce_maddrs,
            public_ip=connection.public_ip,
            identity_path=identity,
            client_mode=connection.client_mode or not may_serve,
        )
        why = "--client-mode was given" if may_serve else "the organiser has not given it the role to serve others"
        self.reachability, network = measured(network, why, connection.port_mapping)
        if self.options.role.helps and network.client_mode:
            raise InputError(
                f"A helper has to be a peer that others can call, and this one cannot be ({self.reachability.reason}): "
                "open a TCP port of this machine and give it as --port, or leave out --role helper."
            )
        return network

    def _introduce(self, session, asked: tuple[str, ...]) -> None:
        recipe, addresses = session.manifest.recipe, session.addresses
        verb = "Joining" if session.joins else "Started"
        print(
            f"\n{verb} run {session.manifest.run_id} as {self.name}: {recipe.model} on {recipe.dataset}, "
            f"{recipe.target_batch_size} samples per update, {session.total_steps} updates."
        )
        if addresses and session.manifest.authority is None:
            print("Running a DHT instance. To connect other peers to this one, use --initial_peers", *addresses)
        print(self.reachability)
        print(HELPS if session.work.helps else f"Micro-batch: {session.work.micro_batch}.")
        if self._channel is not None:
            print(f"This peer is an island of {session.num_processes} processes. Each computes an equal share.")
        elif (num_gpus := session.work.num_gpus) > 1:
            print(offer(num_gpus))
        print(f"Run folder: {session.folder.path}")
        if session.work.own.resumed_step is not None:
            unless = ", unless the swarm is ahead" if session.joins else ""
            print(f"Going on from step {session.work.own.resumed_step}, where its last checkpoint was made{unless}.")
        if self.options.start_from is not None:
            weights = (
                session.work.started_from or "the run's own, because the run exists already (--start-from is ignored)"
            )
            print(f"Weights to start from: {weights}.")
        if warning := open_door(session.manifest, [*addresses, *asked], session.joins):
            print(warning)
        print(session.averaging.protection)
        print(session.averaging.protection_of_work(recipe.dataset not in OWN_DATA))
        print("Ctrl-C leaves the swarm cleanly; the other peers train on.\n", flush=True)
        invitation = self._entry.invitation()
        self._shown = self._entry.line if invitation is None else invitation[0]
        if addresses and (invitation is not None or not session.joins):
            public_ip, output_dir = self.options.connection.public_ip, self.options.machine.output_dir
            print(how_to_join(addresses, public_ip, output_dir, invitation, self._company(session)), flush=True)

    def _company(self, session) -> str:
        """Return a sentence that says for how many peers this one waits; empty if it trains at once."""
        if session.work.helps:
            return "Waiting for a training peer."
        missing = self.options.patience.min_peers - 1
        if missing < 1:
            return ""
        peers, have = ("another peer", "it has") if missing == 1 else (f"{missing} other peers", "they have")
        more = f" Progress is shown here once {have} joined." if session.awaits_company else ""
        return f"Waiting for {peers} (with --min-peers 1 training begins at once).{more}"


def _say(text: str) -> None:
    """Print; go on if the terminal is closed or the log's disk is full."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def _leave_at_once(signal_number: int) -> None:
    os.write(2, b"Leaving at once.\n")  # print is not safe in a signal handler
    kill(descendants(os.getpid()))
    os._exit(128 + signal_number)
