"""Measures what membership costs: updates per second of swarms by invitation over those of open ones, in turns.

    python -m analysis membership                                 # eight pairs; about fifteen minutes
    python -m analysis membership --what work-audits --peers 3    # members that check each other's work, over none

Each swarm is new, of paced peers on the loopback address of this machine. Their order changes from pair to pair.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.table import Table

from analysis.campaigns.statistics import interval
from analysis.endurance.attacks import updates_per_second
from analysis.endurance.honest_swarm import PROGRAM, HonestSwarm, SwarmError, prepare, wait_until
from analysis.program import options_of_result, wide_console
from recipe.command_line import arg, at_least, exit_status
from recipe.errors import InputError
from recipe.run_folder import make_writable, write_json

What = Literal["invitations", "work-audits"]
KINDS: dict[What, tuple[str, str]] = {
    "invitations": ("open", "by invitation"),
    "work-audits": ("unchecked", "checked"),
}
"""The two kinds of swarms in a pair; the ratio is that of the second over the first."""
UNCHECKED = (
    "-c",
    "import sys; from swarm.training.averaging_mode import Averaging; Averaging.checks_work = False; "
    "from swarm.peer.main import main; sys.exit(main(sys.argv[1:]))",
)
"""Arguments of Python for a peer without work audits.

It neither tells what it computes nor checks others, and is the same in all else. No option does that.
"""
FEWEST_CHECKED = 3
"""Fewest peers that check each other's work."""


@dataclass(frozen=True)
class MembershipOptions:
    """Measure what membership costs, or what work audits cost."""

    what: What = "invitations"
    """Compare swarms by invitation with open ones, or with work audits and without."""
    repeat: int = 8
    """Number of pairs of swarms."""
    seconds: float = 20.0
    """Time for which each swarm is watched."""
    peers: int = 2
    """Number of peers of each swarm."""
    paced_samples_per_second: float = 200.0
    """Speed of each peer's pretended device."""
    target_batch_size: int = 128
    """Samples per update: small, so that there are many rounds."""
    output_dir: Annotated[Path, arg("FOLDER")] = Path("runs/membership")
    """For membership.json and swarms/, with run folders and logs; those of an earlier time are deleted first."""

    @property
    def swarms(self) -> Path:
        """Folder of the swarms' runs, identities and books: `output_dir` itself may hold those of a volunteer."""
        return self.output_dir / "swarms"

    def check(self) -> None:
        """Raises InputError: a value cannot work."""
        at_least(self, 1, "repeat", "target_batch_size")
        at_least(self, FEWEST_CHECKED if self.what == "work-audits" else 2, "peers")
        if not (self.seconds > 0 and self.paced_samples_per_second > 0):
            raise InputError("--seconds and --paced-samples-per-second have to be more than 0.")


@dataclass(frozen=True)
class Watched:
    """What was seen of one swarm.

    Args:
        updates_per_second: updates per second while it was watched
        failed_rounds: failed rounds of all its peers meanwhile
        first_contribution_seconds: time from the last peer's command to its first contribution
    """

    updates_per_second: float
    failed_rounds: int
    first_contribution_seconds: float


def watch(name: str, kind: str, options: MembershipOptions) -> Watched:
    """Start a swarm, and watch it for a while.

    Raises:
        SwarmError: the swarm did not train
    """
    program = UNCHECKED if kind == "unchecked" else PROGRAM
    with HonestSwarm(
        *(name, options.swarms, options.peers, options.target_batch_size, kind == "by invitation"), program=program
    ) as swarm:
        since = time.time()
        wait_until(lambda: time.time() - since > options.seconds, swarm, 2 * options.seconds, "train on")
        until, last = time.time(), swarm.peers[-1]
        wait_until(lambda: swarm.all_train_since(until), swarm, 60, "train together")
        rate = updates_per_second(swarm.moments(), since, until)
        return Watched(rate, swarm.failed_rounds(since, until), last.first_contribution_seconds or float("nan"))


def table(pairs: list[dict[str, dict[str, Any]]], what: What = "invitations") -> Table:
    """A table with a row for each quantity, with the ratio and its 95 % interval."""
    kinds = KINDS[what]
    title = f"{kinds[1].capitalize()} over {kinds[0]}: mean ratio with 95 % interval"
    shown = Table(title=title, title_justify="left")
    for column in ("", "n", *kinds, "ratio"):
        shown.add_column(column, justify="right" if column else "left")
    for field, text in (
        ("updates_per_second", "updates/s"),
        ("first_contribution_seconds", "first contribution, s"),
    ):
        values = {kind: [pair[kind][field] for pair in pairs] for kind in kinds}
        mean, half_width, n = interval([b / a for a, b in zip(*values.values(), strict=True)])
        means = [f"{sum(found) / len(found):.2f}" for found in values.values()]
        spread = "" if math.isnan(half_width) else f" ± {half_width:.3f}"
        shown.add_row(text, str(n), *means, f"{mean:.3f}{spread}")
    failed = [str(sum(pair[kind]["failed_rounds"] for pair in pairs)) for kind in kinds]
    shown.add_row("failed rounds", str(len(pairs)), *failed, "")
    return shown


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns the exit status: 0, 1 if a swarm did not train, 2 for bad input, 130 after Ctrl-C."""
    options = tyro.cli(MembershipOptions, args=arguments, prog="python -m analysis membership", description=__doc__)
    console = wide_console(120)

    def run() -> int:
        options.check()
        make_writable(options.output_dir)
        shutil.rmtree(options.swarms, ignore_errors=True)
        (options.output_dir / "membership.json").unlink(missing_ok=True)
        environment = prepare(options.paced_samples_per_second)
        kept = options_of_result(asdict(options))
        pairs: list[dict[str, dict[str, Any]]] = []
        for number in range(options.repeat):
            kinds = KINDS[options.what][:: 1 if number % 2 == 0 else -1]
            try:
                found = {kind: asdict(watch(f"{number}-{kind[:2]}", kind, options)) for kind in kinds}
            except SwarmError as error:
                print(f"error: pair {number + 1}: {error}", file=sys.stderr)
                return 1
            pairs.append(found)
            rates = ", ".join(f"{kind} {found[kind]['updates_per_second']:.3f} updates/s" for kind in kinds)
            console.print(f"{number + 1}/{options.repeat}: {rates}", highlight=False)
            content = {"options": kept, "pairs": pairs, "environment": environment}
            write_json(options.output_dir / "membership.json", content)
        console.print(table(pairs, options.what))
        return 0

    return exit_status(run, "Interrupted: what was measured until then is in membership.json.")
