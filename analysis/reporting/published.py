"""Figures that others have published, for comparison with ours; none of them was measured here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from analysis.campaigns.systems import SYSTEMS
from analysis.reporting.results import Experiment, interval, kept


@dataclass(frozen=True)
class Published:
    """A published result and its source."""

    what: str
    result: str
    hardware: str
    source: str
    here: Callable[[Sequence[Experiment]], str] = lambda _: "–"
    """Makes the text on the nearest result among our own experiments."""


def efficiency(experiments: Sequence[Experiment]) -> str:
    """Efficiency of accumulating DDP: its speed over that of one peer times the number of peers."""
    found = []
    for experiment in experiments:
        rates = experiment.summary("samples_per_second").set_index(["system", experiment.axis])["mean"]
        if experiment.axis == "peers" and ("ddp", 1) in rates:
            peers = sorted(rates["ddp"].index)
            shares = ", ".join(f"{rates['ddp', number] / (number * rates['ddp', 1]):.2f}" for number in peers)
            found.append(f"{experiment.name}: {shares} on {', '.join(map(str, peers))} peers")
    return "; ".join(found) or "–"


def distance(experiments: Sequence[Experiment]) -> str:
    """Share of its speed within a region that each system keeps when its peers are on four continents."""
    found = []
    for experiment in experiments:
        if experiment.axis == "topology" and "region" in set(experiment.valid["topology"]):
            shares = kept(experiment, "region")
            said = [f"{SYSTEMS[system].label} {interval(values)[0]:.2f}" for (system, _), values in shares.items()]
            if said:
                found.append(f"{experiment.name}, far over near: {', '.join(said)}")
    return "; ".join(found) or "–"


FIGURES = (
    Published(
        "DDP on 1, 2, 4 and 8 nodes",
        "efficiency 1, 0.81, 0.65 and 0.46",
        "one NVIDIA T4 each",
        "given to this project without a source; searched for, and not found",
        efficiency,
    ),
    Published(
        "DDP on two nodes, near and far apart",
        "117 s and 296 s an epoch",
        "one GPU each",
        "given to this project without a source; searched for, and not found",
        distance,
    ),
    Published(
        "DDP on one and two nodes",
        "57:32 and 31:18 minutes",
        "one GPU each",
        "given to this project without a source; searched for, and not found",
    ),
    Published(
        "Hivemind on eight GPUs",
        "3.2 times one GPU within a zone, 3.02 times over four continents",
        "NVIDIA T4",
        "Erben, Mayer, Jacobsen: How Can We Train Deep Learning Models Across Clouds and Continents?, VLDB 2024",
        distance,
    ),
    Published(
        "ResNet-50, data parallel, 2 to 64 GPUs",
        "efficiency 1 down to 0.65–0.80",
        "NVIDIA V100",
        "given to this project without a source; the setup is that of Kindratenko and others: HAL: Computer System for "
        "Scalable Deep Learning, PEARC 2020, whose figures could not be compared",
    ),
)
