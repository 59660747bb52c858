"""Real torchrun, real interpreters: digits on two nodes of one machine, one worker is killed and comes back."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from recipe.run_folder import read_metrics
from tests.helpers.paths import ROOT
from tests.helpers.programs.ports import free_port


def last_step(metrics: Path) -> int:
    return max((line["step"] for line in read_metrics(metrics)), default=0)


def workers(node: subprocess.Popen) -> list[psutil.Process]:
    children = psutil.Process(node.pid).children(recursive=True)
    return [child for child in children if any("train.py" in word for word in child.cmdline())]


def launch_lines(*options: object) -> list[list[str]]:
    """Return what `--print-launch` prints for two nodes, with this interpreter's torchrun."""
    cluster = ["--print-launch", "--nnodes", 2, "--nproc-per-node", 1, "--master-addr", "127.0.0.1"]
    command = [sys.executable, "baseline_ddp/train.py", *cluster, "--master-port", free_port(), *options]
    printed = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [shlex.split(line) for line in printed.stdout.splitlines()]
    assert [words[0] for words in lines] == ["torchrun", "torchrun"]
    return [[sys.executable, "-m", "torch.distributed.run", *words[1:]] for words in lines]


@pytest.mark.timeout(280)
@pytest.mark.long
def test_two_nodes_learn_digits_although_a_worker_is_killed(tmp_path):
    options = ["--run-id", "it", "--batch-size", 64, "--snapshot-every", 5, "--target-accuracy", 0.93]
    lines = launch_lines("--max-restarts", 1, "--output-dir", tmp_path, *options)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log, folder = tmp_path / "log", tmp_path / "it" / "ddp-2"
    with open(log, "wb") as output:
        nodes = [subprocess.Popen(line, cwd=ROOT, env=environment, stdout=output, stderr=output) for line in lines]
    try:
        while last_step(folder / "metrics.jsonl") < 7:
            assert all(node.poll() is None for node in nodes), log.read_text()
            time.sleep(0.05)
        workers(nodes[1])[-1].send_signal(signal.SIGKILL)
        assert [node.wait(200) for node in nodes] == [0, 0], log.read_text()
    finally:
        for node in nodes:
            for process in [*workers(node), node] if node.poll() is None else []:
                process.kill()
    assert [path.name for path in (tmp_path / "it").iterdir()] == ["ddp-2"], "restarted workers go on in their folder"
    assert "Going on from the snapshot of step" in log.read_text()
    steps = [line["step"] for line in read_metrics(folder / "metrics.jsonl") if "train/loss" in line]
    assert steps == list(range(1, steps[-1] + 1))
    assert json.loads((folder / "summary.json").read_text())["outcome"] == "target accuracy reached"
    assert "torchrun --nnodes 2 --nproc-per-node 1" in (folder / "logbook.md").read_text()
    test = json.loads((folder / "test.json").read_text())
    assert test["samples"] == 270
    assert test["top1"] >= 0.9
