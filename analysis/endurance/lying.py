"""Measures the accuracy of a real swarm with lying members, with and without clipped averages, and of other systems.

    python -m analysis lying reverse --repeat 3        # OUTPUT_DIR/lying.json; two minutes for each training
    python -m analysis lying honest                    # no lies: what the others are compared with
    python -m analysis lying honest reverse little --peers 6 --liars 2 --where clip ddp hivemind

Paced honest peers train the digits recipe on the loopback address, together with liars. A liar sends false gradients
and is honest in all else, also as a reducer. The lies are those of `tests/helpers/attacks/members.py`, and for other
systems those of `false_gradients.py` there. All peers compute all samples, since accuracies are compared.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.table import Table

from analysis.campaigns.peer_processes import last_words, started
from analysis.campaigns.statistics import interval
from analysis.endurance.attacks import ATTACKER
from analysis.endurance.honest_swarm import HonestPeer, HonestSwarm, SwarmError, prepare
from analysis.endurance.lying_elsewhere import accuracy_with
from analysis.endurance.soak_result import weights_hash
from analysis.program import options_of_result, wide_console
from recipe.command_line import arg, at_least, exit_status
from recipe.errors import InputError
from recipe.presets import preset
from recipe.run_folder import make_writable, write_json

HONEST = "honest"
LONGEST_SECONDS = 1800.0
Lie = Literal[
    "honest",
    "reverse-1",
    "reverse-10",
    "reverse",
    "noise",
    "nan",
    "overflow",
    "idle",
    "half",
    "zeros",
    "little",
    "against-0.1",
    "against-0.6",
    "labels",
    "delayed",
]
ONLY_OURS = {"nan", "overflow", "idle", "half"}
"""Lies that other systems do not allow: about messages that they lack, or about what was computed."""
Where = Literal["off", "clip", "local-off", "local-clip", "ddp", "hivemind"]
COLUMNS = (
    "lie",
    "where",
    "n",
    "final accuracy, %",
    "updates/s",
    "longest pause, s",
    "weights of honest peers",
    "liar named by",
)


@dataclass(frozen=True)
class LyingOptions:
    """Train with members that lie."""

    lies: Annotated[tyro.conf.Positional[tuple[Lie, ...]], arg("LIE ...")] = ("reverse",)
    """A gradient x -1, x -10 or x -100 (reverse); noise of 1,000 times the norm; numbers that are not finite, or
    overflow; zeros with a claim of two batches (idle), or with an honest one (zeros); every second micro-batch not
    computed (half); "a little is enough"; an inner-product manipulation x -0.1 or x -0.6 (against); false labels;
    gradients of twenty updates ago; no lie."""
    where: tuple[Where, ...] = ("off", "clip")
    """Systems: the swarm with plain means (off) or clipped ones, the same with one local step, or another system."""
    peers: int = 4
    """Number of honest peers."""
    liars: int = 1
    """Number of liars beside them."""
    updates: int = 60
    """Updates of each training."""
    paced_samples_per_second: float = 100.0
    """Speed of each peer's pretended device."""
    target_batch_size: int = 512
    """Samples per update."""
    repeat: int = 1
    """Trainings of each kind, each with its own seed."""
    output_dir: Annotated[Path, arg("FOLDER")] = Path("runs/lying")
    """Folder for run folders, logs and lying.json."""

    def check(self) -> None:
        """Raises InputError: a value cannot work."""
        at_least(self, 1, "liars", "target_batch_size", "repeat")
        at_least(self, preset("digits").warmup_steps + 1, "updates")  # peers refuse a training that ends in its warm-up
        at_least(self, 2, "peers")
        if not self.paced_samples_per_second > 0:
            raise InputError("--paced-samples-per-second has to be more than 0.")
        if not ATTACKER.exists():
            raise InputError(f"The attackers are missing: {ATTACKER} comes with the source, not with the package.")


def measure(lie: str, where: str, number: int, options: LyingOptions) -> dict[str, Any]:
    """Runs one training; returns a row of `lying.json`.

    Raises:
        SwarmError: the honest peers did not complete the training
    """
    name = f"{lie}-{where}-{number}"
    folder = options.output_dir / name
    shutil.rmtree(folder, ignore_errors=True)
    row = {"lie": lie, "where": where, "number": number}
    seed = number - 1  # with the same seed, DDP would repeat the same training exactly
    if where in ("ddp", "hivemind"):
        recipe = {"target_batch_size": options.target_batch_size, "total_steps": options.updates}
        recipe |= {"validate_every_steps": options.updates, "seed": seed}
        told = None if lie == HONEST else lie
        everybody = options.peers + options.liars
        accuracy = accuracy_with(where, told, options.liars, everybody, recipe, folder.resolve(), LONGEST_SECONDS)
        return row | {"accuracies": [accuracy]}
    averaging, _, robust = where.rpartition("-")
    more = ["--robust", robust, "--seed", str(seed)]
    if averaging:
        more += ["--averaging", "local", "--local-steps", "1"]
    with contextlib.ExitStack() as stack:
        swarm = HonestSwarm(
            name,
            options.output_dir,
            options.peers,
            options.target_batch_size,
            total_steps=options.updates,
            more=more,
            num_guests=options.liars,
            guest=lambda address, number: stack.enter_context(_guest(lie, address, folder / f"guest-{number}")),
        )
        stack.enter_context(swarm)
        for peer in swarm.peers:
            _until_completed(peer)
        named = len(swarm.naming_lines([0] * options.peers, set()))
        moments = swarm.moments()
    summaries = [json.loads(folder.summary.read_text()) for folder in swarm.folders]
    return row | {
        "accuracies": [summary["val_accuracy"] for summary in summaries],
        "weights": [weights_hash(folder.checkpoints / "last.ckpt") for folder in swarm.folders],
        "named_by": named,
        "updates": [summary["updates"] for summary in summaries],
        "seconds": [summary["seconds"] for summary in summaries],
        "longest_pause_seconds": max(after - before for before, after in pairwise(moments)),
    }


def _until_completed(peer: HonestPeer) -> None:
    try:
        status = peer.process.wait(LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        raise SwarmError(f"{peer.name} was not ready within {LONGEST_SECONDS:.0f} s") from None
    if status != 0:
        raise SwarmError(f"{peer.name} ended ({last_words(peer.log)})")


def _guest(lie: str, address: str, folder: Path) -> contextlib.AbstractContextManager:
    """Runs one more peer, which lies or not, for the length of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-u", str(ATTACKER), lie, "--initial-peers", address]
    if lie == HONEST:
        command = [sys.executable, "-u", "-m", "swarm.peer", "--initial-peers", address, "--public-name", folder.name]
        command += ["--host-maddrs", "/ip4/127.0.0.1/tcp/0"]
    else:
        command += ["--seconds", f"{LONGEST_SECONDS:.0f}"]
    command += ["--output-dir", str(folder)]
    return started(command, folder / "peer.log")


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """A table with a row for each lie and each system; a value that a system does not have is a dash."""
    shown = Table(title="Members of all that lie", title_justify="left")
    for column in COLUMNS:
        shown.add_column(column)
    for lie, where in dict.fromkeys((row["lie"], row["where"]) for row in rows):
        same = [row for row in rows if (row["lie"], row["where"]) == (lie, where)]
        mean, half_width, n = interval([100 * sum(row["accuracies"]) / len(row["accuracies"]) for row in same])
        accuracy = f"{mean:.1f}" if n < 3 else f"{mean:.1f} ± {half_width:.1f}"
        cells = [lie, where, str(n), accuracy]
        if "weights" not in same[0]:
            shown.add_row(*cells, *["–"] * (len(COLUMNS) - len(cells)))
            continue
        different = max(len(set(row["weights"])) for row in same)
        weights = "bit-identical" if different == 1 else f"up to {different} different ones"
        named = [row["named_by"] for row in same]
        rate = sum(map(rate_of, same)) / len(same)
        pause = max(row["longest_pause_seconds"] for row in same)
        shown.add_row(*cells, f"{rate:.3f}", f"{pause:.1f}", weights, f"{min(named)} to {max(named)}")
    return shown


def rate_of(row: dict[str, Any]) -> float:
    """Updates per second of a training, by its first peer's summary."""
    return row["updates"][0] / row["seconds"][0]


def cost(rows: Sequence[dict[str, Any]]) -> str:
    """A sentence about the cost of clipping without lies.

    Trainings with the same number are compared; one without its partner, which may have failed, is left out.
    """
    honest = [row for row in rows if row["lie"] == HONEST]
    clip, off = ({row["number"]: rate_of(row) for row in honest if row["where"] == where} for where in ("clip", "off"))
    mean, half_width, n = interval([clip[number] / off[number] for number in clip.keys() & off.keys()])
    if not n:
        return ""
    spread = "" if math.isnan(half_width) else f" ± {half_width:.3f}"
    return f"Updates/s with clip over off, without lies: {mean:.3f}{spread} (n = {n})"


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns the exit status: 0, 1 if a training did not complete, 2 for bad input, 130 after
    Ctrl-C."""
    options = tyro.cli(LyingOptions, args=arguments, prog="python -m analysis lying", description=__doc__)
    console = wide_console()

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    def run() -> int:
        options.check()
        make_writable(options.output_dir)
        environment = prepare(options.paced_samples_per_second, all_samples=True)
        kept = options_of_result(asdict(options))
        rows, status = [], 0
        for lie, where, number in _kinds(options):
            try:
                row = measure(lie, where, number, options)
            except SwarmError as error:
                say(f"{lie}, {where}: {error}")
                status = 1
                continue
            rows.append(row)
            say(f"{lie}, {where}: accuracies {', '.join(f'{100 * value:.1f} %' for value in row['accuracies'])}")
            found = {"options": kept, "rows": rows, "environment": environment}
            write_json(options.output_dir / "lying.json", found)
        if rows:
            console.print(table(rows))
            console.print(cost(rows))
        return status

    return exit_status(run, "Interrupted: what was measured until then is in lying.json.")


def _kinds(options: LyingOptions) -> Iterator[tuple[str, str, int]]:
    """The trainings (lie, system, number), in an order that takes turns."""
    for number in range(1, options.repeat + 1):
        for lie in options.lies:
            for where in options.where:
                if where not in ("ddp", "hivemind") or lie not in ONLY_OURS:
                    yield lie, where, number
