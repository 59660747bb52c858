"""Runs peers on the loopback address that train as a user's would, and reads their files meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from analysis.campaigns.peer_processes import kill, last_words, parts
from analysis.program import environment_of_result
from recipe.run_folder import RunFolder, read_metrics
from recipe.training.pacing import ALL_SAMPLES, VARIABLE

ATTACKER_NAME = "mallory"
START_SECONDS = 180.0
WARM_UP_STEPS = 3
PROGRAM = ("-m", "swarm.peer")


class SwarmError(Exception):
    """Raised if an honest swarm has ended or does not go on; the message says why."""


def prepare(samples_per_second: float, all_samples: bool = False) -> dict[str, Any]:
    """Sets the environment for peers that are started from now on: this pace, one thread each, no other swarm to join.

    Args:
        samples_per_second: speed of each peer's pretended device.
        all_samples: whether gradients are those of all samples, as accuracies need; else of two of each micro-batch.

    Returns:
        the environment, as a result records it
    """
    os.environ |= {VARIABLE: str(samples_per_second), ALL_SAMPLES: str(int(all_samples)), "OMP_NUM_THREADS": "1"}
    os.environ.pop("INITIAL_PEERS", None)
    return environment_of_result() | {"paced_all_samples": all_samples}


class HonestPeer:
    """A process of `swarm.peer`.

    Args:
        name: its public name.
        folder: its run folder, also for its log.
        arguments: further options.
        program: as for `HonestSwarm`.
    """

    def __init__(self, name: str, folder: Path, arguments: Sequence[str], program: Sequence[str] = PROGRAM) -> None:
        self.name, self.folder, self.log = name, RunFolder(folder), folder / "peer.log"
        own = ["--public-name", name, "--identity-path", str(folder / "identity.key")]
        self._command = [sys.executable, "-u", *program, *arguments, *own]
        self.process: subprocess.Popen | None = None

    def start(self, address: str | None) -> None:
        """Start the peer, with the first peer's address or join line; None for the first peer itself."""
        self.folder.path.mkdir(parents=True, exist_ok=True)
        command = [*self._command, *(["--initial-peers", address] if address else [])]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    @property
    def address(self) -> str | None:
        """The peer's address, from its own status; None without one."""
        try:
            return next(iter(json.loads(self.folder.status.read_text())["addresses"]), None)
        except (OSError, ValueError, KeyError):
            return None

    @property
    def join_line(self) -> str | None:
        """The join line that the peer printed; None before it has."""
        found = re.search(r"swarm://\S+", self.log.read_text(errors="replace"))
        return found and found[0]

    @property
    def first_contribution_seconds(self) -> float | None:
        """Seconds from the command to the first contribution, from the peer's log; None before it."""
        found = re.search(r"First contribution ([\d.]+) s", self.log.read_text(errors="replace"))
        return found and float(found[1])

    @property
    def has_ended(self) -> bool:
        """Whether the peer was started and has ended."""
        return self.process is not None and self.process.poll() is not None

    @property
    def held_mb(self) -> float:
        """Megabytes of memory that the peer's processes hold; shared pages count in each of them."""
        with contextlib.suppress(psutil.NoSuchProcess):  # a process has just ended
            return sum(process.memory_info().rss for _, process in parts(psutil.Process(self.process.pid))) / 1e6
        return 0.0


class MemoryPeaks:
    """The most memory that each peer held at any call of `look`."""

    def __init__(self, peers: Sequence[HonestPeer]) -> None:
        self._peers, self._next = peers, 0.0
        self.megabytes = {peer.name: 0.0 for peer in peers}

    def look(self) -> None:
        """Note the memory of all peers, at most once per second."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 1.0
        for peer in self._peers:
            self.megabytes[peer.name] = max(self.megabytes[peer.name], peer.held_mb)


class HonestSwarm:
    """Honest peers on the loopback address.

    Args:
        name: name of the run.
        output_dir: parent of the run's folder.
        num_peers: number of peers.
        target_batch_size: samples per update.
        by_invitation: whether peers need an invitation of the first peer, or any peer may join.
        total_steps: updates of the run.
        more: further options of all peers.
        num_guests: further peers; training begins only when they are there.
        guest: called with the first peer's address and the number of a guest, from 1 on; lets the guest join.
        program: arguments of Python that run a peer; by default `swarm.peer`.
    """

    def __init__(
        self,
        name: str,
        output_dir: Path,
        num_peers: int,
        target_batch_size: int,
        by_invitation: bool = False,
        total_steps: int = 1_000_000,
        more: Sequence[str] = (),
        num_guests: int = 0,
        guest: Callable[[str, int], None] = lambda address, number: None,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self.folder, self.address, self._by_invitation = output_dir / name, "", by_invitation
        self._num_guests, self._guest = num_guests, guest
        arguments = ["--recipe", "digits", "--run-id", name, "--output-dir", str(output_dir.resolve())]
        arguments += ["--target-batch-size", str(target_batch_size), "--total-steps", str(total_steps)]
        arguments += ["--validate-every-steps", str(total_steps), "--device", "cpu", "--batch-size", "16", *more]
        arguments += ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--min-peers", str(num_peers + num_guests)]
        arguments += ["--by-invitation"] if by_invitation else []
        names = [f"peer-{number}" for number in range(1, num_peers + 1)]
        self.peers = [HonestPeer(name, self.folder / name, arguments, program) for name in names]
        self.folders = [peer.folder for peer in self.peers]
        self.peer_ids: set[str] = set()

    def __enter__(self) -> HonestSwarm:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        first, *others = self.peers
        first.start(None)
        wait_until(lambda: first.address, self, START_SECONDS, "have an address")
        self.address = first.address
        if self._by_invitation:
            wait_until(lambda: first.join_line, self, START_SECONDS, "print a join line")
        for peer in others:
            peer.start(first.join_line if self._by_invitation else self.address)
        for number in range(1, self._num_guests + 1):
            self._guest(self.address, number)
        wait_until(lambda: len(self.moments()) >= WARM_UP_STEPS, self, START_SECONDS, "train")
        self.peer_ids = {str(peer.address).rpartition("/")[2] for peer in self.peers}

    def __exit__(self, *_: object) -> None:
        for peer in self.peers:
            if peer.process is not None:
                kill(peer.process)

    @property
    def ended(self) -> list[str]:
        """Why peers have ended: a sentence for each."""
        return [f"{peer.name} ended ({last_words(peer.log)})" for peer in self.peers if peer.has_ended]

    def moments(self) -> list[float]:
        """Unix seconds at which the first peer had each update, ascending."""
        firsts: dict[int, float] = {}
        for folder in self.folders:
            for line in read_metrics(folder.metrics):
                if line.get("swarm/own_samples") is not None:
                    firsts[line["step"]] = min(line["time"], firsts.get(line["step"], line["time"]))
        return sorted(firsts.values())

    def all_train_since(self, moment: float) -> bool:
        """Whether each peer has made an update with all others since `moment`."""
        return all(
            any(
                line["time"] > moment and line.get("swarm/peers", 0) >= len(self.peers)
                for line in read_metrics(folder.metrics)
            )
            for folder in self.folders
        )

    def failed_rounds(self, since: float, until: float) -> int:
        """Number of failed rounds of all peers within a time."""
        ends = [
            line for folder in self.folders for line in read_metrics(folder.rounds) if since < line["time"] <= until
        ]
        return sum(line["outcome"] not in ("averaged", "alone") for line in ends)

    def log_sizes(self) -> list[int]:
        """Present size of each peer's log in bytes."""
        return [peer.log.stat().st_size for peer in self.peers]

    def naming_lines(self, since: Sequence[int], attacker_ids: set[str]) -> list[str]:
        """The first line of each log that names the attacker, after the sizes in `since`. Peers without such a line are
        left out."""
        found = []
        for peer, size in zip(self.peers, since, strict=True):
            with peer.log.open("rb") as log:
                log.seek(size)
                text = log.read().decode(errors="replace")
            if line := first_naming(text, attacker_ids):
                found.append(f"{peer.name}: {line[:200]}")
        return found


def first_naming(text: str, attacker_ids: set[str]) -> str | None:
    """The first line that has the attacker's name or one of its ids; None without any."""
    for line in text.splitlines():
        if ATTACKER_NAME in line or any(peer_id in line for peer_id in attacker_ids):
            return line.strip()
    return None


def wait_until(condition: Callable[[], Any], swarm: HonestSwarm, seconds: float, what: str) -> None:
    """Wait until the condition is true.

    Raises:
        SwarmError: a peer has ended, or the time is over.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if ended := swarm.ended:
            raise SwarmError("; ".join(ended))
        if time.monotonic() > deadline:
            raise SwarmError(f"the peers did not {what} within {seconds:.0f} s")
        time.sleep(0.2)
