"""Measures what an attacker costs an honest swarm: updates per second without and with one, in turns, on this machine.

    python -m analysis attacks                                    # every attack; some minutes each
    python -m analysis attacks false-state drip --repeat 5 --seconds 40

Each attack gets its own swarm of paced peers on the loopback address. Calm and attacked times alternate, and the order
changes from pair to pair. Between them, the swarm has time to recover. The attackers are those of
`tests/helpers/attacks/attackers.py`. A lying member also computes, so its swarm may be faster with it than without it.

The longest pause is the longest time between two updates, of all calm times and of all attacked ones.

Memory is the highest sum of the resident sets of a peer's processes. Of all peers and pairs, the largest excess over
the calm time of the same pair counts.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.table import Table

from analysis.campaigns.peer_processes import started
from analysis.campaigns.statistics import interval
from analysis.endurance.honest_swarm import START_SECONDS, HonestSwarm, MemoryPeaks, SwarmError, prepare, wait_until
from analysis.program import options_of_result, wide_console
from recipe.command_line import arg, at_least, exit_status
from recipe.errors import InputError
from recipe.run_folder import make_writable, write_json

ATTACKS = (
    *("claim", "silent-claim", "drip", "false-state", "near-state", "streams", "buffers", "parts", "records"),
    *(
        "sound-records",
        "large-messages",
        "manifests",
        "waiting",
        "sybils",
        "knock",
        "relay",
        "callbacks",
        "nan",
        "overflow",
        "bad-average",
        "slow",
        "stuck",
        "goes-on-alone",
        "other-history",
    ),
    *("ahead", "false-statistics", "flip", "reverse", "noise", "idle"),
    *("nested-store", "unknown-types", "nested-answers", "nearer-names", "places", "many-keys"),
)
ATTACKER = Path(__file__).parents[2] / "tests" / "helpers" / "attacks" / "attackers.py"
BEGINS = ("begins", "First contribution")
"""Words in an attacker's output from which on it attacks, or trains along."""
SETTLE_SECONDS = 20.0
"""Time after an attack that does not count: records of a killed attacker are believed for 15 s."""
RECOVERY_SECONDS = 120.0
"""Time within which a swarm has to make an update of all its peers again; else it has not survived the attack."""
GOAL, MOST_MB = 0.9, 100.0
"""Least share of the updates without the attack, and most memory in MB that an attack may take from a peer."""
COLUMNS = (
    *("attack", "n", "without", "with", "ratio"),
    *("longest pause, s", "more MB", "failed rounds", "named by", "problem"),
)


@dataclass(frozen=True)
class AttackOptions:
    """Measure what attacks cost an honest swarm."""

    attacks: Annotated[tyro.conf.Positional[tuple[str, ...]], arg("ATTACK ...", "all")] = ()
    """Names of attacks, as tests/helpers/attacks/attackers.py knows them."""
    repeat: int = 5
    """Pairs of a calm and an attacked time, for each attack."""
    seconds: float = 40.0
    """Length of each of these times."""
    peers: int = 3
    """Number of honest peers."""
    paced_samples_per_second: float = 60.0
    """Speed of each peer's pretended device."""
    target_batch_size: int = 256
    """Samples per update."""
    slowest_line_mbps: Annotated[float | None, arg("MBPS", "4")] = None
    """The honest peers leave a member out that sends less, and makes each update take three times as long."""
    by_invitation: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """The honest peers are members, and the attacker is not."""
    output_dir: Annotated[Path, arg("FOLDER")] = Path("runs/attacks")
    """Folder for run folders, logs and attacks.json; the folders of these attacks are deleted first."""

    def check(self) -> None:
        """Raises InputError: a value cannot work."""
        at_least(self, 1, "repeat", "target_batch_size")
        at_least(self, 2, "peers")
        if not (self.seconds > 0 and self.paced_samples_per_second > 0):
            raise InputError("--seconds and --paced-samples-per-second have to be more than 0.")
        if unknown := set(self.attacks) - set(ATTACKS):
            raise InputError(f"There is no attack {min(unknown)}: choose from {', '.join(ATTACKS)}.")
        if not ATTACKER.exists():
            raise InputError(f"The attackers are missing: {ATTACKER} comes with the source, not with the package.")


@dataclass(frozen=True)
class Window:
    """What was seen of the swarm in one calm or attacked time."""

    attacked: bool
    updates_per_second: float
    longest_pause_seconds: float
    """Longest time between two updates."""
    failed_rounds: int
    """Failed rounds of all honest peers."""
    named_by: int
    """Number of honest peers whose log names the attacker."""
    lines: list[str]
    """One such line from the log of each of these peers."""
    peak_mb: dict[str, float]
    """Most memory of each honest peer, by name."""


def updates_per_second(moments: Sequence[float], since: float, until: float) -> float:
    """Updates per second in a time; an update that was half made when the time began counts half.

    Args:
        moments: Unix seconds of the updates, ascending.
        since: beginning of the time.
        until: end of the time.
    """
    if len(moments) < 2:
        return 0.0
    made = np.interp([since, until], moments, np.arange(len(moments), dtype=float))
    return float(made[1] - made[0]) / (until - since)


def longest_pause_seconds(moments: Sequence[float], since: float, until: float) -> float:
    """Longest time between two updates, of which the later one came within a time or had not come at its end.

    Args:
        moments: Unix seconds of the updates, ascending.
        since: beginning of the time.
        until: end of the time.
    """
    before = [moment for moment in moments if moment <= since]
    within = [moment for moment in moments if since < moment <= until]
    each = [before[-1] if before else since, *within, until]
    return max(later - earlier for earlier, later in pairwise(each))


def measure(attack: str, options: AttackOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs one attack; returns an entry of `attacks.json`: `attack`, `pairs` (a calm and an attacked window each) and
    `problem`."""
    pairs: list[dict[str, Any]] = []
    problem = None
    try:
        size = options.peers, options.target_batch_size
        slowest = options.slowest_line_mbps
        more = ["--slowest-line-mbps", str(slowest)] if slowest else []
        with HonestSwarm(attack, options.output_dir, *size, options.by_invitation, more=more) as swarm:
            for number in range(options.repeat):
                order = (False, True) if number % 2 == 0 else (True, False)
                windows = {attacked: _window(attack, attacked, swarm, options) for attacked in order}
                pairs.append({"calm": asdict(windows[False]), "attacked": asdict(windows[True])})
                rates = [windows[attacked].updates_per_second for attacked in (False, True)]
                say(f"{attack} {number + 1}/{options.repeat}: {rates[0]:.2f} updates/s, attacked {rates[1]:.2f}")
    except SwarmError as error:
        problem = str(error)
        say(f"{attack}: {problem}")
    return {"attack": attack, "pairs": pairs, "problem": problem}


def _window(attack: str, attacked: bool, swarm: HonestSwarm, options: AttackOptions) -> Window:
    """Watches the swarm for a while, and then waits until all peers train together again."""
    sizes, peaks = swarm.log_sizes(), MemoryPeaks(swarm.peers)

    def is_over(until: float) -> bool:
        peaks.look()
        return time.time() > until

    with _attacker(attack, swarm, options) if attacked else contextlib.nullcontext() as output:
        if output is not None:
            wait_until(lambda: any(word in _text(output) for word in BEGINS), swarm, START_SECONDS, "meet the attacker")
        since = time.time()
        wait_until(lambda: is_over(since + options.seconds), swarm, 2 * options.seconds, "train on")
        until = time.time()
    settled = until + (SETTLE_SECONDS if attacked else 0.0)
    wait_until(lambda: swarm.all_train_since(settled), swarm, RECOVERY_SECONDS, "train together again")
    lines = swarm.naming_lines(sizes, _ids(_text(output), swarm)) if output is not None else []
    moments = swarm.moments()
    return Window(
        attacked,
        updates_per_second(moments, since, until),
        longest_pause_seconds(moments, since, until),
        swarm.failed_rounds(since, until),
        len(lines),
        lines,
        peaks.megabytes,
    )


@contextlib.contextmanager
def _attacker(attack: str, swarm: HonestSwarm, options: AttackOptions) -> Iterator[Path]:
    """Runs an attacker that knows the first peer's address; yields the file of its output.

    A real attacker would have its own computer. Here it gets the processor time that the honest peers leave.
    """
    number = len(list(swarm.folder.glob("attacker-*.log"))) + 1
    output = swarm.folder / f"attacker-{number}.log"
    command = ["nice", "-n", "15", sys.executable, "-u", str(ATTACKER), attack, "--initial-peers", swarm.address]
    command += ["--seconds", f"{options.seconds + START_SECONDS:.0f}"]
    command += ["--output-dir", str(swarm.folder / f"attacker-{number}")]
    with started(command, output) as process:
        yield output
        if process.poll() not in (None, 0):
            raise SwarmError(f"the attacker itself failed: see {output}")


def _ids(output: str, swarm: HonestSwarm) -> set[str]:
    """Peer ids in an attacker's output, without those of honest peers."""
    return set(re.findall(r"\bQm\w{44}\b", output)) - swarm.peer_ids


def _text(file: Path) -> str:
    return file.read_text(errors="replace")


def row(found: dict[str, Any]) -> dict[str, str]:
    """A row of the table, with the keys `COLUMNS`."""
    calm, attacked = ([pair[name] for pair in found["pairs"]] for name in ("calm", "attacked"))
    means = [np.mean([window["updates_per_second"] for window in windows] or [np.nan]) for windows in (calm, attacked)]
    named = [window["named_by"] for window in attacked]
    failed = [sum(window["failed_rounds"] for window in windows) for windows in (calm, attacked)]
    mean, half_width, n = interval(ratios(found))
    shown = "–" if n == 0 else f"{mean:.2f}" if n < 3 else f"{mean:.2f} ± {half_width:.2f}"
    more = more_mb(found)
    values = (
        found["attack"],
        str(n),
        *("–" if np.isnan(value) else f"{value:.2f}" for value in means),
        shown,
        longest_pauses(found),
        "–" if more is None else f"{more:.0f}",
        f"{failed[1]} (calm {failed[0]})",
        f"{min(named)} to {max(named)}" if named else "–",
        found["problem"] or "",
    )
    return dict(zip(COLUMNS, values, strict=True))


def ratios(found: dict[str, Any]) -> list[float]:
    """Updates per second with the attacker over those without it, for each pair."""
    rates = [(pair["attacked"]["updates_per_second"], pair["calm"]["updates_per_second"]) for pair in found["pairs"]]
    return [attacked / calm for attacked, calm in rates if calm > 0]


def longest_pauses(found: dict[str, Any]) -> str:
    """The longest pauses with the attacker and in the calm times, in words."""
    if not (pairs := found["pairs"]):
        return "–"
    attacked = max(pair["attacked"]["longest_pause_seconds"] for pair in pairs)
    calm = max(pair["calm"]["longest_pause_seconds"] for pair in pairs)
    return f"{attacked:.1f} (calm {calm:.1f})"


def more_mb(found: dict[str, Any]) -> float | None:
    """Most megabytes that a peer held more than in the calm time of the same pair; None without a pair."""
    pairs = [(pair["attacked"]["peak_mb"], pair["calm"]["peak_mb"]) for pair in found["pairs"]]
    return max((attacked[name] - calm[name] for attacked, calm in pairs for name in calm), default=None)


def table(results: Sequence[dict[str, Any]]) -> Table:
    """A table with a row for each attack."""
    shown = Table(title="Updates per second of the honest peers, without and with an attacker", title_justify="left")
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column in (COLUMNS[0], COLUMNS[-1]) else "right")
    for found in results:
        shown.add_row(*row(found).values())
    return shown


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns the exit status.

    It is 1 if an attack ended the swarm, or cost more than a tenth of its updates or 100 MB of a peer's memory. Else it
    is 0, 2 for bad input, or 130 after Ctrl-C.
    """
    options = tyro.cli(AttackOptions, args=arguments, prog="python -m analysis attacks", description=__doc__)
    console = wide_console()

    def run() -> int:
        options.check()
        make_writable(options.output_dir)
        environment = prepare(options.paced_samples_per_second)
        kept = options_of_result(asdict(options))
        results = []
        for attack in options.attacks or ATTACKS:
            shutil.rmtree(options.output_dir / attack, ignore_errors=True)
            results.append(measure(attack, options, lambda line: console.print(line, markup=False, highlight=False)))
            found = {"options": kept, "results": results, "environment": environment}
            write_json(options.output_dir / "attacks.json", found)
        console.print(table(results))
        return int(not all(is_held(found) for found in results))

    return exit_status(run, "Interrupted: what was measured until then is in attacks.json.")


def is_held(found: dict[str, Any]) -> bool:
    """Whether the swarm survived, with at least `GOAL` of its updates and at most `MOST_MB` more memory."""
    values, more = ratios(found), more_mb(found)
    return found["problem"] is None and bool(values) and sum(values) / len(values) >= GOAL and more <= MOST_MB
