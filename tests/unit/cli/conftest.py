"""An organiser that has started a run, and members in her books."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hivemind.p2p import PeerID

from recipe.run_folder import RunFolder
from swarm.enrolment.organiser_folder import OrganiserFolder
from swarm.enrolment.registry import Member
from swarm.protocol.certificates import EVERYTHING, Role

NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
"""An address where no peer answers."""


class OrganisersRun:
    """The organiser's files on her disk."""

    def __init__(self, output_dir: Path, run_id: str = "digits"):
        self.output_dir, self.folder = output_dir, OrganiserFolder(output_dir, run_id)
        self.signer = self.folder.make_signer()
        self.folder.note_contact(self.signer.public_key, [NOBODY], 31338)

    def another(self, run_id: str) -> OrganisersRun:
        """Another run of the same organiser."""
        return OrganisersRun(self.output_dir, run_id)

    def add(self, name: str, roles: Role = EVERYTHING, uses: int = 1) -> Member:
        """A new member, which came with an invitation for so many people."""
        registry, peer_id = self.folder.registry, PeerID(b"\x12\x20" + os.urandom(32))
        return registry.use_invitation(registry.invite(name, 1, uses, roles), peer_id, name)

    def note_rounds(self, peer: str, *rounds: tuple[int, dict[Member, int]]) -> None:
        """Write the metrics of a peer on her machine that has seen these steps, with the samples of their members."""
        folder = RunFolder.create(self.output_dir, self.folder.run_id, peer)
        lines = [
            {
                "step": step,
                "outcome": "averaged",
                "members": [str(member.peer_id) for member in samples],
                "member_samples": list(samples.values()),
            }
            for step, samples in rounds
        ]
        folder.rounds.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def options(self, *arguments: str) -> list[str]:
        """A command line for this run."""
        return [*arguments, "--output-dir", str(self.output_dir)]


@pytest.fixture
def her_run(tmp_path, monkeypatch) -> OrganisersRun:
    monkeypatch.delenv("SWARM_KEY_PASSPHRASE", raising=False)
    monkeypatch.setenv("HIVEMIND_LOGLEVEL", "WARNING")
    return OrganisersRun(tmp_path / "runs")


@pytest.fixture
def refusal(capsys) -> Callable[..., str]:
    """A function that runs a command, which has to refuse in one sentence, and returns that sentence."""

    def run(main: Callable[[list[str]], int], arguments: list[str]) -> str:
        assert main(arguments) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    return run
