"""Train a small model with several peers on this machine, each a process of its own, and show them in a live table.

swarm demo --peers 3
swarm demo --peers 3 --target-accuracy 0.95 --learning-rate 1e-3   # nearly any option of swarm.peer
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.live import Live

from recipe.command_line import arg, exit_status, read_known_options
from recipe.errors import InputError
from recipe.interrupts import raise_again
from recipe.run_folder import RunFolder, check_name, make_writable
from swarm.network.addresses import environment_without_peers
from swarm.peer.options import parse_options
from swarm.peer.status import Status, result_table, status_table, tensorboard_command
from swarm.runtime.processes import die_with_parent

STATUS_SECONDS = 0.5
LINE_SECONDS = 10.0
START_SECONDS = 300.0
LEAVE_SECONDS = 12.0
LEFT_EARLY = 130
"""Exit status of a peer that was asked to leave before its training began."""


@dataclass
class LocalPeer:
    """A peer on this machine: its process and its run folder.

    Args:
        name: public name
        folder: run folder
        arguments: options of `python -m swarm.peer`, without the name and the identity
        num_threads: threads with which torch computes
        process: None before `start`
        log: file with the output of the process
    """

    name: str
    folder: Path
    arguments: list[str]
    num_threads: int
    process: subprocess.Popen | None = None
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / "peer.log"
        # not in OUTPUT_DIR/identities: runs at the same time have peers of the same names
        self.arguments += ["--public-name", self.name, "--identity-path", str(RunFolder(self.folder).identity)]

    def start(self, initial_peers: tuple[str, ...]) -> None:
        """Start the peer as a user would; its output goes to `peer.log`.

        Args:
            initial_peers: addresses of peers to join; empty: begin a run
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "status.json").unlink(missing_ok=True)  # left by an earlier run, with addresses of that time
        command = [sys.executable, "-m", "swarm.peer", *self.arguments]
        if initial_peers:
            command += ["--initial-peers", *initial_peers]
        parent = os.getpid()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this program, which asks the peers to leave
                preexec_fn=lambda: die_with_parent(signal.SIGTERM, parent),
                env=environment_without_peers() | {"OMP_NUM_THREADS": str(self.num_threads)},
            )

    @property
    def status(self) -> Status:
        """What the peer does now, as it says itself. A process that ended without saying so has failed."""
        found = Status.read(self.folder / "status.json") if self.process else None
        found = found or Status(self.name, "", "starting" if self.process else "not started")
        failed = self.has_failed and not found.ended
        return Status(self.name, found.run_id, found.phase, ended="failed") if failed else found

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def has_failed(self) -> bool:
        return self.process is not None and self.process.poll() not in (None, 0, LEFT_EARLY)

    def leave(self) -> None:
        if self.is_running:
            self.process.send_signal(signal.SIGINT)

    def last_words(self) -> str:
        """Why the peer failed: the last error in its log, or else the end of the log."""
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        errors = [line for line in lines if line.startswith("error: ")]
        return errors[-1].removeprefix("error: ") if errors else "\n".join([f"see {self.log}:", *lines[-15:]])


class LocalSwarm:
    """A swarm of peers on this machine: a first one, which begins a run, and others that join it.

    Args:
        num_peers: number of peers
        output_dir: folder for the run folders
        run_id: name of the run
        arguments: further options of `python -m swarm.peer`, for all peers
    """

    def __init__(self, num_peers: int, output_dir: Path, run_id: str, arguments: list[str]):
        self.run_folder, self.run_id = output_dir / run_id, run_id
        own = ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--output-dir", str(output_dir), "--run-id", run_id]
        own += ["--min-peers", str(num_peers)]
        num_threads = max(1, (os.cpu_count() or 1) // num_peers)
        self.peers = [
            LocalPeer(f"peer-{i}", self.run_folder / f"peer-{i}", [*own, *arguments], num_threads)
            for i in range(1, num_peers + 1)
        ]
        self.console = wide_console()

    def run(self) -> int:
        """Train to the end; Ctrl-C asks all peers to leave. Returns the exit status."""
        try:
            raise_again()
            self._train()
        except KeyboardInterrupt:
            self.console.print("Asking all peers to leave, this takes a few seconds …")
        finally:
            self._end()
        return self._report()

    def _train(self) -> None:
        """Show the peers until all have ended, or one fails before any contributes: the others would wait for it."""
        first, *others = self.peers
        first.start(())
        deadline = time.monotonic() + START_SECONDS
        with self._display() as show:
            while not first.status.addresses and not first.has_failed and time.monotonic() < deadline:
                self._show_now(show)
            if first.status.addresses:
                for peer in others:
                    peer.start(first.status.addresses[:1])
            while any(peer.is_running for peer in self.peers) and time.monotonic() < deadline:
                self._show_now(show)
                if any(peer.status.contributed for peer in self.peers):
                    deadline = float("inf")
                elif any(peer.has_failed for peer in self.peers):
                    break
            show([peer.status for peer in self.peers])
        if deadline < time.monotonic():
            raise InputError(f"The peers did not begin to train in {START_SECONDS:.0f} s: see {first.log}.")

    def _show_now(self, show: Callable[[list[Status]], None]) -> None:
        show([peer.status for peer in self.peers])
        time.sleep(STATUS_SECONDS)

    @contextlib.contextmanager
    def _display(self) -> Iterator[Callable[[list[Status]], None]]:
        """What shows the statuses of the peers: a table that is redrawn in a terminal, and lines in a log."""
        if not self.console.is_terminal:
            yield Lines(self.console).show
            return
        with Live(console=self.console, refresh_per_second=4) as live:
            yield lambda statuses: live.update(status_table(statuses, f"run {self.run_id}", self.console.width))

    def _end(self) -> None:
        """Ask all running peers to leave, wait for them, and kill those that do not end in time."""
        for peer in self.peers:
            peer.leave()
        deadline = time.monotonic() + LEAVE_SECONDS
        for peer in self.peers:
            if peer.process is None:
                continue
            try:
                peer.process.wait(max(0.1, deadline - time.monotonic()))
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                deadline = 0.0
                peer.process.kill()
                peer.process.wait()

    def _report(self) -> int:
        failed = [peer for peer in self.peers if peer.has_failed]
        for peer in failed:
            reason = f"{peer.name} failed: {peer.last_words()}"
            self.console.print(reason, style="red", markup=False, highlight=False, soft_wrap=True)
        finished = [summary for peer in self.peers if (summary := _read_summary(peer.folder / "summary.json"))]
        if finished:
            self.console.print(result_table(finished))
            self.console.print(f"Run folder: {self.run_folder}", soft_wrap=True, highlight=False)
            self.console.print(f"Curves:     {tensorboard_command(self.run_folder)}", soft_wrap=True, highlight=False)
        if failed:
            return 2 if any(peer.process.returncode == 2 for peer in failed) else 1
        return 0 if finished else LEFT_EARLY


def wide_console() -> Console:
    """A console for tables: as wide as the terminal, and 110 columns in a log or a pipe, which has no width."""
    return Console() if sys.stdout.isatty() else Console(width=110)


class Lines:
    """Prints a line for each peer every 10 s, for a log."""

    def __init__(self, console: Console):
        self._console, self._last = console, -LINE_SECONDS

    def show(self, statuses: list[Status]) -> None:
        """Print the statuses, unless less than 10 s have gone since the last time."""
        if time.monotonic() - self._last >= LINE_SECONDS:
            self._last = time.monotonic()
            for status in statuses:
                self._console.print(f"{status.name}: {status.line()}", markup=False, highlight=False, soft_wrap=True)


def _read_summary(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class DemoOptions:
    """Train a small model with several peers on this machine. Options of python -m swarm.peer can be given as well,
    except those that only one peer can have, such as --port."""

    peers: Annotated[int, arg("PEERS")] = 3
    """Number of peers, 1 to 64."""
    output_dir: Annotated[Path, arg("FOLDER")] = Path("runs")
    """Folder for the run folders."""
    run_id: Annotated[str | None, arg("NAME", "local and the time")] = None
    """Name of the run."""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if a peer failed, 2 for input that cannot work, 130 after an early Ctrl-C."""
    prog = "swarm demo"
    options, rest = read_known_options(DemoOptions, arguments, prog)
    return exit_status(lambda: _run(options, rest, prog))


def _run(options: DemoOptions, peer_options: list[str], prog: str) -> int:
    if not 1 <= options.peers <= 64:
        raise InputError(f"--peers is {options.peers}: give 1 to 64.")
    _check_peer_options(peer_options, prog)
    output_dir = options.output_dir.expanduser()
    make_writable(output_dir)
    run_id = f"local-{time.strftime('%Y%m%d-%H%M%S')}" if options.run_id is None else options.run_id
    check_name(run_id, "--run-id")
    return LocalSwarm(options.peers, output_dir, run_id, peer_options).run()


def _check_peer_options(arguments: list[str], prog: str) -> None:
    """Refuse at once options that every peer would refuse, and options that only one peer can have.

    Raises:
        InputError: there is such an option, for instance --port 31337
    """
    given = parse_options(arguments, prog)
    connection = given.connection
    of_one = {
        "--public-name": given.machine.public_name,
        "--initial-peers": given.initial_peers,
        "--resume": given.resume,
        "--port": connection.port,
        "--identity-path": connection.identity_path,
        "--client-mode": connection.client_mode,
        "--role helper": given.role.helps,
        "--desk-port": given.role.desk_port is not None,
    }
    if named := [option for option, value in of_one.items() if value]:
        belong = "belongs" if len(named) == 1 else "belong"
        raise InputError(
            f"{' and '.join(named)} {belong} to one peer: leave that out here (the same --run-id and "
            "--output-dir go on), or start peers with python -m swarm.peer."
        )
