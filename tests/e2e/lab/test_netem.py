"""The kernel's emulator, where there is one."""

import shutil
import subprocess
import sys

import pytest

from analysis.wan import netem, sandbox
from analysis.wan.topology import load
from tests.helpers.namespaces import needs_namespaces
from tests.helpers.paths import ROOT


def test_netem_delays_before_the_downlink_and_keeps_paths_apart():
    topology = load("continents")
    commands = [" ".join(command) for command in netem.downlink_commands(topology.hosts[0], topology)]
    assert any("match ip src 10.77.0.3/32 flowid 1:3" in command for command in commands)
    assert any("parent 1:3 netem" in command and "delay 78.55ms" in command for command in commands)
    (downlink,) = [command.split() for command in commands if "classid 1:ffff" in command]
    (path,) = [command.split() for command in commands if "classid 1:3" in command]
    assert "kbit" in path[path.index("rate") + 1], "or all senders together would exceed the downlink"
    assert float(path[path.index("ceil") + 1].removesuffix("mbit")) > 10
    assert "mbit" in downlink[-1]


@needs_namespaces
def test_the_kernels_rates_work_where_there_is_htb(tmp_path):
    """Without delay, jitter and loss that backend needs no netem, so this much runs on any kernel with htb."""
    script = tmp_path / "bridged.py"
    script.write_text(KERNEL_LAB)
    command = sandbox.wrapped([sys.executable, str(script), str(tmp_path)])
    environment = sandbox.environment() | {"PYTHONPATH": str(ROOT)}
    for _ in range(3):  # a machine that is busy with something else makes a line slower, and never faster
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        if done.returncode or all(float(share) > 0.8 for share in done.stdout.split()):
            break
    if "qdisc kind is unknown" in done.stderr or "No such file or directory: 'tc'" in done.stderr:
        pytest.skip("this kernel has no htb, or the program tc is missing")
    assert done.returncode == 0, done.stderr
    assert all(0.8 < float(share) < 1.0 for share in done.stdout.split()), f"of the rate: {done.stdout}"
    assert len(done.stdout.split()) == 2, "a pair of hosts, and two that send to a third"


KERNEL_LAB = """
import sys
from pathlib import Path
from analysis.wan import netem
from analysis.wan.check import HOME_DOWN, HOME_DOWN_MBPS, Row, measure
netem.is_available = lambda: True
rows = [Row(0, 20), Row(0, HOME_DOWN_MBPS, link=HOME_DOWN)]
for row in measure(rows, Path(sys.argv[1]), "netem", None, 1.0):
    print(row.goodput_mbps / row.bandwidth_mbps)
"""


@pytest.mark.skipif(shutil.which("linux.uml") is None, reason="no kernel with netem: user-mode-linux is not installed")
def test_delay_jitter_and_loss_are_as_set(tmp_path):
    script = tmp_path / "measured.py"
    script.write_text(WHOLE_LAB)
    command = ["sh", str(ROOT / "analysis/wan/with_netem.sh"), sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("netem")]
    assert [row.split()[1:] for row in rows] == [["[]"]] * 3, done.stdout


WHOLE_LAB = """
import os, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
from analysis.wan import sandbox
from analysis.wan.check import Row, measure
if not sandbox.is_inside():
    command = sandbox.wrapped([sys.executable, *sys.argv])
    os.execvpe(command[0], command, sandbox.environment())
rows = [Row(100, 20), Row(100, 100, jitter_ms=5), Row(100, 100, loss=0.01)]
for row in measure(rows, Path(sys.argv[1]), "netem", None, 1.0):
    print("netem", row.problems, flush=True)
"""


def test_a_command_is_asked_for():
    script = ROOT / "analysis/wan/with_netem.sh"
    done = subprocess.run(["sh", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "name a command" in done.stderr
