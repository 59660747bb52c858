"""Draws curves, the confusion matrix, and how throughput scales."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOTS_PER_INCH = 120
_MOST_NUMBERED_CLASSES = 20


def draw_curves(lines: list[dict[str, Any]], path: Path) -> None:
    """Draws loss, accuracy, learning rate and throughput over steps.

    Args:
        lines: the lines of a `metrics.jsonl`.
        path: PNG file.
    """
    figure = Figure(figsize=(10, 6))
    figure.subplots_adjust(left=0.085, right=0.98, bottom=0.09, top=0.94, hspace=0.4)  # a computed layout takes long
    panels = figure.subplots(2, 2).ravel()
    _panel(panels[0], lines, "loss", {"train/loss": "training", "val/loss": "validation"})
    _panel(panels[1], lines, "accuracy", {"train/top1": "training, top-1", "val/top1": "validation, top-1"})
    _panel(panels[2], lines, "learning rate", {"train/lr": ""})
    _panel(panels[3], lines, "training samples per second", {"perf/samples_per_second": ""})
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _panel(axes: Axes, lines: list[dict[str, Any]], title: str, tags: dict[str, str]) -> None:
    for tag, label in tags.items():
        points = [(line["step"], line[tag]) for line in lines if line.get(tag) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker="." if tag.startswith("val") else None)
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if any(tags.values()) and axes.lines:
        axes.legend()


def draw_confusion(confusion: list[list[int]], path: Path) -> None:
    """Draws the confusion matrix; each true class (row) is shown as fractions of its samples.

    Args:
        confusion: counts, true classes in rows.
        path: PNG file.
    """
    figure = Figure(figsize=(6, 5.4))
    figure.subplots_adjust(left=0.11, right=0.99, bottom=0.09, top=0.97)
    axes = figure.subplots()
    shares = [[count / max(1, sum(row)) for count in row] for row in confusion]
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="fraction of the class")
    axes.set_xlabel("guessed class")
    axes.set_ylabel("true class")
    if len(confusion) <= _MOST_NUMBERED_CLASSES:
        axes.set_xticks(range(len(confusion)))
        axes.set_yticks(range(len(confusion)))
        for row, counts in enumerate(confusion):
            for column, count in enumerate(counts):
                if count:
                    colour = "white" if shares[row][column] > 0.5 else "black"
                    axes.text(column, row, str(count), ha="center", va="center", color=colour, fontsize=8)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def draw_scaling(
    processes: list[int], throughput: list[float], ranges: list[tuple[float, float]], path: Path, title: str
) -> None:
    """Draws measured samples per second over the number of processes, and the ideal line through the first point.

    Args:
        processes: numbers of processes, ascending.
        throughput: for each number, samples per second of training, the median of its runs.
        ranges: for each number, the slowest and the fastest of its runs.
        path: PNG file.
        title: what was measured, and on which machine.
    """
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    ideal = [throughput[0] * count / processes[0] for count in processes]
    axes.plot(processes, ideal, linestyle="--", color="grey", label="ideal")
    below = [middle - low for middle, (low, _) in zip(throughput, ranges, strict=True)]
    above = [high - middle for middle, (_, high) in zip(throughput, ranges, strict=True)]
    axes.errorbar(processes, throughput, yerr=[below, above], marker="o", capsize=4, label="measured, with range")
    axes.set_xticks(processes)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("processes")
    axes.set_ylabel("training samples per second")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=DOTS_PER_INCH)
