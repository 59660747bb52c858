"""The whole program under torchrun: an island trains, and ends in order after Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from recipe.run_folder import read_metrics
from tests.helpers.paths import ROOT


@pytest.mark.timeout(120)
def test_an_island_trains_and_leaves_after_ctrl_c(tmp_path):
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "swarm.peer",
    ]
    options = ["--recipe", "digits", "--run-id", "r", "--public-name", "isle", "--output-dir", tmp_path]
    options += ["--batch-size", "16", "--device", "cpu", "--host-maddrs", "/ip4/127.0.0.1/tcp/0"]
    folder, log = tmp_path / "r" / "isle", tmp_path / "log"
    with open(log, "wb") as output:
        island = subprocess.Popen(
            [str(word) for word in (*launch, *options)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
        )
    try:
        while not (folder / "metrics.jsonl").exists() or len(read_metrics(folder / "metrics.jsonl")) < 6:
            assert island.poll() is None, log.read_text()
            time.sleep(0.05)
        processes = psutil.Process(island.pid).children(recursive=True)
        island.send_signal(signal.SIGINT)
        island.wait(40)
        _, left = psutil.wait_procs(processes, timeout=5)
        assert not left
    finally:
        island.kill()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["outcome"] == "interrupted", log.read_text()
    assert (folder / "checkpoints" / "last.ckpt").exists()
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert {round_["own_samples"] % 32 for round_ in rounds} == {0}, "two processes with micro-batches of 16"
    assert log.read_text().count("First contribution") == 1, "one process speaks"
    assert not [line for line in log.read_text().splitlines() if line.startswith("error:")]
