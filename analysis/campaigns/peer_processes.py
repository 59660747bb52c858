"""Starts, tells apart and ends the processes of a peer."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil


def environment_without_peers() -> dict[str, str]:
    """The environment for peers of an experiment: without INITIAL_PEERS, so that they join no other swarm."""
    return {name: value for name, value in os.environ.items() if name != "INITIAL_PEERS"}


@contextlib.contextmanager
def started(
    command: Sequence[str], log: Path, variables: dict[str, str] | None = None, cwd: Path | None = None
) -> Iterator[subprocess.Popen]:
    """Runs a program for the length of the block; it joins no other swarm. Its child processes end with it.

    Args:
        command: the program and its arguments.
        log: the file for its output.
        variables: environment variables in addition to those of this process.
        cwd: its working folder; None for that of this process.
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
    """Why a program has ended: the last error in its log, or else the last line; at most 300 letters."""
    lines = log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines)[-1][:300]


def parts(peer: psutil.Process) -> Iterator[tuple[str, psutil.Process]]:
    """(name, process) of all processes of a peer, its main process first; the name says what a process does.

    Raises:
        psutil.NoSuchProcess: a process has ended meanwhile.
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
    """Kill a process and all its descendants, if it still runs."""
    if process.poll() is None:
        own = psutil.Process(process.pid)
        for child in [*own.children(recursive=True), own]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait()


def has_ended(process: subprocess.Popen, within_seconds: float) -> bool:
    """Whether the process ends within this time."""
    try:
        process.wait(within_seconds)
    except subprocess.TimeoutExpired:
        return False
    return True
