"""The processes that a peer is made of: what each of them is for, and how to start and end them all."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil


def environment_without_peers() -> dict[str, str]:
    """A copy of the environment for peers of an experiment, which have to join nobody else's swarm."""
    return {name: value for name, value in os.environ.items() if name != "INITIAL_PEERS"}


@contextlib.contextmanager
def started(
    command: Sequence[str], log: Path, variables: dict[str, str] | None = None, cwd: Path | None = None
) -> Iterator[subprocess.Popen]:
    """A program that joins nobody else's swarm; it ends with the block, and so does all that it has started.

    Args:
        command: the program, and what it is told.
        log: the file for what it prints.
        variables: of its environment, beside those of this process.
        cwd: its folder; None for that of this process.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=environment_without_peers() | (variables or {}),
        )
    try:
        yield process
    finally:
        kill(process)


def last_words(log: Path) -> str:
    """Why a program has ended: its last error, or else its last line; at most 300 letters."""
    lines = log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines)[-1][:300]


def parts(peer: psutil.Process) -> Iterator[tuple[str, psutil.Process]]:
    """(What it is for, process) of a peer, its own process first.

    Raises:
        psutil.NoSuchProcess: one of them has ended meanwhile.
    """
    for process in (peer, *peer.children(recursive=True)):
        yield _part(peer, process), process


def _part(peer: psutil.Process, process: psutil.Process) -> str:
    if process == peer:
        return "training"
    if "p2pd" in process.name():
        return "p2pd"
    if any("p2pd" in child.name() for child in process.children()):
        return "DHT"
    return "averaging" if "python" in process.name() else process.name()


def kill(process: subprocess.Popen) -> None:
    """And all that it has started, if it still runs."""
    if process.poll() is None:
        own = psutil.Process(process.pid)
        for child in [*own.children(recursive=True), own]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait()


def has_ended(process: subprocess.Popen, within_seconds: float) -> bool:
    """Whether it ends until then."""
    try:
        process.wait(within_seconds)
    except subprocess.TimeoutExpired:
        return False
    return True
