"""What a peer is doing right now, in one small file, and the tables that show it to a person."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rich import box
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from recipe.config import Recipe
from recipe.registry import kind_of
from recipe.run_folder import RunFolder, write_json
from recipe.tasks.images import Images

WIDE_COLUMNS = 100
"""Terminals of at least so many columns get the whole table, narrower ones what matters most."""


@dataclass(frozen=True)
class Status:
    """What a peer is doing at one moment, and what it has reached.

    Args:
        name: public name
        run_id: the run
        phase: what it is doing now
        step: global updates so far
        total_steps: where the run ends, or this peer leaves
        samples: samples of the swarm towards the next update, an estimate between records
        target_batch_size: samples that a global update takes
        num_peers: peers in the last update
        rate: this peer's samples per second, waiting included
        swarm_rate: the swarm's samples per second
        loss: training loss of the last update over all peers, as they claim it
        val_accuracy: last validation accuracy, 0 to 1
        contributed: samples that this peer has put into averages
        swarm_samples: samples in all averages that this peer took part in
        addresses: where it can be reached
        ended: why it is no longer training, or empty
    """

    name: str
    run_id: str
    phase: str
    step: int = 0
    total_steps: int = 0
    samples: int = 0
    target_batch_size: int = 1
    num_peers: int = 0
    rate: float | None = None
    swarm_rate: float | None = None
    loss: float | None = None
    val_accuracy: float | None = None
    contributed: int = 0
    swarm_samples: int = 0
    addresses: tuple[str, ...] = ()
    ended: str = ""

    def write(self, path: Path) -> None:
        """Replace the file atomically; a full disk costs the status, never the training.

        The file is written twice a second while the peer runs, and is useless after a power failure. So it is not
        forced to the disk.
        """
        try:
            write_json(path, asdict(self), durable=False)
        except OSError:
            pass

    @classmethod
    def read(cls, path: Path) -> Status | None:
        """The last written status; None if there is none yet, or it cannot be read."""
        try:
            content = json.loads(path.read_text())
            known = {item.name for item in fields(cls)}
            return cls(**{key: value for key, value in content.items() if key in known})
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return None

    def line(self) -> str:
        """Return one line for a log, with what is known."""
        parts = [f"step {self.step}/{self.total_steps}"] if self.total_steps else []
        parts.append(self.ended or self.phase)
        if self.num_peers:
            peers = f"{self.num_peers} peer{'s' * (self.num_peers != 1)}"
            parts.append(f"{self.samples}/{self.target_batch_size} samples of {peers}")
        if self.rate is not None:
            parts.append(f"{shown_rate(self.rate)} of {shown_rate(self.swarm_rate)} samples/s")
        if self.loss is not None:
            parts.append(f"loss {shown(self.loss, '.3f')}")
        if self.val_accuracy is not None:
            parts.append(f"val. accuracy {percent(self.val_accuracy)}")
        return " · ".join(parts)


def shown(value: float | None, spec: str) -> str:
    """A number, or a dash where there is none yet."""
    return "–" if value is None or not math.isfinite(value) else format(value, spec)


def shown_rate(per_second: float | None) -> str:
    """A rate as a whole number, a small one with two digits: a large model on a CPU makes less than one a second."""
    return shown(per_second, ",.0f" if per_second is None or per_second >= 10 else ".2g")


def percent(fraction: float | None) -> str:
    return "–" if fraction is None or not math.isfinite(fraction) else f"{100 * fraction:.1f} %"


def status_table(statuses: list[Status], title: str, width: int) -> Table:
    """A live table with a row for each peer: progress, pace, quality, and what it does now.

    Args:
        width: columns of the terminal; 80 are enough for what matters most
    """
    wide = width >= WIDE_COLUMNS
    cells = [_cells(status, wide) for status in statuses]
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in cells[0]:
        text = column in ("peer", "now", "batch")
        table.add_column(column, justify="left" if text else "right", no_wrap=column != "now")
    for row in cells:
        table.add_row(*row.values())
    return table


def _cells(status: Status, wide: bool) -> dict[str, str | Text | ProgressBar]:
    longest_name = 20 if wide else 12
    name = status.name if len(status.name) <= longest_name else status.name[: longest_name - 1] + "…"
    cells = {
        "peer": name,
        "now": Text(status.ended or status.phase, style="green" if status.ended else "cyan"),
        "step": f"{status.step}/{status.total_steps}" if status.total_steps else "–",
        "peers": str(status.num_peers or "–"),
        "samples/s": shown_rate(status.rate),
        "loss": shown(status.loss, ".3f"),
        "accuracy": percent(status.val_accuracy),
    }
    if wide:
        filled = min(status.samples, status.target_batch_size)
        cells["batch"] = ProgressBar(total=status.target_batch_size, completed=filled, width=12)
        cells["swarm's"] = shown_rate(status.swarm_rate)
        cells["share"] = percent(status.contributed / status.swarm_samples if status.swarm_samples else None)
        order = ("peer", "now", "step", "batch", "peers", "samples/s", "swarm's", "share", "loss", "accuracy")
        return {column: cells[column] for column in order}
    return cells


def result_table(summaries: list[dict]) -> Table:
    """A table of what each peer gave; its title is the result of the run."""
    longest = max(summaries, key=lambda summary: summary["steps"])
    title = (
        f"{longest['outcome'].capitalize()}: validation accuracy {percent(longest['val_accuracy'])} after "
        f"{longest['steps']} updates and {longest['seconds']:.0f} s"
    )
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("peer", "outcome", "updates", "complete", "samples", "share", "samples/s", "accuracy"):
        table.add_column(column, justify="left" if column in ("peer", "outcome") else "right")
    total = sum(summary["samples"] for summary in summaries)
    for summary in summaries:
        table.add_row(
            summary["name"],
            summary["outcome"],
            str(summary["updates"]),
            percent(summary["complete_updates"] / summary["updates"] if summary["updates"] else None),
            f"{summary['samples']:,}",
            percent(summary["samples"] / total if total else None),
            shown_rate(summary["samples"] / max(summary["seconds"], 1e-9)),
            percent(summary["val_accuracy"]),
        )
    return table


def program(name: str) -> str:
    """What to type to start a program of this environment, also if the environment is not activated."""
    own, found = Path(sys.executable).with_name(name), shutil.which(name)
    return name if found and Path(found).parent == own.parent else os.path.relpath(own)


def tensorboard_command(folder: Path) -> str:
    """What to type to see the curves."""
    return f"{program('tensorboard')} --logdir {folder}"


def how_to_use(recipe: Recipe, folder: RunFolder) -> str:
    """What to type to use the weights of a peer; only models of images can be exported."""
    if isinstance(kind_of(recipe.dataset), Images):
        return f"{program('swarm')} export {folder.path} --to my-model"
    return f'torch.load("{folder.checkpoints / "last.ckpt"}", weights_only=True)["state_dict"], in Python'
