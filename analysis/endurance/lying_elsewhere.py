"""Measures the same lies in DDP and with Hivemind's own Optimizer, which have no defence against them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from analysis.campaigns.peer_processes import last_words, started
from analysis.endurance.attacks import ATTACKER
from analysis.endurance.honest_swarm import START_SECONDS, SwarmError
from recipe.run_folder import RunFolder, read_metrics

ROOT = Path(__file__).parents[2]
FALSE_GRADIENTS = ATTACKER.parent / "false_gradients.py"
_PROGRAMS = {
    "ddp": ROOT / "baseline_ddp" / "train.py",
    "hivemind": ROOT / "analysis" / "opponents" / "hivemind_optimizer.py",
}
MICRO_BATCH = "16"


def accuracy_with(
    system: str, lie: str | None, liars: int, peers: int, recipe: dict[str, int], folder: Path, seconds: float
) -> float:
    """The validation accuracy at the end of a training on the digits, from 0 to 1.

    Args:
        system: "ddp", or "hivemind" with the best settings that we know
        lie: a lie of `false_gradients.py`; None if all peers are honest
        liars: number of lying processes, the last ones of all
        peers: number of all processes
        recipe: fields that differ from the preset
        folder: a new folder, for logs and run folders
        seconds: longest duration of the training

    Raises:
        SwarmError: the training did not complete
    """
    folder.mkdir(parents=True)
    told = [str(FALSE_GRADIENTS), lie, str(liars)] if lie else []
    program = [*told, str(_PROGRAMS[system])]
    if system == "ddp":
        return _ddp(program, peers, recipe, folder, seconds)
    return _hivemind(program, peers, recipe, folder, seconds)


def _ddp(program: Sequence[str], peers: int, recipe: dict[str, int], folder: Path, seconds: float) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(peers), *program]
    command += ["--recipe", "digits", "--strategy", "ddp", "--device", "cpu", "--batch-size", MICRO_BATCH]
    command += ["--output-dir", str(folder), "--run-id", "run", "--name", "all"]
    for name, value in recipe.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    with started(command, folder / "all.log", cwd=ROOT) as process:
        _wait(process, seconds, folder / "all.log")
    return json.loads(RunFolder(folder / "run" / "all").summary.read_text())["val_accuracy"]


def _hivemind(program: Sequence[str], peers: int, recipe: dict[str, int], folder: Path, seconds: float) -> float:
    command = [sys.executable, *program, "--recipe", "digits", "--batch-size", MICRO_BATCH, "--peers", str(peers)]
    command += ["--steps", str(recipe["total_steps"]), "--output-dir", str(folder), "--tuned"]
    changes = ["--change", *(f"{name}={value}" for name, value in recipe.items())]
    deadline = time.monotonic() + seconds
    names = [f"h{number}" for number in range(1, peers + 1)]
    first = RunFolder(folder / "run" / names[0])
    with contextlib.ExitStack() as stack:
        own = [*command, "--name", names[0], *changes]
        processes = [stack.enter_context(started(own, folder / f"{names[0]}.log", cwd=ROOT))]
        _wait_until(first.status.exists, processes[0], folder / f"{names[0]}.log")
        addresses = json.loads(first.status.read_text())["addresses"]
        for name in names[1:]:
            arguments = [*command, "--name", name, *changes, "--initial-peers", *addresses]
            processes.append(stack.enter_context(started(arguments, folder / f"{name}.log", cwd=ROOT)))
        for name, process in zip(names, processes, strict=True):
            _wait(process, deadline - time.monotonic(), folder / f"{name}.log")
    return [line["val/top1"] for line in read_metrics(first.metrics) if line.get("val/top1") is not None][-1]


def _wait(process: subprocess.Popen, seconds: float, log: Path) -> None:
    try:
        status = process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        raise SwarmError(f"{log.stem} was not ready in time") from None
    if status != 0:
        raise SwarmError(f"{log.stem} ended: {last_words(log)}")


def _wait_until(condition: Callable[[], bool], process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SwarmError(f"{log.stem} did not begin: {last_words(log)}")
        time.sleep(0.2)
