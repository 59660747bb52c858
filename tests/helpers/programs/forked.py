"""Programs that start quickly: forked by a process that has imported what peers import (`importer.py`).

From there on they run as if `python -m` had started them: the module runs at the top level of its process, to its end.
Tests of the start itself use real processes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
from pathlib import Path

from tests.helpers.programs.importer import PROGRAMS, ask

START_SECONDS = 180.0


class ForkedProgram:
    """A forked program with the interface of `subprocess.Popen`.

    Args:
        environment: all variables, without those that libraries read while they are imported
        open_files: limit of open files at first, if not that of the process that forks it
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
            _server.cache_clear()  # the server has died; the next test gets another one
            raise

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status.

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
        """Send a signal if the program has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the program as the kernel does when memory runs out."""
        self.send_signal(signal.SIGKILL)

    def _told(self, seconds: float | None) -> int:
        self._keeper.settimeout(seconds)
        if not (said := self._keeper.recv(64)):
            raise EOFError("who forks programs has died")
        return int(said)


@functools.cache
def _server() -> socket.socket:
    """Return the connection to this test process's server of programs, which ends with the connection."""
    return ask(PROGRAMS)
