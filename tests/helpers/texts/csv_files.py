"""Texts in the form of AG News."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path


def write_csv(path: Path, rows: Iterable[Sequence[str]]) -> None:
    """Write one row for each text: its class, and the fields of the text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
