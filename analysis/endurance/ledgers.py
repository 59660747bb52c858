"""Checks whether a run's ledgers agree with its rounds, as a user would: `swarm ledger verify --json`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from recipe.run_folder import RunFolder, read_metrics


def verified(runs: Path) -> dict[str, Any]:
    """The result of `swarm ledger verify` for these run folders."""
    command = [sys.executable, "-m", "swarm", "ledger", "verify", str(runs), "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    if done.returncode not in (0, 1) or not done.stdout:
        return {"error": done.stderr.strip()[-300:]}
    return json.loads(done.stdout)


def given(runs: Path) -> dict[str, int]:
    """Samples of each peer in all averaged updates, from the `rounds.jsonl` of all peers."""
    rounds = set()
    for path in runs.glob(f"*/{RunFolder('').rounds.name}"):
        for line in read_metrics(path):
            if line.get("outcome") == "averaged":
                claims = zip(line["members"], line["member_samples"], line["member_losses"], strict=True)
                rounds.add((line["step"], *claims))
    total: Counter[str] = Counter()
    for _, *claims in rounds:
        total.update({member: samples for member, samples, _ in claims})
    return dict(total)


def compare(runs: Path) -> dict[str, Any]:
    """Compare the ledgers with the rounds.

    Returns:
        `updates` of the ledgers, `samples` that all peers gave, and `problems`, which is empty if they agree
    """
    said, from_rounds = verified(runs), given(runs)
    if "error" in said:
        return {"problems": [f"the ledgers cannot be verified: {said['error']}"]}
    total = {peer["peer"]: peer["samples"] + peer["unconfirmed_samples"] for peer in said["peers"]}
    problems = [f"the ledgers have been tampered with: {finding['text']}" for finding in said["findings"]]
    for peer in sorted(total.keys() | from_rounds.keys()):
        if total.get(peer, 0) != from_rounds.get(peer, 0):
            problems.append(
                f"{peer} gave {total.get(peer, 0)} samples by its ledger, {from_rounds.get(peer, 0)} by rounds"
            )
    return {"updates": said["updates"], "samples": sum(from_rounds.values()), "problems": problems}
