"""Several peers on this machine, each a process of its own, in one live table.

python -m swarm.local --peers 3
python -m swarm.local --peers 3 --target-accuracy 0.95 --learning-rate 1e-3   # any option of swarm.peer
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from rich.console import Console
from rich.live import Live
from rich.table import Table

from recipe.errors import InputError
from swarm.processes import die_with_parent
from swarm.status import Status, percent, shown, status_table

STATUS_SECONDS = 0.5
LINE_SECONDS = 10.0
START_SECONDS = 120.0
LEAVE_SECONDS = 15.0


@dataclass
class LocalPeer:
    """A peer process and its run folder."""

    name: str
    folder: Path
    arguments: list[str]
    num_threads: int
    process: subprocess.Popen | None = None
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / "peer.log"

    def start(self, initial_peers: tuple[str, ...]) -> None:
        """Start it as a user would; its output goes to ``peer.log``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "swarm.peer", *self.arguments, "--public-name", self.name]
        if initial_peers:
            command += ["--initial-peers", *initial_peers]
        parent = os.getpid()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this program, which asks the peers to leave
                preexec_fn=lambda: die_with_parent(signal.SIGTERM, parent),
                env={**os.environ, "OMP_NUM_THREADS": str(self.num_threads), "INITIAL_PEERS": ""},
            )

    @property
    def status(self) -> Status:
        found = Status.read(self.folder / "status.json")
        return found or Status(self.name, "", "starting" if self.process else "waiting")

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def leave(self) -> None:
        if self.is_running:
            self.process.send_signal(signal.SIGINT)

    def last_words(self) -> str:
        """The end of its log: why it failed."""
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        errors = [line for line in lines if line.startswith("error: ")]
        return errors[-1].removeprefix("error: ") if errors else "\n".join(lines[-15:])


class LocalSwarm:
    """A first peer, and others that join it.

    :param num_peers: how many
    :param output_dir: where run folders go
    :param run_id: name of the run
    :param arguments: further options of ``python -m swarm.peer``
    """

    def __init__(self, num_peers: int, output_dir: Path, run_id: str, arguments: list[str]):
        self.run_folder = output_dir / run_id
        self.run_id = run_id
        own = ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--output-dir", str(output_dir), "--run-id", run_id]
        own += ["--min-peers", str(num_peers)]
        num_threads = max(1, (os.cpu_count() or 1) // num_peers)
        self.peers = [
            LocalPeer(f"peer-{i}", self.run_folder / f"peer-{i}", [*own, *arguments], num_threads)
            for i in range(1, num_peers + 1)
        ]
        # only who starts the swarm says what is trained; those who join are told
        for peer in self.peers[1:]:
            peer.arguments = [*own, *local_arguments(arguments)]
        self.console = wide_console()

    def run(self) -> int:
        """Train to the end; Ctrl-C asks all peers to leave. Returns the exit status."""
        try:
            self._train()
        except KeyboardInterrupt:
            self.console.print("Asking all peers to leave …")
        finally:
            self._end()
        return self._report()

    def _train(self) -> None:
        first = self.peers[0]
        first.start(())
        deadline = time.monotonic() + START_SECONDS
        with self._display() as show:
            while not first.status.addresses:
                if not first.is_running:
                    raise InputError(f"{first.name} did not start: {first.last_words()}")
                if time.monotonic() > deadline:
                    raise InputError(f"{first.name} did not start in {START_SECONDS:.0f} s: see {first.log}.")
                show([peer.status for peer in self.peers])
                time.sleep(STATUS_SECONDS)
            for peer in self.peers[1:]:
                peer.start(first.status.addresses[:1])
            while any(peer.is_running for peer in self.peers):
                show([peer.status for peer in self.peers])
                time.sleep(STATUS_SECONDS)
            show([peer.status for peer in self.peers])

    def _display(self):
        return LiveTable(self.console, self.run_id) if self.console.is_terminal else Lines(self.console)

    def _end(self) -> None:
        for peer in self.peers:
            peer.leave()
        deadline = time.monotonic() + LEAVE_SECONDS
        for peer in self.peers:
            if peer.process is None:
                continue
            try:
                peer.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                peer.process.kill()
                peer.process.wait()

    def _report(self) -> int:
        failed = [peer for peer in self.peers if peer.process is not None and peer.process.returncode != 0]
        for peer in failed:
            self.console.print(f"{peer.name} failed: {peer.last_words()}", style="red", markup=False)
        finished = [summary for peer in self.peers if (summary := _read_summary(peer.folder / "summary.json"))]
        if finished:
            self.console.print(result_table(finished))
            self.console.print(f"Run folder: {self.run_folder}\nCurves:     tensorboard --logdir {self.run_folder}")
        return 1 if failed or not finished else 0


def wide_console() -> Console:
    """Tables need 110 columns; a log or a pipe has no width of its own."""
    return Console() if sys.stdout.isatty() else Console(width=110)


class LiveTable:
    """A table that is redrawn in place, for a terminal."""

    def __init__(self, console: Console, run_id: str):
        self._live, self._title = Live(console=console, refresh_per_second=4), f"run {run_id}"

    def __enter__(self):
        self._live.__enter__()
        return lambda statuses: self._live.update(status_table(statuses, self._title))

    def __exit__(self, *exc_info) -> None:
        self._live.__exit__(*exc_info)


class Lines:
    """A line per peer now and then, for a log."""

    def __init__(self, console: Console):
        self._console, self._last = console, -LINE_SECONDS

    def __enter__(self):
        return self._show

    def __exit__(self, *exc_info) -> None:
        pass

    def _show(self, statuses: list[Status]) -> None:
        if time.monotonic() - self._last >= LINE_SECONDS:
            self._last = time.monotonic()
            for status in statuses:
                self._console.print(f"{status.name}: {status.ended or status.line()}", markup=False, highlight=False)


def local_arguments(arguments: list[str]) -> list[str]:
    """Those options that are a peer's own: a joining peer takes the recipe from the swarm."""
    from dataclasses import fields

    from recipe.overrides import RecipeOverrides

    shared = {"recipe", *(item.name for item in fields(RecipeOverrides))}
    kept, skipping = [], False
    for argument in arguments:
        if argument.startswith("--"):
            skipping = argument[2:].split("=")[0].replace("-", "_").removeprefix("no_") in shared
        if not skipping:
            kept.append(argument)
    return kept


def _read_summary(path: Path) -> dict | None:
    import json

    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def result_table(summaries: list[dict]) -> Table:
    """What each peer gave, and what came out."""
    longest = max(summaries, key=lambda summary: summary["steps"])
    title = (
        f"{longest['outcome'].capitalize()}: validation accuracy {percent(longest['val_accuracy'])} after "
        f"{longest['steps']} updates and {longest['seconds']:.0f} s"
    )
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("peer", "outcome", "updates", "all parts", "samples given", "share", "samples/s", "val. accuracy"):
        table.add_column(column, justify="left" if column in ("peer", "outcome") else "right")
    total = sum(summary["samples"] for summary in summaries)
    for summary in summaries:
        table.add_row(
            summary["name"],
            summary["outcome"],
            str(summary["updates"]),
            percent(summary["complete_updates"] / summary["updates"] if summary["updates"] else None),
            f"{summary['samples']:,}",
            percent(summary["samples"] / total if total else None),
            shown(summary["samples"] / summary["seconds"], ".0f"),
            percent(summary["val_accuracy"]),
        )
    return table


@dataclass(frozen=True)
class LocalOptions:
    """Train with several peers on this machine. Every other option goes to python -m swarm.peer."""

    peers: int = 3
    """How many."""
    output_dir: Path = Path("runs")
    """Folder for the run folders."""
    run_id: str | None = None
    """Name of the run; default local- and the time."""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if a peer failed, 2 for input that cannot work."""
    options, rest = tyro.cli(LocalOptions, args=arguments, prog="python -m swarm.local", return_unknown_args=True)
    try:
        if not 1 <= options.peers <= 64:
            raise InputError(f"--peers is {options.peers}: give 1 to 64.")
        run_id = options.run_id or f"local-{time.strftime('%Y%m%d-%H%M%S')}"
        return LocalSwarm(options.peers, options.output_dir, run_id, rest).run()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
