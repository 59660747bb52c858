"""Draws what a run looks like, from the folders that its peers wrote: docs/pictures/run.png.

    python docs/make_run_picture.py runs/RUN_ID
    python docs/make_run_picture.py runs/RUN_ID -o picture.png --title "Four peers at home"

From above: loss and accuracy over the updates of the swarm, who was in which round, and samples per second. It reads
`metrics.jsonl` and `rounds.jsonl` of each peer's folder, while the run goes on or afterwards.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import matplotlib  # noqa: E402 (the path comes first)

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from recipe.run_folder import RunFolder, read_metrics  # noqa: E402

BLUE, ORANGE, RED, GREY = "#2f5fc4", "#d97706", "#c62828", "#94a3b8"
OUTCOMES = {"averaged": BLUE, "alone": ORANGE, "failed": RED}


@dataclass
class Peer:
    """What one peer wrote.

    Args:
        name: of its folder.
        metrics: lines of its metrics.jsonl.
        rounds: lines of its rounds.jsonl.
    """

    name: str
    metrics: list[dict[str, Any]]
    rounds: list[dict[str, Any]]

    def curve(self, tag: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric."""
        lines = [line for line in self.metrics if line.get(tag) is not None]
        return [line["step"] for line in lines], [line[tag] for line in lines]


def read_peers(run: Path) -> list[Peer]:
    """The peers of a run, by name.

    Raises:
        SystemExit: there are none.
    """
    peers = []
    for path in sorted(run.iterdir() if run.is_dir() else []):
        folder = RunFolder(path)
        if folder.metrics.exists() and folder.rounds.exists():
            peers.append(Peer(path.name, read_metrics(folder.metrics), read_metrics(folder.rounds)))
    if not peers:
        raise SystemExit(f"error: {run} holds no folders of peers: name OUTPUT_DIR/RUN_ID.")
    return peers


def draw(peers: list[Peer], title: str, file: Path) -> None:
    """Writes the picture."""
    strip = 0.45 * len(peers) + 0.4
    figure, (top, middle, bottom) = plt.subplots(
        3, 1, sharex=True, figsize=(9, 5.2 + strip), height_ratios=[2.2, strip, 2.2], layout="constrained"
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    _learning(top, peers)
    _rounds(middle, peers)
    _speed(bottom, peers)
    bottom.set_xlim(0.4, max(line["step"] for peer in peers for line in peer.metrics) + 0.6)
    bottom.set_xlabel("updates of the swarm")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    for panel in (top, middle, bottom):
        panel.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _learning(panel: Axes, peers: list[Peer]) -> None:
    """Loss of the swarm, and accuracy where there was a validation, of the peer that was there longest."""
    longest = max(peers, key=lambda peer: len(peer.curve("swarm/loss")[0]))
    panel.plot(*longest.curve("swarm/loss"), color=BLUE, marker="o", markersize=3)
    panel.set_ylabel("training loss", color=BLUE)
    panel.set_ylim(bottom=0)
    accuracy = longest.curve("val/top1")
    if accuracy[0]:
        right = panel.twinx()
        right.plot(*accuracy, color=ORANGE, marker="s", markersize=4)
        right.set_ylabel("validation accuracy", color=ORANGE)
        right.set_ylim(0, 1.03)
        right.spines["top"].set_visible(False)


def _rounds(panel: Axes, peers: list[Peer]) -> None:
    """A strip for each peer, with a cell for each round: how it ended, and the samples that the peer brought."""
    steps = {line["step"] for peer in peers for line in peer.rounds}
    has_room = len(steps) <= 24
    for row, peer in enumerate(peers):
        last = {line["step"]: line for line in peer.rounds}
        failed = {line["step"] for line in peer.rounds if line["outcome"] not in OUTCOMES}
        for step, line in last.items():
            outcome = line["outcome"] if line["outcome"] in OUTCOMES else "failed"
            panel.barh(row, 0.9, left=step - 0.45, height=0.8, color=OUTCOMES[outcome])
            if has_room and outcome != "failed":
                panel.text(step, row, line["own_samples"], color="white", ha="center", va="center", fontsize=8)
            if step in failed and outcome != "failed":
                panel.plot(step - 0.38, row + 0.3, marker="x", color="white", markersize=4)
    panel.set_yticks(range(len(peers)), [peer.name for peer in peers])
    panel.invert_yaxis()
    panel.set_ylabel("samples in\nthe round" if has_room else "rounds")
    seen = {line["outcome"] if line["outcome"] in OUTCOMES else "failed" for peer in peers for line in peer.rounds}
    patches = [Patch(color=color, label=name) for name, color in OUTCOMES.items() if name in seen]
    panel.legend(handles=patches, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=8)


def _speed(panel: Axes, peers: list[Peer]) -> None:
    """Of the swarm, and of each peer."""
    longest = max(peers, key=lambda peer: len(peer.curve("perf/swarm_samples_per_second")[0]))
    panel.plot(*longest.curve("perf/swarm_samples_per_second"), color=BLUE, marker="o", markersize=3, label="swarm")
    for number, peer in enumerate(peers):
        label = "each peer" if number == 0 else None
        panel.plot(*peer.curve("perf/samples_per_second"), color=GREY, linewidth=1, label=label)
    panel.set_ylabel("samples per second")
    panel.set_ylim(bottom=0)
    panel.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=8)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run, with a folder for each peer")
    parser.add_argument("-o", "--output", type=Path, default=HERE / "pictures" / "run.png")
    parser.add_argument("--title", default="")
    options = parser.parse_args(arguments)
    draw(read_peers(options.run), options.title or f"Run {options.run.resolve().name}", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
