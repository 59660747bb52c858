"""Training processes for tests: each runs the baseline's command line, or a function, in a process of its own.

    codes = run_cluster(2, ["--strategy", "ddp", ...])          # like torchrun with two processes; exit statuses
    values = run_processes(2, function, argument)               # what function(argument) returns in each of them

Importing torch and Lightning takes many seconds, so one helper process (multiprocessing's fork server) does it once and
all processes are forked from it. Functions are named by module, so they have to be at the top level of theirs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.helpers.programs.fork_server import FORK_SERVER
from tests.helpers.programs.ports import free_port

TIMEOUT_SECONDS = 240.0


class Cluster:
    """Processes with torchrun's variables in their environment; none of them outlives the `with` block.

    Args:
        size: number of processes.
        function: what each of them calls.
        arguments: with which arguments.
        log: what they print goes to this file.
        environment: more variables.
    """

    def __init__(
        self,
        size: int,
        function: Callable[..., Any],
        *arguments: Any,
        log: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._connections, self.processes = [], []
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if size > 1 else {}
        for rank in range(size):
            sizes = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size} if size > 1 else {}
            variables = {name: str(value) for name, value in sizes.items()} | address | (environment or {})
            receiver, sender = FORK_SERVER.Pipe(duplex=False)
            process = FORK_SERVER.Process(target=_work, args=(sender, variables, log, function, arguments))
            process.start()
            sender.close()
            self._connections.append(receiver)
            self.processes.append(process)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def results(self, timeout_seconds: float = TIMEOUT_SECONDS) -> list[Any]:
        """What each process returned, by rank.

        Raises:
            AssertionError: one raised (the message is its traceback), died or took too long.
        """
        results = []
        for rank, connection in enumerate(self._connections):
            assert wait([connection], timeout_seconds), f"process {rank} is not done after {timeout_seconds} s"
            try:
                ok, value = connection.recv()
            except EOFError:
                raise AssertionError(f"process {rank} ended without a result") from None
            assert ok, f"process {rank} raised:\n{value}"
            results.append(value)
        return results


def _work(sender: Any, variables: dict[str, str], log: Path | None, function: Callable, arguments: tuple) -> None:
    import torch

    os.environ.update(variables)
    torch.set_num_threads(1)  # two processes on two cores
    if log is not None:
        with open(log, "ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    try:
        message = (True, function(*arguments))
    except BaseException:
        message = (False, traceback.format_exc())
    with contextlib.suppress(OSError):
        sender.send(message)
    sys.stdout.flush()
    sys.stderr.flush()


def train(arguments: list[str]) -> int:
    """Run the baseline's command line; returns its exit status."""
    from baseline_ddp.train import main

    try:
        return main(arguments)
    except SystemExit as end:
        return end.code


def run_cluster(size: int, arguments: list[Any], **options: Any) -> list[int]:
    """Trains with so many processes and returns their exit statuses by rank."""
    with Cluster(size, train, [str(argument) for argument in arguments], **options) as cluster:
        return cluster.results()


def run_processes(size: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """Calls the function in so many processes and returns what they return, by rank."""
    with Cluster(size, function, *arguments, **options) as cluster:
        return cluster.results()


@contextlib.contextmanager
def silent_listener() -> Iterator[tuple[str, int]]:
    """Yield an address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()


@contextlib.contextmanager
def rude_listener() -> Iterator[tuple[str, int]]:
    """Yield an address that takes connections and hangs up at once."""
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            yield server.server_address
        finally:
            server.shutdown()
