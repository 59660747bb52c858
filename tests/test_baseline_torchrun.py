"""Real torchrun, real interpreters: digits in two processes, one of which is killed on the way and comes back."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from recipe.run_folder import read_metrics

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def last_step(metrics: Path) -> int:
    return max((line["step"] for line in read_metrics(metrics)), default=0) if metrics.exists() else 0


def workers(torchrun: subprocess.Popen) -> list[psutil.Process]:
    children = psutil.Process(torchrun.pid).children(recursive=True)
    return [child for child in children if any("train.py" in word for word in child.cmdline())]


@pytest.mark.timeout(280)
def test_digits_are_learnt_although_a_worker_is_killed(tmp_path):
    options = ["--output-dir", tmp_path, "--batch-size", 64, "--snapshot-every", 5, "--target-accuracy", 0.97]
    command = [*TORCHRUN, "--max-restarts", "1", ROOT / "baseline_ddp" / "train.py", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log"
    with open(log, "wb") as output:
        torchrun = subprocess.Popen([str(word) for word in command], env=environment, stdout=output, stderr=output)
    try:
        while not (found := list(tmp_path.glob("digits-*/ddp-2/metrics.jsonl"))) or last_step(found[0]) < 7:
            assert torchrun.poll() is None, log.read_text()
            time.sleep(0.05)
        workers(torchrun)[-1].send_signal(signal.SIGKILL)
        assert torchrun.wait(200) == 0, log.read_text()
    finally:
        for process in [*workers(torchrun), torchrun] if torchrun.poll() is None else []:
            process.kill()
    folder = found[0].parent
    assert list(tmp_path.glob("digits-*/*")) == [folder], "the restarted workers have to go on in the same folder"
    assert "Going on from the snapshot of step" in log.read_text()
    steps = [line["step"] for line in read_metrics(folder / "metrics.jsonl") if "train/loss" in line]
    assert steps == list(range(1, steps[-1] + 1))
    assert json.loads((folder / "summary.json").read_text())["outcome"] == "target accuracy reached"
    test = json.loads((folder / "test.json").read_text())
    assert test["samples"] == 270
    assert test["top1"] >= 0.95
