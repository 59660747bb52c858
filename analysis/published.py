"""Figures that others published, to stand beside ours; none of them was measured here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A result and where it comes from."""

    what: str
    result: str
    hardware: str
    source: str


FIGURES = (
    Published(
        "DDP on 1, 2, 4 and 8 nodes",
        "efficiency 1, 0.81, 0.65 and 0.46",
        "one NVIDIA T4 each",
        "quoted second-hand; the original was not looked up",
    ),
    Published(
        "DDP on two nodes, near and far apart",
        "117 s and 296 s an epoch",
        "one GPU each",
        "quoted second-hand; the original was not looked up",
    ),
    Published(
        "DDP on one and two nodes",
        "57:32 and 31:18 minutes",
        "one GPU each",
        "quoted second-hand; the original was not looked up",
    ),
    Published(
        "Hivemind on eight GPUs",
        "3.2 times one GPU within a zone, 3.02 times over four continents",
        "NVIDIA T4",
        "Erben, Mayer, Jacobsen: How Can We Train Deep Learning Models Across Clouds and Continents?, VLDB 2024",
    ),
    Published(
        "ResNet-50, data parallel, 2 to 64 GPUs",
        "efficiency 1 down to 0.65–0.80",
        "NVIDIA V100",
        "quoted second-hand; the setup is that of Kindratenko and others: HAL: Computer System for Scalable Deep "
        "Learning, PEARC 2020, whose figures could not be compared",
    ),
)
