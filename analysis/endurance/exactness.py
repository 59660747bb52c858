"""Checks whether all peers of a swarm hold the same bits after many rounds, in every way of averaging.

    python -m analysis exactness --rounds 200      # 25 minutes; OUTPUT_DIR/exactness.json
    python -m analysis exactness --averaging sync --codec int8

Three peers train digits on this machine. If one of them had missed a part of an average without noticing, or rounded in
another way, its weights would differ from the others' at the end. Failed rounds that were noticed are counted.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import tyro
from rich.console import Console
from rich.table import Table

from analysis.campaigns.peer_processes import has_ended, started
from analysis.endurance.soak_result import weights_hash
from analysis.program import environment_of_result, options_of_result
from recipe.command_line import arg, at_least, exit_status
from recipe.config import Recipe
from recipe.errors import InputError
from recipe.run_folder import RunFolder, make_writable, read_metrics, write_json

Averaging, Codec = (get_type_hints(Recipe)[field] for field in ("averaging", "codec"))
LOCAL_STEPS = 4
COUNTS = {"peer_rounds": "peer-rounds", "complete": "with all parts", "early": "met too early", "failed": "failed"}
COLUMNS = ("averaging", "codec", *COUNTS.values(), "weights")


@dataclass(frozen=True)
class ExactnessOptions:
    """Train with several peers in every way of averaging, and compare their weights."""

    rounds: int = 200
    """Number of rounds of each way."""
    peers: int = 3
    """Number of peers."""
    averaging: tuple[Averaging, ...] = get_args(Averaging)
    """Ways of averaging to test."""
    codec: tuple[Codec, ...] = get_args(Codec)
    """Codecs to test with each of these ways."""
    fragments: tuple[int, ...] = (1, 4)
    """Parts of the model that are averaged in turn, with local steps."""
    output_dir: Annotated[Path, arg("FOLDER")] = Path("runs/exactness")
    """Folder for the run folders and exactness.json."""

    def check(self) -> None:
        """Raises InputError: a value cannot work."""
        at_least(self, 2, "peers", "rounds")
        if not (self.averaging and self.codec and self.fragments):
            raise InputError("--averaging, --codec and --fragments need at least one value each.")
        if min(self.fragments) < 1:
            raise InputError(f"--fragments is {min(self.fragments)}: set it to at least 1.")

    @property
    def ways(self) -> list[tuple[str, str, int]]:
        """All combinations of averaging, codec and fragments that work together. With auto, the swarm chooses the
        codec."""
        ways = []
        for averaging, codec, fragments in itertools.product(self.averaging, self.codec, self.fragments):
            if averaging != "local":
                fragments = 1
            if (codec == "topk" and averaging not in ("local", "auto")) or (codec == "powersgd" and fragments > 1):
                continue
            ways.append((averaging, "none" if averaging == "auto" else codec, fragments))
        return list(dict.fromkeys(ways))


def measure(options: ExactnessOptions, console: Console) -> dict[str, Any]:
    """Runs a swarm for each way; returns the content of `exactness.json`.

    Raises:
        InputError: a swarm ended before it had made all rounds.
    """
    rows = []
    for averaging, codec, fragments in options.ways:
        console.print(f"{name_of(averaging, fragments)}, {codec} ...")
        run_id = f"{averaging}-{codec}-{fragments}-{os.getpid()}"
        way = ["--averaging", averaging, "--codec", codec, "--local-steps", str(LOCAL_STEPS)]
        _train(options, run_id, [*way, "--fragments", str(fragments)])
        folders = [RunFolder(path) for path in sorted((options.output_dir / run_id).iterdir()) if path.is_dir()]
        rows.append({"averaging": averaging, "codec": codec, "fragments": fragments, **compared(folders)})
    return {"options": options_of_result(asdict(options)), "rows": rows}


def name_of(averaging: str, fragments: int) -> str:
    """A way of averaging in words."""
    return averaging if fragments == 1 else f"{averaging}, {fragments} fragments"


def _train(options: ExactnessOptions, run_id: str, way: list[str]) -> None:
    command = [sys.executable, "-m", "swarm", "demo", "--peers", str(options.peers), "--run-id", run_id, *way]
    command += ["--output-dir", str(options.output_dir), "--total-steps", str(options.rounds), "--device", "cpu"]
    command += ["--validate-every-steps", str(options.rounds), "--batch-size", "32"]
    log_file = options.output_dir / f"{run_id}.log"
    with started(command, log_file) as swarm:
        while not has_ended(swarm, 1.0):
            pass
    if swarm.returncode != 0:
        raise InputError(f"A swarm ended early: see {log_file}.")


def compared(folders: list[RunFolder]) -> dict[str, Any]:
    """Counts of rounds from the files of one swarm's peers, and a hash of each peer's weights at the end.

    Returns:
        `peer_rounds`, the rounds of each peer that gave an average; `complete`, how many of them had every part of it;
        `early`, groups that had too few samples yet and computed on; `failed`, the rest; `weights`, a hash for each
        peer.
    """
    rounds = [line for folder in folders for line in read_metrics(folder.rounds)]
    summaries = [json.loads(folder.summary.read_text()) for folder in folders]
    averaged, alone = (sum(line["outcome"] == outcome for line in rounds) for outcome in ("averaged", "alone"))
    early = sum(line["outcome"] not in ("averaged", "alone") and line["group_size"] > 0 for line in rounds)
    return {
        "peer_rounds": averaged,
        "complete": sum(summary["complete_updates"] for summary in summaries) - alone,
        "early": early,
        "failed": len(rounds) - averaged - alone - early,
        "weights": {folder.path.name: weights_hash(folder.checkpoints / "last.ckpt") for folder in folders},
    }


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a row of the table; results of earlier versions have no fragments."""
    different = len(set(row["weights"].values()))
    weights = "bit-identical" if different == 1 else f"{different} different ones"
    averaging = name_of(row["averaging"], row.get("fragments", 1))
    return averaging, row["codec"], *(f"{row[name]:,}" for name in COUNTS), weights


def table(found: dict[str, Any]) -> Table:
    """A table with a row for each way of averaging."""
    options = found["options"]
    shown = Table(title=f"{options['peers']} peers, {options['rounds']} rounds each", title_justify="left")
    for column in COLUMNS:
        shown.add_column(column, justify="right" if column in COUNTS.values() else "left")
    for row in found["rows"]:
        shown.add_row(*cells(row))
    return shown


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns the exit status: 0, 1 if peers differ, 2 for input that cannot work, 130 after
    Ctrl-C."""
    options = tyro.cli(ExactnessOptions, args=arguments, prog="python -m analysis exactness", description=__doc__)
    console = Console()

    def run() -> int:
        options.check()
        make_writable(options.output_dir)
        environment = environment_of_result()
        found = measure(options, console)
        write_json(options.output_dir / "exactness.json", found | {"environment": environment})
        console.print(table(found))
        return int(any(len(set(row["weights"].values())) > 1 for row in found["rows"]))

    return exit_status(run)
