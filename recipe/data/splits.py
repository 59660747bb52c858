"""The parts into which every data set is split."""

from dataclasses import dataclass

from torch.utils.data import Dataset


@dataclass(frozen=True)
class Splits:
    """The parts of a data set. What a sample is depends on the task. Not every data set has a test part."""

    train: Dataset
    val: Dataset
    test: Dataset | None
    digest: str = ""
    """Digest of what all peers of a run must share: names of classes, or data that a command has made. Empty if only
    one such data set exists."""
