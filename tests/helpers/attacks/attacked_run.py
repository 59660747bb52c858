"""A run of two honest peers under attack, and what must not happen to it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from recipe.run_folder import read_metrics
from tests.helpers.attacks import outsiders
from tests.helpers.attacks.rounds_under_attack import assert_few_failed
from tests.helpers.cli import PACED, TINY, PeerProgram

LOOPBACK = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0")
FEW_FILES = 1024
"""The number of open files that a system usually allows."""
SMALL = [*TINY[:-1], "1024"]
"""The model that makes a few updates a second, with half the samples for each."""
LARGE_STEPS = ("--batch-size", "128")
"""Options of peers whose training is not judged: larger micro-batches take less of the processor."""
WIDER = ["128" if word == "32" else word for word in SMALL]
"""The same with a state of some megabytes, which is easily told from what peers otherwise say to each other."""
TOGETHER = 6
"""Updates that both honest peers have to make together under attack."""


@dataclass
class Seen:
    """The state of a peer before an attack."""

    lines: int
    output: int
    processes: set[int]
    files: int
    bytes: int

    @classmethod
    def of(cls, peer: PeerProgram) -> Seen:
        alive = peer.alive()
        files, rss = max(process.num_fds() for process in alive), sum(process.memory_info().rss for process in alive)
        return cls(len(rounds_of(peer)), len(peer.output), {process.pid for process in alive}, files, rss)


def rounds_of(peer: PeerProgram) -> list[dict]:
    return read_metrics(peer.folder.rounds)


class Attacked:
    """A run of two peers that train without end. A new one replaces it if an attack has ended or divided it."""

    def __init__(self, folder: Path, programs: list, by_invitation: bool = False):
        self._folder, self._programs, self._runs = folder, programs, 0
        self._options = ["--by-invitation"] if by_invitation else []
        self.folder = folder
        """Folder of the present run."""
        self.peers: list[PeerProgram] = []
        self.healthy = False
        self.before: list[Seen] = []

    def begin(self) -> Attacked:
        """Make sure that both peers run and make updates with each other."""
        if not self.healthy:
            for program in self._programs:
                program.reap()
            self._runs += 1
            folder = self._folder / str(self._runs)
            folder.mkdir()
            self.folder = folder
            options = [
                *self._options,
                "--run-id",
                "live",
                "--total-steps",
                "100000",
                "--validate-every-steps",
                "100000",
                *(WIDER if self._options else SMALL),
            ]
            own = {"open_files": FEW_FILES, **PACED}
            first = PeerProgram(folder, "live", "first", *options, *LOOPBACK, *LARGE_STEPS, **own)
            self._programs.append(first)
            self.peers = [first]
            given = ("--initial-peers", self.invitation)
            second = PeerProgram(folder, "live", "second", *given, *LOOPBACK, *LARGE_STEPS, **own)
            self._programs.append(second)
            self.peers = [first, second]
            for peer in self.peers:
                peer.wait_until(lambda peer=peer: len(self._together(peer, 0)) >= 3, "updates with the other peer")
        self.healthy = False  # until an attack has done no harm
        self.begin_again()
        return self

    def begin_again(self) -> None:
        """Judge only what happens from now on."""
        self.before = [Seen.of(peer) for peer in self.peers]

    @property
    def address(self) -> str:
        return self.peers[0].address

    @property
    def invitation(self) -> str:
        """What a newcomer is given: an address, or a join line."""
        first = self.peers[0]
        if not self._options:
            return first.address
        return first.wait_until(lambda: re.search(r"swarm://\S+", first.output), "it prints a join line")[0]

    @staticmethod
    def _together(peer: PeerProgram, since: int) -> list[dict]:
        return [line for line in rounds_of(peer)[since:] if line["outcome"] == "averaged" and line["group_size"] == 2]

    def trains_on(self, updates: int = TOGETHER) -> None:
        """Wait until both have made so many further updates together, and check that the attack has done no harm."""
        begin = [len(rounds_of(peer)) for peer in self.peers]
        for peer, since in zip(self.peers, begin, strict=True):
            peer.wait_until(lambda p=peer, s=since: len(self._together(p, s)) >= updates, "updates under attack", 150)
        for peer, before in zip(self.peers, self.before, strict=True):
            lines = rounds_of(peer)[before.lines :]
            assert_few_failed(line["outcome"] for line in lines)
            assert max(line["step"] for line in lines) < outsiders.FALSE_STEP / 10
            assert before.processes <= {process.pid for process in peer.alive()}, peer.output
            assert not peer.status.ended, peer.output
            said = peer.output[before.output :]
            assert "Took over step" not in said, said
        self.healthy = True

    def said(self) -> str:
        """What both peers have printed since the attack began."""
        return "".join(peer.output[seen.output :] for peer, seen in zip(self.peers, self.before, strict=True))
