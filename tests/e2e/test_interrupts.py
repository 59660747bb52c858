"""Ctrl-C right after the command, while a program still imports: no output, and the status that shells expect."""

import os
import signal
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

PROGRAMS = {
    "peer": ["-m", "swarm.peer"],
    "watch": ["-m", "swarm", "watch"],
    "doctor": ["-m", "swarm", "doctor"],
    "local": ["-m", "swarm", "demo"],
    "train": ["baseline_ddp/train.py"],
}
OWN_MODULE = b"recipe.interrupts"
"""The first module of ours that each program imports. What Python does before that is not our concern."""


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("at", [b"dataclasses", b"tyro", b"recipe.errors"])
def test_ctrl_c_while_it_imports(program, at, tmp_path):
    """Python reports with `-X importtime` what it has imported, so no clock is needed to hit that moment."""
    command = [sys.executable, "-X", "importtime", *PROGRAMS[program], "--output-dir", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "INITIAL_PEERS"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    seen = []
    try:
        for line in process.stderr:
            seen.append(line)
            if OWN_MODULE in b"".join(seen) and line.split(b"|")[-1].strip() == at:
                break
        else:
            pytest.fail(f"it has not imported {at}: {seen}")
        process.send_signal(signal.SIGINT)
        # Not by communicate(), which begins behind what the loop has read ahead: perhaps in the middle of a line.
        complaints, said = process.stderr.read(), process.stdout.read()
        process.wait()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert not said
    assert not [line for line in complaints.splitlines() if not line.startswith(b"import time:")]
