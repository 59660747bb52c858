"""The parts into which every data set is split."""

from dataclasses import dataclass

from torch.utils.data import Dataset


@dataclass(frozen=True)
class Splits:
    """The parts of a data set; what a sample is depends on the task. Not every data set has a test part."""

    train: Dataset
    val: Dataset
    test: Dataset | None
    digest: str = ""
    """Of what has to be the same on all peers of a run: names of classes, or data that a command has made; empty where
    there is only one such data set."""
