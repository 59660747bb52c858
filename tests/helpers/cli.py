"""Runs `python -m swarm.peer` and `swarm demo` as people do, and leaves no process behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil

from recipe.run_folder import RunFolder
from swarm.network.addresses import environment_without_peers
from swarm.peer.status import Status
from swarm.runtime.processes import die_with_parent, kill
from tests.helpers.programs.forked import ForkedProgram
from tests.helpers.programs.importer import limit_open_files

START_SECONDS = 180
"""A process imports for 10 s, and far longer when other processes compute on the same two cores."""

LEAVE_SECONDS = 60
"""A program that is not killed leaves in ten or twenty seconds, and sooner on an idle machine."""

TINY = ["--depth", "1", "--embed-dim", "32", "--num-heads", "2", "--target-batch-size", "2048"]
"""Options of a digits model that makes a few updates a second, the most that swarms are made for."""

PACED = {"PACED_SAMPLES_PER_SECOND": "1000"}
"""Environment of peers that train without end: they leave the processor to peers that have just started."""

_MARK = "SWARM_TEST_PROCESS"
_STARTS_FOR_REAL = {"HIVEMIND_LOGLEVEL", "OMP_NUM_THREADS"}
"""Environment variables that libraries read while they are imported."""
Value = TypeVar("Value")


def wait_until(condition: Callable[[], Value], seconds: float, what: str) -> Value:
    """Poll until the condition holds; returns what it returned.

    A pause is four times as long as the check, which then takes a fifth of a core, but at most 0.5 s.
    """
    begin = asked_at = time.monotonic()
    while not (value := condition()):
        now = time.monotonic()
        assert now < begin + seconds, f"not within {seconds:.0f} s: {what}"
        time.sleep(min(0.5, max(0.05, 4 * (now - asked_at))))
        asked_at = time.monotonic()
    return value


class Program:
    """A process of ours. Its descendants are found by its session, or by a mark that they inherit, even as orphans.

    Args:
        open_files: limit of open files at first, if not that of this process
        prefix: a command that runs it elsewhere, such as `ip netns exec`
        python: interpreter of another environment
        forks: fork it from a process with all imports (`tests.helpers.programs.forked`), or start it as users do
    """

    def __init__(
        self,
        module: str,
        arguments: list[str],
        log: Path,
        nice: int = 0,
        open_files: int | None = None,
        prefix: tuple[str, ...] = (),
        python: str = sys.executable,
        cwd: Path | None = None,
        forks: bool = False,
        **environment: str,
    ):
        self.log, self.mark = log, uuid.uuid4().hex
        self.started = time.monotonic()
        own = {_MARK: self.mark, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment = {**environment_without_peers(), **own, **environment}
        if forks:
            self.process = ForkedProgram(module, arguments, log, nice, environment, open_files)
            return
        parent = os.getpid()

        def prepare() -> None:
            die_with_parent(signal.SIGTERM, parent)
            os.nice(nice)
            limit_open_files(open_files)

        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*prefix, python, "-m", module, *arguments],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=prepare,
                env=environment,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def alive(self) -> list[psutil.Process]:
        """Every living process of this program's family, whatever its parent is now."""
        return [process for process in psutil.process_iter() if self._is_own(process)]

    def _is_own(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return os.getsid(process.pid) == self.process.pid or process.environ().get(_MARK) == self.mark
        except (psutil.Error, ProcessLookupError):
            return False

    def wait_until(self, condition: Callable[[], Value], what: str, seconds: float = START_SECONDS) -> Value:
        """Poll until the condition holds; fails at once, with the output, if the program has ended."""

        def checked() -> Value:
            running = self.is_running
            value = condition()
            assert value or running, f"it ended with {self.process.returncode} before {what}:\n{self.output}"
            return value

        try:
            return wait_until(checked, seconds, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from None

    def interrupt(self) -> None:
        """Send what Ctrl-C in a terminal sends to the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, seconds: float) -> int:
        """Return the exit status; fails if the program has not ended by then, or leaves a process."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:.0f} s:\n{self.output}") from None
        wait_until(lambda: not self.alive(), 5, f"{self.alive()} should have ended with {self.process.pid}")
        return status

    def reap(self) -> None:
        kill(self.alive())
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)


class PeerProgram(Program):
    """`python -m swarm.peer` under a public name."""

    def __init__(
        self,
        output_dir: Path,
        run_id: str,
        name: str,
        *arguments: str,
        nice: int = 0,
        open_files: int | None = None,
        prefix: tuple[str, ...] = (),
        module: str = "swarm.peer",
        **environment: str,
    ):
        self.name, self.folder = name, RunFolder(output_dir / run_id / name)
        own = ["--output-dir", str(output_dir), "--public-name", name, "--no-port-mapping"]  # nor the tester's router
        self.folder.status.unlink(missing_ok=True)
        forks = not prefix and _STARTS_FOR_REAL.isdisjoint(environment)
        super().__init__(
            module, [*own, *arguments], output_dir / f"{name}.log", nice, open_files, prefix, forks=forks, **environment
        )

    @property
    def status(self) -> Status:
        return Status.read(self.folder.status) or Status(self.name, "", "starting")

    @property
    def peer_id(self) -> str:
        return self.address.rsplit("/", 1)[1]

    @property
    def address(self) -> str:
        """Where it is reached on this machine; waits until it is known."""
        return self.wait_until(lambda: self.status.addresses, "it listens")[0]

    def wait_for_contribution(self, updates: int = 1) -> Status:
        """Wait until further samples of this peer are in averages that it made together with other peers."""
        before = self.status

        def contributes() -> Status | None:
            status = self.status
            more = status.contributed > before.contributed and status.step >= before.step + updates
            return status if more and status.num_peers > 1 else None

        return self.wait_until(contributes, f"{self.name} contributes to {updates} updates with others")


@contextlib.contextmanager
def reaping() -> Iterator[list[Program]]:
    """Yield a list of programs. At the end none of their processes is left, whatever happened."""
    programs: list[Program] = []
    try:
        yield programs
    finally:
        for program in programs:
            program.reap()


@contextlib.contextmanager
def live_peer(output_dir: Path) -> Iterator[PeerProgram]:
    """Start the first peer of run "live", which trains without end."""
    with reaping() as programs:
        options = ["--run-id", "live", "--total-steps", "100000", "--validate-every-steps", "100000", *TINY]
        peer = PeerProgram(output_dir, "live", "first", *options, **PACED)
        programs.append(peer)
        assert peer.address
        yield peer


def summary_of(folder: RunFolder) -> dict:
    """Return the summary that a peer has written at its end."""
    return json.loads(folder.summary.read_text())
