"""What a peer is doing right now: one small file that a terminal, ``swarm.local`` and a notebook can show."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from recipe.run_folder import write_json


@dataclass(frozen=True)
class Status:
    """A moment in a peer's life.

    :param name: public name
    :param run_id: the run
    :param phase: what it is doing now
    :param step: global updates so far
    :param total_steps: where the run ends, or this peer leaves
    :param samples: samples of the swarm towards the next update, an estimate between records
    :param target_batch_size: samples that a global update takes
    :param num_peers: peers in the last update
    :param rate: this peer's samples per second, waiting included
    :param swarm_rate: the swarm's samples per second
    :param loss: training loss of the last update over all peers
    :param val_accuracy: last validation accuracy, 0 to 1
    :param contributed: samples that this peer has put into averages
    :param swarm_samples: samples in all averages that this peer took part in
    :param addresses: where it can be reached
    :param ended: why it is no longer training, or empty
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
        """Replace the file atomically; a full disk costs the status, never the training."""
        try:
            write_json(path, asdict(self))
        except OSError:
            pass

    @classmethod
    def read(cls, path: Path) -> Status | None:
        """The last written status, or None if there is none (yet)."""
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError):
            return None
        known = {item.name for item in fields(cls)}
        return cls(**{key: value for key, value in content.items() if key in known})

    def line(self) -> str:
        """One line for a log."""
        share = f" of {self.num_peers} peer{'s' * (self.num_peers != 1)}" if self.num_peers else ""
        return (
            f"step {self.step}/{self.total_steps} · {self.phase} · {self.samples}/{self.target_batch_size} samples · "
            f"{shown(self.rate, '.0f')} of {shown(self.swarm_rate, '.0f')} samples/s{share} · "
            f"loss {shown(self.loss, '.3f')} · validation accuracy {percent(self.val_accuracy)}"
        )


def shown(value: float | None, spec: str) -> str:
    """A number, or a dash where there is none yet."""
    return "–" if value is None or not math.isfinite(value) else format(value, spec)


def percent(fraction: float | None) -> str:
    return "–" if fraction is None or not math.isfinite(fraction) else f"{100 * fraction:.1f} %"


def status_table(statuses: list[Status], title: str) -> Table:
    """A live table with a row for each peer: progress, pace, quality, and what it does now."""
    table = Table(title=title, title_justify="left", title_style="bold", expand=False)
    columns = ("peer", "now", "step", "batch", "peers", "samples/s", "swarm's", "loss", "val. accuracy", "share")
    for column in columns:
        text = column in ("peer", "now", "batch")
        table.add_column(column, justify="left" if text else "right", no_wrap=True)
    for status in statuses:
        filled = min(status.samples, status.target_batch_size)
        share = status.contributed / status.swarm_samples if status.swarm_samples else None
        table.add_row(
            status.name,
            Text(status.ended or status.phase, style="green" if status.ended else "cyan"),
            f"{status.step}/{status.total_steps}" if status.total_steps else "–",
            ProgressBar(total=status.target_batch_size, completed=filled, width=12),
            str(status.num_peers or "–"),
            shown(status.rate, ".0f"),
            shown(status.swarm_rate, ".0f"),
            shown(status.loss, ".3f"),
            percent(status.val_accuracy),
            percent(share),
        )
    return table
