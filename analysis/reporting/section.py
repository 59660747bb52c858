"""A part of a report."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd


@dataclass
class Section:
    """A part of the report; each table and each figure has a title."""

    title: str
    text: list[str] = field(default_factory=list)
    tables: list[tuple[str, pd.DataFrame]] = field(default_factory=list)
    figures: list[tuple[str, Path]] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        """Anchor of links to the section, as GitHub derives it from the title."""
        kept = (letter for letter in self.title.lower() if letter.isalnum() or letter in " -_")
        return "".join(kept).replace(" ", "-")
