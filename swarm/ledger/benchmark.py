"""Measures what a ledger costs: seconds and bytes for each update, and how fast it is verified; on a quiet core.

python -m swarm.ledger.benchmark
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from hivemind.utils.crypto import RSAPrivateKey

from recipe.interrupts import status_of
from swarm.ledger.audit import audit
from swarm.ledger.ledger import Ledger
from swarm.network.signed_records import OwnedRecords
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.messages import TICKET_NONCE_BYTES, Group, Ticket
from swarm.protocol.round_report import RoundReport, StepReport
from swarm.protocol.wire import LINEAGE_BYTES

RUN = "benchmark-00000000"
SKETCH = (0.123456789, -0.5, 1e-3, 2.0, 0.25, -1.75, 3.1415926, 0.7)
"""A sketch, as every eighth ticket has one."""


def measure(num_peers: int, num_updates: int, folder: Path) -> str:
    """Let this many peers write this many updates, add them up again, and return a sentence with the cost."""
    owners = sorted((OwnedRecords(RSAPrivateKey()) for _ in range(num_peers)), key=lambda owner: owner.own.to_bytes())
    # Named as `swarm ledger fetch` names them: `audit` takes ledger-1.jsonl for one that was set aside.
    ledgers = [Ledger(folder / f"{owner.own}-0.jsonl", RUN, 1, owner, f"peer {n}") for n, owner in enumerate(owners)]
    for ledger in ledgers:
        ledger.begin()
    lineage, seconds = bytes(LINEAGE_BYTES), []
    for step in range(num_updates):
        rest = () if step % 8 else SKETCH, False, b"", os.urandom(LINEAGE_BYTES)
        nonces = [os.urandom(TICKET_NONCE_BYTES) for _ in range(num_peers)]
        tickets = [
            Ticket(step, 96 + n, False, 2.5 / (n + 1.1), lineage, *rest, nonce=nonce) for n, nonce in enumerate(nonces)
        ]
        peers = tuple(owner.own for owner in owners)
        group = Group.close(os.urandom(LINEAGE_BYTES), peers, tuple(tickets), RUN)
        group = group.bounded(BatchTarget(2048))
        report = RoundReport.of(group, meeting_seconds=0.0, exchange_seconds=0.0)
        for ledger, ticket in zip(ledgers, tickets, strict=True):
            began = time.perf_counter()
            ledger.note(StepReport.of(ticket, 1.0, 0.0, report))
            seconds.append(time.perf_counter() - began)
        lineage = group.group_id
    for ledger in ledgers:
        ledger.close()
    began = time.process_time()
    found = audit([folder])
    verified = num_peers * num_updates / (time.process_time() - began)
    assert found.updates["confirmed"] == num_updates
    num_bytes = sum(path.stat().st_size for path in folder.iterdir()) / num_peers / num_updates
    return (
        f"{num_peers} peers, {num_updates:,} updates: {1e3 * statistics.median(seconds):.3f} ms (median) and "
        f"{num_bytes:,.0f} bytes an update of each peer; verify reads {verified:,.0f} lines a second"
    )


def main() -> None:
    """Print what was measured."""
    for num_peers, num_updates in ((3, 2000), (10, 1000)):
        with tempfile.TemporaryDirectory() as folder:
            print(measure(num_peers, num_updates, Path(folder)))
    owner, began = OwnedRecords(RSAPrivateKey()), time.process_time()
    for _ in range(200):
        owner.sign(b"benchmark")
    print(f"a signature takes {1e3 * (time.process_time() - began) / 200:.2f} ms")


if __name__ == "__main__":
    sys.exit(status_of(main))
