"""Programs that have begun already: one process imports what peers import, and forks whoever is asked for.

A peer imports for five seconds, and the suite starts a hundred. From there on it is as if `python -m` had started it,
to its very end: the module runs at the top level of its process. Where starting is the subject, tests start for real.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

from swarm.runtime.processes import die_with_parent
from tests.helpers.paths import ROOT
from tests.helpers.programs.fork_server import have_own_locks

START_SECONDS = 180.0
REQUEST_BYTES = 1 << 17


class ForkedProgram:
    """What `subprocess.Popen` is for a program that is started for real.

    Args:
        environment: all of it, without what is read at the import of a library
        open_files: as many as it may have open at first, if not as many as the one that forks it
    """

    def __init__(
        self,
        module: str,
        arguments: list[str],
        log: Path,
        nice: int,
        environment: dict[str, str],
        open_files: int | None = None,
    ):
        self._keeper, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {
            "module": module,
            "arguments": arguments,
            "nice": nice,
            "environment": environment,
            "cwd": os.getcwd(),
            "open_files": open_files,
        }
        try:
            with its_end, log.open("wb") as output:
                socket.send_fds(_server(), [json.dumps(request).encode()], [its_end.fileno(), output.fileno()])
            self.pid, self.returncode = self._told(START_SECONDS), None
        except (OSError, EOFError):
            _server.cache_clear()  # it has died; the next test has another one
            raise

    def poll(self) -> int | None:
        """The exit status, if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status.

        Raises:
            subprocess.TimeoutExpired: it is still running after so many seconds
        """
        if self.returncode is None:
            try:
                self.returncode = self._told(timeout)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0) from None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """If it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """As the kernel does where memory runs out."""
        self.send_signal(signal.SIGKILL)

    def _told(self, seconds: float | None) -> int:
        self._keeper.settimeout(seconds)
        if not (said := self._keeper.recv(64)):
            raise EOFError("who forks programs has died")
        return int(said)


@functools.cache
def _server() -> socket.socket:
    """Of this test process, to which it listens; it goes when that does."""
    ours, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    as_in_peers = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "HIVEMIND_LOGLEVEL": "WARNING"}
    with its_end:
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(its_end.fileno())],
            cwd=ROOT,
            pass_fds=[its_end.fileno()],
            env=os.environ | as_in_peers,
            start_new_session=True,
        )
    return ours


def _asked(control: socket.socket) -> tuple[dict, int]:
    """In a process that has forked twice: what to become, and its log."""
    import tests.helpers.programs.preloaded  # noqa: F401

    server = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    while True:
        request, files, *_ = socket.recv_fds(control, REQUEST_BYTES, 2)
        if not request:
            os._exit(0)
        if os.fork():
            for file in files:
                os.close(file)
            continue
        control.close()
        die_with_parent(signal.SIGTERM, server)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        tester, keeper = socket.socket(fileno=files[0]), os.getpid()
        if program := os.fork():
            _keep(program, tester)
        os.setsid()
        die_with_parent(signal.SIGTERM, keeper)
        tester.send(str(os.getpid()).encode())
        tester.close()
        return json.loads(request), files[1]


def _keep(program: int, tester: socket.socket) -> None:
    """Tell its status, and let nobody else have its number before the test is done with it."""
    end = os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT)
    status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
    with contextlib.suppress(OSError):  # the test is over
        tester.send(str(status).encode())
        tester.recv(1)
    os._exit(0)


def limit_open_files(number: int | None) -> None:
    """This process may have so many open until it asks for more, as systems usually allow."""
    if number is not None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, most))


def _become(request: dict, log: int) -> None:
    """All that a new process would find."""
    os.nice(request["nice"])
    limit_open_files(request["open_files"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    for file, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(file, number)
    os.close(nothing)
    os.close(log)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    np.random.seed()
    have_own_locks()
    sys.argv[1:] = request["arguments"]
    sys.orig_argv = [sys.executable, "-m", request["module"], *request["arguments"]]


if __name__ == "__main__":
    asked, its_log = _asked(socket.socket(fileno=int(sys.argv[1])))
    _become(asked, its_log)
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
