"""Programs that have begun already: forked by a process that has imported what peers import (`importer.py`).

From there on it is as if `python -m` had started it, to its very end: the module runs at the top level of its process.
Where starting is the subject, tests start for real.
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
    return ask(PROGRAMS)
