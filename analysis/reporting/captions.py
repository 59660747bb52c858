"""The captions of a report's pictures: what a reader sees, over how many runs, and what is missing."""

from __future__ import annotations

from analysis.campaigns.systems import SYSTEMS
from analysis.reporting.figures import LABELS, part_rows, shows_limits
from analysis.reporting.results import Experiment
from analysis.reporting.words import span

PAIRED = (
    "filled dots are mean ratios of updates/s with their 95 % intervals, hollow dots those of samples/s. Right of 1 "
    "the swarm is faster. Blue: the interval of updates/s leaves 1 out; grey: no difference is shown. A row begins "
    "with the name of its experiment, which the contents give, and ends with n, the number of repetitions."
)
"""What is seen in the picture of the answer."""


def speeds(experiment: Experiment, mark: str) -> str:
    """The caption of `figures.throughput`.

    Args:
        mark: a clause that marks paced experiments
    """
    found = f"Samples per second{mark}: {_means(experiment, 'samples_per_second', 'runs')}"
    if shows_limits(experiment):
        found += " Grey lines: the limits if only computing, the bytes of an fp16 average and a round trip took time."
    return found


def times(experiment: Experiment, mark: str) -> str:
    """The caption of `figures.time_to_accuracy`."""
    target = experiment.valid["target_accuracy"].dropna().iloc[0]
    found = f"Seconds of training to {100 * target:g} % accuracy{mark}: "
    found += _means(experiment, "seconds_to_accuracy", "seeds" if "dataset" not in experiment.cells else "folds")
    reached = experiment.valid.groupby("system")["seconds_to_accuracy"].count()
    return found + _missing("Did not reach it", experiment, [name for name in reached.index if reached[name]])


def parts(experiment: Experiment, mark: str) -> str:
    """The caption of `figures.parts`."""
    shown = part_rows(experiment)
    n = experiment.valid[experiment.valid["system"].isin(shown["system"])].groupby(["system", experiment.axis]).size()
    found = f"Where the time of an update goes, per sample in it{mark}: means of {span(n)} runs."
    if experiment.axes:
        found += f" Behind the name of a system stands: {LABELS.get(experiment.axis, experiment.axis)}."
    if any(SYSTEMS[system].overlaps for system in shown["system"]):
        found += " Where a system averages while it computes, only its wait for the average is seen."
    if any(cell.last_times_slower > 1 for cell in experiment.valid["cell"]):
        found += " What DDP calls transfer includes its wait for the slower peer."
    return found + _missing("Did not report it", experiment, list(shown["system"]))


def _means(experiment: Experiment, column: str, what: str) -> str:
    """What is seen of the means of a column."""
    n = experiment.summary(column).dropna(subset=["mean"])["n"]
    few, enough = n.min() < 3, n.max() >= 3
    interval = ("with its 95 % interval" + (" from three on" if few else "")) if enough else "too few for an interval"
    if experiment.axes:
        dots = f"a large dot is the mean of {span(n)} {what}, {interval}; small dots are runs"
        return f"{dots}. Systems stand side by side."
    return f"a bar is the mean of {span(n)} {what}, {interval}; dots are runs."


def _missing(why: str, experiment: Experiment, shown: list[str]) -> str:
    """A sentence on the systems that are not in the picture; empty if all are."""
    labels = [SYSTEMS[system].label for system in experiment.systems if system not in shown]
    return f" {why}: {'; '.join(labels)}." if labels else ""
