"""An island of two processes, one of which is killed again and again, beside a plain peer: do both end with equal bits?

python -m tests.helpers.islands.killed --times 10 --updates 100     # about six minutes
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import torch

from recipe.run_folder import RunFolder, read_metrics
from swarm.peer.status import Status
from tests.helpers.cli import PeerProgram, Program, reaping, summary_of

SAMPLES_PER_SECOND = "100"
"""Rate of each process, so that a hundred updates last until the island has come back ten times."""
RUN = "killed"


class Island(Program):
    """An island of two processes, which torchrun starts again."""

    def __init__(self, folder: Path, address: str, *options: str):
        self.folder = RunFolder(folder / RUN / "island")
        command = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "99", "-m", "swarm.peer"]
        own = ["--initial-peers", address, "--output-dir", str(folder), "--public-name", "island", "--run-id", RUN]
        super().__init__(
            "torch.distributed.run",
            [*command, *own, "--no-port-mapping", *options],
            folder / "island.log",
            PACED_SAMPLES_PER_SECOND=SAMPLES_PER_SECOND,
        )

    @property
    def status(self) -> Status:
        return Status.read(self.folder.status) or Status("island", "", "starting")

    @property
    def processes(self) -> dict[str, psutil.Process]:
        """The island's processes by rank."""
        found = {}
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                found[process.environ()["RANK"]] = process
        return found

    def kill(self, rank: str) -> None:
        """Kill one process; torchrun has started both again when this returns."""
        before = {process.pid for process in self.processes.values()}
        self.processes[rank].kill()

        def is_back() -> bool:
            now = {process.pid for process in self.processes.values()}
            return len(now) == 2 and not now & before

        self.wait_until(is_back, "torchrun starts both again")

    def wait_for_contribution(self) -> int:
        """Wait until the island has trained with the other peer since it came back. Returns the step of that update."""
        first = self.wait_until(lambda: self.processes.get("0"), "torchrun has started it")
        came, before = first.create_time(), self.status.contributed

        def contributes() -> bool:
            if self.folder.status.exists() and self.folder.status.stat().st_mtime < came:
                return False  # the file was written before it was killed
            status = self.status
            return status.num_peers > 1 and status.contributed > before

        self.wait_until(contributes, "the island contributes")
        return self.status.step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--inside", choices=["ddp", "fsdp"], default="ddp")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, reaping() as programs:
        path = Path(folder)
        options = ["--batch-size", "32", "--checkpoint-every-steps", "5"]
        run = ["--run-id", RUN, "--recipe", "digits", "--averaging", "sync", "--total-steps", str(given.updates)]
        plain = PeerProgram(path, RUN, "plain", *run, *options, PACED_SAMPLES_PER_SECOND=SAMPLES_PER_SECOND)
        programs.append(plain)
        programs.append(island := Island(path, plain.address, "--inside", given.inside, *options))
        for time_of_kill in range(given.times):
            step, rank = island.wait_for_contribution(), str(time_of_kill % 2)
            print(f"step {step}: process {rank} is killed", flush=True)
            island.kill(rank)
        print(f"both at the end: {plain.wait(600)}, {island.wait(60)}")
        compare(plain.folder, island.folder)


def compare(plain: RunFolder, island: RunFolder) -> None:
    """Print the results of both."""
    weights = [
        torch.load(folder.checkpoints / "last.ckpt", weights_only=True)["state_dict"] for folder in (plain, island)
    ]
    same = all(torch.equal(one, weights[1][name]) for name, one in weights[0].items())
    outcomes = Counter(json.loads(line)["outcome"] for line in plain.rounds.read_text().splitlines())
    accuracies = [max(line.get("val/top1", 0) for line in read_metrics(folder.metrics)) for folder in (plain, island)]
    print(f"the same bits: {same}; outcomes: {[summary_of(folder)['outcome'] for folder in (plain, island)]}")
    print(f"rounds of the plain peer: {dict(outcomes)}; best accuracies: {accuracies}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began = time.monotonic()
    main()
    print(f"{time.monotonic() - began:.0f} s")
