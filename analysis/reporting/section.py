"""A part of a report."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd


@dataclass
class Section:
    """A part of the report; each table has a title, and each figure a caption, whose text before a colon is its title.

    A section on an experiment has its `name`, by which tables and pictures of all experiments call it.
    """

    title: str
    text: list[str] = field(default_factory=list)
    tables: list[tuple[str, pd.DataFrame]] = field(default_factory=list)
    figures: list[tuple[str, Path]] = field(default_factory=list)
    name: str = ""

    @property
    def anchor(self) -> str:
        """Anchor of links to the section, as GitHub derives it from the title."""
        kept = (letter for letter in self.title.lower() if letter.isalnum() or letter in " -_")
        return "".join(kept).replace(" ", "-")
