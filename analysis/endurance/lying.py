"""What one member that lies does to the accuracy of a real swarm, with and without clipped averages.

    python -m analysis lying reverse --repeat 3        # OUTPUT_DIR/lying.json; two minutes for each training
    python -m analysis lying honest                    # nobody lies: what it is measured against

Paced honest peers train the digits recipe on the loopback address, and one more peer with them. What it sends is false;
all else of it is honest, also what it does as a reducer. The lies are those of `tests/helpers/attacks/members.py`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from analysis.campaigns.peer_processes import kill
from analysis.campaigns.statistics import interval
from analysis.endurance.attacks import ATTACKER
from analysis.endurance.honest_swarm import HonestPeer, HonestSwarm, SwarmError, prepare
from analysis.endurance.soak_result import weights_hash
from recipe.command_line import arg, at_least, exit_status
from recipe.errors import InputError
from recipe.run_folder import make_writable, write_json

HONEST = "honest"
LONGEST_SECONDS = 1800.0
COLUMNS = ("lie", "averages", "n", "final accuracy, %", "updates/s", "weights of honest peers", "liar named by")


@dataclass(frozen=True)
class LyingOptions:
    """Train with one member that lies."""

    lies: Annotated[tyro.conf.Positional[tuple[Literal["reverse", "noise", "idle", "honest"], ...]], arg("LIE ...")] = (
        "reverse",
    )
    """A gradient x -100, noise of 1,000 times the norm, zeros with a claim of two batches, or no lie."""
    robust: tuple[Literal["off", "clip"], ...] = ("off", "clip")
    """How averages are made."""
    peers: int = 4
    """Honest ones."""
    updates: int = 60
    """Of the whole swarm."""
    paced_samples_per_second: float = 100.0
    """Speed of each one's pretended device."""
    target_batch_size: int = 512
    """Samples per update."""
    repeat: int = 1
    """Trainings of each kind."""
    output_dir: Annotated[Path, arg("FOLDER")] = Path("runs/lying")
    """For run folders, logs and lying.json."""

    def check(self) -> None:
        """Raises InputError: a value cannot work."""
        at_least(self, 1, "updates", "target_batch_size", "repeat")
        at_least(self, 2, "peers")
        if not self.paced_samples_per_second > 0:
            raise InputError("--paced-samples-per-second has to be more than 0.")
        if not ATTACKER.exists():
            raise InputError(f"The attackers are missing: {ATTACKER} comes with the source, not with the package.")


def measure(lie: str, robust: str, number: int, options: LyingOptions) -> dict[str, Any]:
    """A training; returns a row of `lying.json`.

    Raises:
        SwarmError: the honest peers did not come to the end
    """
    name = f"{lie}-{robust}-{number}"
    shutil.rmtree(options.output_dir / name, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        swarm = HonestSwarm(
            name,
            options.output_dir,
            options.peers,
            options.target_batch_size,
            total_steps=options.updates,
            robust=robust,
            guest=lambda address: stack.enter_context(_fifth(lie, address, options.output_dir / name)),
        )
        stack.enter_context(swarm)
        for peer in swarm.peers:
            _until_completed(peer)
        named = len(swarm.naming_lines([0] * options.peers, set()))
    summaries = [json.loads(folder.summary.read_text()) for folder in swarm.folders]
    return {
        "lie": lie,
        "robust": robust,
        "accuracies": [summary["val_accuracy"] for summary in summaries],
        "weights": [weights_hash(folder.checkpoints / "last.ckpt") for folder in swarm.folders],
        "named_by": named,
        "updates": [summary["updates"] for summary in summaries],
        "seconds": [summary["seconds"] for summary in summaries],
    }


def _until_completed(peer: HonestPeer) -> None:
    try:
        status = peer.process.wait(LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        raise SwarmError(f"{peer.name} was not ready within {LONGEST_SECONDS:.0f} s") from None
    if status != 0:
        raise SwarmError(f"{peer.name} ended ({peer.last_words()})")


@contextlib.contextmanager
def _fifth(lie: str, address: str, folder: Path) -> Iterator[None]:
    """One more peer, which lies or not."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-u", str(ATTACKER), lie, "--initial-peers", address]
    if lie == HONEST:
        command = [sys.executable, "-u", "-m", "swarm.peer", "--initial-peers", address, "--public-name", "fifth"]
        command += ["--host-maddrs", "/ip4/127.0.0.1/tcp/0"]
    else:
        command += ["--seconds", f"{LONGEST_SECONDS:.0f}"]
    command += ["--output-dir", str(folder / "one-more")]
    with (folder / "one-more.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        kill(process)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """A row for each lie and way of averaging."""
    shown = Table(title="One member of all that lies", title_justify="left")
    for column in COLUMNS:
        shown.add_column(column)
    for lie, robust in dict.fromkeys((row["lie"], row["robust"]) for row in rows):
        same = [row for row in rows if (row["lie"], row["robust"]) == (lie, robust)]
        mean, half_width, n = interval([100 * sum(row["accuracies"]) / len(row["accuracies"]) for row in same])
        different = max(len(set(row["weights"])) for row in same)
        weights = "bit-identical" if different == 1 else f"up to {different} different ones"
        accuracy = f"{mean:.1f}" if n < 3 else f"{mean:.1f} ± {half_width:.1f}"
        named = [row["named_by"] for row in same]
        rate = sum(map(rate_of, same)) / len(same)
        shown.add_row(lie, robust, str(n), accuracy, f"{rate:.3f}", weights, f"{min(named)} to {max(named)}")
    return shown


def rate_of(row: dict[str, Any]) -> float:
    """Updates per second of a training, as its first peer saw it."""
    return row["updates"][0] / row["seconds"][0]


def cost(rows: Sequence[dict[str, Any]]) -> str:
    """Of clipping, where nobody lies."""
    rates = {
        robust: [rate_of(row) for row in rows if (row["lie"], row["robust"]) == (HONEST, robust)]
        for robust in ("off", "clip")
    }
    mean, half_width, n = interval([clip / off for off, clip in zip(rates["off"], rates["clip"], strict=False)])
    if not n:
        return ""
    return f"Updates/s with clip over off, where nobody lies: {mean:.3f} ± {half_width:.3f} (n = {n})"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if a swarm did not come to its end, 2 for bad input, 130 after Ctrl-C."""
    options = tyro.cli(LyingOptions, args=arguments, prog="python -m analysis lying", description=__doc__)
    console = Console() if sys.stdout.isatty() else Console(width=150)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    def run() -> int:
        options.check()
        make_writable(options.output_dir)
        environment = prepare(options.paced_samples_per_second)
        kept = {name: value for name, value in asdict(options).items() if name != "output_dir"}
        rows, status = [], 0
        for lie, robust, number in _kinds(options):
            try:
                row = measure(lie, robust, number, options)
            except SwarmError as error:
                say(f"{lie}, {robust}: {error}")
                status = 1
                continue
            rows.append(row)
            say(f"{lie}, {robust}: accuracies {', '.join(f'{100 * value:.1f} %' for value in row['accuracies'])}")
            found = {"options": kept, "rows": rows, "environment": environment}
            write_json(options.output_dir / "lying.json", found)
        if rows:
            console.print(table(rows))
            console.print(cost(rows))
        return status

    return exit_status(run, "Interrupted: what was measured until then is in lying.json.")


def _kinds(options: LyingOptions) -> Iterator[tuple[str, str, int]]:
    """What is trained, by turns."""
    for number in range(1, options.repeat + 1):
        for lie in options.lies:
            for robust in options.robust:
                yield lie, robust, number
