"""A volunteer on a host of a lab: starts, breaks and watches the program of a peer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from analysis.campaigns.peer_processes import environment_without_peers
from analysis.wan.lab import Lab
from analysis.wan.topology import Host
from recipe.errors import InputError
from recipe.run_folder import RunFolder, read_metrics
from recipe.training.pacing import VARIABLE

RUN_ID = "soak"
PORT = 31337
ADDRESS_SECONDS = 120.0
RESTART_SECONDS = 5.0
CALM_RUNS, CALM_RUN_SECONDS, CALM_SAMPLES_PER_SECOND = 3, 1800.0, "3000"
RECIPE = ("--recipe", "digits", "--total-steps", "100000", "--validate-every-steps", "25")
_ROOT = Path(__file__).parents[2]


class Volunteer:
    """A peer that is started again whenever it ends.

    Args:
        host: the host of the lab.
        lab: the network; open.
        folder: folder for `runs/` and `logs/`.
        samples_per_second: speed of its pretended device.
        recipe: options of the peer that starts the run.
        outbound_only: whether it is a client-mode peer, which only calls others.

    The first host's peer starts the run, and is always started with the options for that: if no other peer is there, it
    goes on alone.
    """

    def __init__(
        self,
        host: Host,
        lab: Lab,
        folder: Path,
        samples_per_second: float,
        recipe: Sequence[str] = RECIPE,
        outbound_only: bool = False,
    ) -> None:
        self.host, self.lab, self.name = host, lab, host.name
        self.runs, self.log = folder / "runs", folder / "logs" / f"{host.name}.log"
        self.folder = RunFolder(self.runs / RUN_ID / host.name)
        self.rate, self.recipe, self.outbound_only = samples_per_second, recipe, outbound_only
        self.process: subprocess.Popen | None = None
        self.started = 0.0
        self.ended: float | None = None
        self._first_address: str | None = None

    def command(self, address: str | None) -> list[str]:
        """The command of the peer. As with systemd it is always the same, with the address of the first start."""
        self._first_address = self._first_address or address
        command = [sys.executable, "-m", "swarm.peer", "--public-name", self.name, "--output-dir", str(self.runs)]
        command += ["--run-id", RUN_ID, "--host-maddrs", self._listens, "--device", "cpu", "--batch-size", "16"]
        command += ["--checkpoint-every-steps", "10", *(["--client-mode"] if self.outbound_only else [])]
        return command + (list(self.recipe) if self.host.number == 1 else ["--initial-peers", str(self._first_address)])

    @property
    def _listens(self) -> str:
        return f"/ip4/{self.host.address}/tcp/{PORT}"

    def start(self, address: str | None) -> None:
        """Start the peer, with the address of a running peer if there is one."""
        command = self.command(address)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        variables = {VARIABLE: str(self.rate), "OMP_NUM_THREADS": "1"}
        self.folder.status.unlink(missing_ok=True)
        with self.log.open("ab") as log, _a_terminal_that_counts():
            self.process = self.lab.start(
                self.host,
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=_ROOT,
                env=environment_without_peers() | variables,
            )
        self.started, self.ended = time.monotonic(), None

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def address(self) -> str | None:
        """The peer's address, from its own status; None without one."""
        try:
            found = json.loads(self.folder.status.read_text())["addresses"]
        except (OSError, ValueError, KeyError):
            return None
        return next((address for address in found if self.host.address in address), None)

    def wait_for_address(self) -> str:
        """Wait for the peer's address; raises InputError if there is none in time."""
        deadline = time.monotonic() + ADDRESS_SECONDS
        while (address := self.address) is None:
            if time.monotonic() > deadline or not self.is_running:
                raise InputError(f"The peer on {self.name} does not come up: see {self.log}.")
            time.sleep(0.2)
        return address

    def trains_since(self, moment: float) -> bool:
        """Whether the peer has made an update with others since `moment` (Unix seconds)."""
        if not self.is_running:
            return False
        lines = read_metrics(self.folder.metrics)[-20:]
        return any(line["time"] > moment and line.get("swarm/peers", 0) > 1 for line in lines)

    def processes(self) -> list[psutil.Process]:
        """All processes of the peer that still run: those in the host's network namespace."""
        namespace = os.stat(f"/run/netns/{self.name}").st_ino
        return [process for process in psutil.process_iter() if _namespace(process) == namespace]

    def kill(self) -> None:
        """Kill -9 the main process; the peer's other processes have to end by themselves."""
        if self.is_running:
            self.process.kill()
            self.process.wait()

    def kill_part(self, part: str) -> None:
        """Kill -9 only p2pd, the DHT process or the averaging process; do nothing if the peer is down."""
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            forks = [child for child in own.children() if "python" in child.name()]
            dht = [child for child in forks if child.children()]
            parts = {"p2pd": [grandchild for child in dht for grandchild in child.children()], "the DHT process": dht}
            for process in parts.get(part, [child for child in forks if child not in dht]):
                process.kill()

    def send(self, signal_number: int) -> None:
        """Send a signal to all processes of the peer."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal_number)

    def close_terminal(self) -> None:
        """Send SIGHUP to the main process only."""
        if self.is_running:
            self.process.send_signal(signal.SIGHUP)

    def limit_files(self, full: bool) -> None:
        """Limit the size of files that the main process can write, as on a full disk, or lift the limit."""
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            _, hard = own.rlimit(psutil.RLIMIT_FSIZE)
            own.rlimit(psutil.RLIMIT_FSIZE, (2**16 if full else hard, hard))  # not 0: shared memory has files, too

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does."""
        if self.is_running:
            self.process.send_signal(signal.SIGINT)

    def wait(self, seconds: float = 20.0) -> None:
        """Wait until the peer has ended, at most for `seconds`."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass

    def restart_if_ended(self, address: str | None) -> None:
        """Start the peer again some seconds after it has ended, for whatever reason."""
        if self.is_running:
            return
        self.ended = self.ended or time.monotonic()
        if time.monotonic() - self.ended > RESTART_SECONDS:
            self.start(address)


class StockVolunteer(Volunteer):
    """A volunteer with Hivemind's own Optimizer (`analysis/opponents/hivemind_optimizer.py`).

    It keeps no checkpoints and no addresses of other peers, so each start gets the address of a running peer.

    Args:
        num_peers: number of all peers. They wait for each other before they begin, but not when they come back.
    """

    def __init__(self, *arguments, num_peers: int) -> None:
        super().__init__(*arguments)
        self._num_peers = num_peers
        self.folder = RunFolder(self.runs / "run" / self.name)

    def command(self, address: str | None) -> list[str]:
        command = [
            sys.executable,
            "-m",
            "analysis.opponents.hivemind_optimizer",
            "--name",
            self.name,
            "--output-dir",
            str(self.runs),
        ]
        num_peers = 1 if self.folder.metrics.exists() else self._num_peers
        command += ["--listen", self._listens, "--peers", str(num_peers), "--steps", "100000"]
        command += ["--batch-size", "16", "--recipe", "digits", "--initial-peers", *([address] if address else [])]
        return command

    def start(self, address: str | None) -> None:
        """Kill what is left of the peer, and start it.

        Processes that are left would keep its port. A service manager would kill them before the next start.
        """
        self.send(signal.SIGKILL)
        super().start(address)

    def kill(self) -> None:
        """Kill -9 all processes of the peer."""
        super().kill()
        self.send(signal.SIGKILL)

    def trains_since(self, moment: float) -> bool:
        """Whether the peer has made an update since then. Hivemind's Optimizer does not tell with how many others."""
        return self.is_running and any(line["time"] > moment for line in read_metrics(self.folder.metrics)[-20:])


def _namespace(process: psutil.Process) -> int | None:
    try:
        return os.stat(f"/proc/{process.pid}/ns/net").st_ino
    except OSError:
        return None


@contextlib.contextmanager
def _a_terminal_that_counts() -> Iterator[None]:
    """Lets processes that the block starts receive SIGHUP, even if this program was started with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL if before is None else before)


def calm_runs(lab: Lab, folder: Path, recipe: Sequence[str], steps: int, num_runs: int = CALM_RUNS) -> list[RunFolder]:
    """Runs peers that train alone on `num_runs` hosts at once, for as many updates, without faults; returns their
    folders.

    They are paced as well, but faster. With pacing, the gradients of a few samples stand for those of a micro-batch.
    These learn worse, and so unevenly that one run says little.
    """
    folder.mkdir(parents=True, exist_ok=True)
    variables = environment_without_peers() | {VARIABLE: CALM_SAMPLES_PER_SECOND, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "swarm.peer", "--output-dir", str(folder), *recipe, "--max-steps", str(steps)]
    command += ["--device", "cpu", "--batch-size", "16"]
    processes = []
    for host in lab.hosts[:num_runs]:
        own = ["--public-name", host.name, "--run-id", f"calm-{host.name}"]
        with (folder / f"{host.name}.log").open("wb") as log:
            options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "env": variables}
            processes.append(lab.start(host, command + own, **options))
    deadline = time.monotonic() + CALM_RUN_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    return [RunFolder(folder / f"calm-{host.name}" / host.name) for host in lab.hosts[:num_runs]]
