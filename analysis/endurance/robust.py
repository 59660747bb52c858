"""Compares defences against lying members under attacks: a swarm of virtual peers learns digits repeatedly.

    python -m analysis robust                          # five minutes on one core; OUTPUT_DIR/robust.json
    python -m analysis robust --peers 10 --attackers 20 --rules mean clip --seeds 20

`clip` is the swarm's own rule. The others are from the literature. The trimmed mean is told the number of attackers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.table import Table

from analysis.campaigns.statistics import interval
from analysis.endurance.virtual_swarm import ATTACKS, RULES, Digits, Swarm, train
from analysis.program import environment_of_result, options_of_result, wide_console
from recipe.command_line import arg, at_least, exit_status
from recipe.errors import InputError
from recipe.run_folder import make_writable, write_json


@dataclass(frozen=True)
class RobustOptions:
    """Measure how well each rule of averaging withstands lying virtual members."""

    peers: Annotated[tuple[int, ...], arg("PEERS ...")] = (10, 50)
    """Sizes of swarms."""
    attackers: Annotated[tuple[int, ...], arg("PERCENT ...")] = (10, 20)
    """Percentages of attackers among these peers; at least one peer."""
    attacks: Annotated[tuple[str, ...], arg("ATTACK ...", "all")] = ()
    """Attacks to test."""
    rules: Annotated[tuple[str, ...], arg("RULE ...")] = ("mean", "median", "trimmed mean", "norm clip", "clip")
    """Rules of averaging; clip 1.25, clip 1.5 and clip 3 are clip with another reach."""
    seeds: int = 5
    """Trainings of each kind, with other first weights and batches."""
    rounds: int = 100
    """Updates of each training."""
    output_dir: Annotated[Path, arg("FOLDER")] = Path("runs/robust")
    """Folder of robust.json."""

    def check(self) -> None:
        """Raises InputError: a value cannot work."""
        at_least(self, 1, "seeds", "rounds")
        for option, values, known in (("attack", self.attacks, ATTACKS), ("rule", self.rules, RULES)):
            if not values and option == "rule":
                raise InputError(f"--rules needs at least one value: choose from {', '.join(known)}.")
            if unknown := set(values) - known.keys():
                raise InputError(f"There is no {option} {min(unknown)!r}: choose from {', '.join(known)}.")
        if not self.peers or min(self.peers) < 2 or not self.attackers or min(self.attackers) <= 0:
            raise InputError("--peers needs numbers of at least 2, and --attackers numbers of more than 0.")
        if max(self.attackers) >= 50:
            raise InputError("--attackers has to be less than 50: no rule holds against half of the members.")

    @property
    def swarms(self) -> list[Swarm]:
        """Swarms of each size with each share of attackers."""
        return [
            Swarm(peers, max(1, round(peers * percent / 100)), self.rounds)
            for peers in self.peers
            for percent in self.attackers
        ]


def measure(options: RobustOptions, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Runs all trainings; yields rows of `robust.json`: `peers`, `attackers`, `attack`, `rule` and the `accuracies` of
    all seeds."""
    data, began = Digits.load(), time.monotonic()
    kinds = [(swarm, attack) for swarm in options.swarms for attack in options.attacks or ATTACKS]
    for number, (swarm, attack) in enumerate(kinds, 1):
        found = {
            rule: [train(swarm, attack, rule, seed, data) for seed in range(options.seeds)] for rule in options.rules
        }
        for rule, accuracies in found.items():
            yield {"peers": swarm.peers, "attackers": swarm.attackers, "attack": attack, "rule": rule} | {
                "accuracies": accuracies
            }
        means = ", ".join(f"{rule} {100 * sum(values) / len(values):.1f} %" for rule, values in found.items())
        left = (time.monotonic() - began) / number * (len(kinds) - number)
        say(f"{number}/{len(kinds)} {title(swarm.peers, swarm.attackers)}, {attack}: {means} ({left:.0f} s to go)")


def title(peers: int, attackers: int) -> str:
    """A swarm in words, for the title of a table."""
    return f"{peers} peers, {attackers} of them attackers"


def shown(accuracies: Sequence[float]) -> str:
    """Mean and interval of accuracies, in per cent."""
    mean, half_width, n = interval([100 * value for value in accuracies])
    return f"{mean:.1f}" if n < 3 else f"{mean:.1f} ± {half_width:.1f}"


def tables(rows: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """A table for each swarm, with a row for each attack and a column for each rule."""
    rules = list(dict.fromkeys(row["rule"] for row in rows))
    for peers, attackers in dict.fromkeys((row["peers"], row["attackers"]) for row in rows):
        of_swarm = [row for row in rows if (row["peers"], row["attackers"]) == (peers, attackers)]
        table = Table(title=f"Final accuracy in %, {title(peers, attackers)}", title_justify="left")
        table.add_column("attack")
        for rule in rules:
            table.add_column(rule, justify="right")
        for attack in dict.fromkeys(row["attack"] for row in of_swarm):
            found = {row["rule"]: shown(row["accuracies"]) for row in of_swarm if row["attack"] == attack}
            table.add_row(attack, *(found[rule] for rule in rules))
        yield table


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns the exit status: 0, 2 for input that cannot work, 130 after Ctrl-C."""
    options = tyro.cli(RobustOptions, args=arguments, prog="python -m analysis robust", description=__doc__)
    console = wide_console()

    def run() -> None:
        options.check()
        make_writable(options.output_dir)
        torch.set_num_threads(1)
        environment = environment_of_result()
        kept = options_of_result(asdict(options))
        rows: list[dict[str, Any]] = []
        for row in measure(options, lambda line: console.print(line, markup=False, highlight=False)):
            rows.append(row)
            write_json(options.output_dir / "robust.json", {"options": kept, "rows": rows, "environment": environment})
        for table in tables(rows):
            console.print(table)

    return exit_status(run, "Interrupted: what was measured until then is in robust.json.")
