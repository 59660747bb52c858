"""A run of three peers with their ledgers, without a network, and forgery of these ledgers afterwards."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import msgspec
from hivemind.utils.crypto import RSAPrivateKey

from swarm.ledger.audit import Audit, audit
from swarm.ledger.ledger import Ledger
from swarm.ledger.lines import AnyLine, Signature, Update, digest_of, read_line, to_line
from swarm.membership.run_manifest import PROTOCOL
from swarm.network.signed_records import OwnedRecords
from swarm.protocol.admission import OPEN, Admission
from swarm.protocol.attestation import Attestation
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.messages import Group, Ticket
from swarm.protocol.round_report import RoundReport, StepReport
from swarm.protocol.run_names import key_prefix

NAMES = ("anna", "ben", "cleo")
RUN = key_prefix("letters", "0123abcd")
SAMPLES = {"anna": 96, "ben": 64, "cleo": 32}


@cache
def owner(name: str) -> OwnedRecords:
    """Return the keys of the peer of this name, made once: a key takes a tenth of a second."""
    return OwnedRecords(RSAPrivateKey())


class LedgerRun:
    """Peers that make updates together and write their ledgers.

    Args:
        folder: of the run
        run: start of the run's keys
        admissions: by peer, in a run with an organiser
        sign_seconds: time between two signatures
    """

    def __init__(
        self, folder: Path, run: str = RUN, admissions: dict[str, Admission] | None = None, sign_seconds: float = 0.0
    ):
        self.folder, self.run, self.admissions = folder, run, admissions or {}
        self.lineage, self.step, self.sign_seconds, self.protocol = bytes(16), 0, sign_seconds, PROTOCOL
        self.ledgers: dict[str, Ledger] = {}

    def path(self, name: str) -> Path:
        return self.folder / name / "ledger.jsonl"

    def start(self, *names: str) -> None:
        """Let these peers begin to train, or come back."""
        for name in names:
            self.path(name).parent.mkdir(parents=True, exist_ok=True)
            admission = self.admissions.get(name, OPEN)
            of_run = self.path(name), self.run, self.protocol
            self.ledgers[name] = Ledger(*of_run, owner(name), name, admission, self.sign_seconds)
            self.ledgers[name].begin()

    def group(self, samples: dict[str, int], loss: float = 1.5) -> Group:
        """Return a group for the next step."""
        names = sorted(samples, key=lambda name: owner(name).own.to_bytes())
        sketch = (0.1, -2.5e-7) if self.step % 8 == 0 else ()
        rest = sketch, False, b"" if self.step < 2 else b"2 orders", bytes(16) if self.step else b""
        tickets = [Ticket(self.step, samples[name], name == "cleo", loss, self.lineage, *rest) for name in names]
        return Group.close(os.urandom(16), tuple(owner(name).own for name in names), tuple(tickets), self.run)

    def update(
        self, samples: dict[str, int] | None = None, written_by: Iterable[str] | None = None, loss: float = 1.5
    ) -> Group:
        """Let these peers make an update together."""
        group = self.group(samples or SAMPLES, loss).bounded(BatchTarget(96))
        for name in samples or SAMPLES if written_by is None else written_by:
            self.note(name, group)
        self.lineage, self.step = group.group_id, self.step + 1
        return group

    def note(self, name: str, group: Group, attested: Attestation | None = None) -> None:
        """Write that this peer has applied the average."""
        tickets = dict(group.members)
        round_report = RoundReport.of(group, meeting_seconds=0.0, exchange_seconds=0.0)
        self.ledgers[name].note(
            StepReport.of(tickets.get(owner(name).own, group.tickets[0]), 1.0, 0.0, round_report), attested
        )

    def alone(self, name: str, samples: int) -> None:
        """Let this peer make an update by itself."""
        ticket = Ticket(self.step, samples, False, math.nan, self.lineage)
        self.ledgers[name].note(StepReport.of(ticket, 1.0, 0.0, None))
        self.step += 1

    def close(self) -> None:
        for ledger in self.ledgers.values():
            ledger.close()

    def audit(self, *more: Path) -> Audit:
        return audit([self.folder, *more])

    def lines(self, name: str) -> list[bytes]:
        return self.path(name).read_bytes().splitlines()

    def write(self, name: str, lines: Iterable[bytes]) -> None:
        self.path(name).write_bytes(b"".join(line + b"\n" for line in lines))

    def rewrite(self, name: str, change: Callable[[list[AnyLine]], list[AnyLine]], signer: str = "") -> None:
        """Change lines as the ledger's owner could: all are bound and signed anew."""
        self.write(name, signed_again(change([read_line(line) for line in self.lines(name)]), signer or name, self.run))


def signed_again(lines: Iterable[AnyLine], signer: str, run: str = RUN) -> list[bytes]:
    """Return the lines with numbers, digests and signatures that fit together."""
    written, before = [], b""
    for n, line in enumerate(lines):
        line = msgspec.structs.replace(line, n=n, before=before)
        if isinstance(line, Signature):
            line = Signature(n, before, owner(signer).sign(Signature.text(run, n, before)).decode())
        written.append(to_line(line))
        before = digest_of(written[-1])
    return written


def where(lines: Iterable[bytes], kind: type = Update) -> list[int]:
    """Return the places of the lines of this kind, from 0."""
    return [place for place, line in enumerate(lines) if isinstance(read_line(line), kind)]
