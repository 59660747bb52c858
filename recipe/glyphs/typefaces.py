"""Which typefaces the data set is made of: two committed lists, and where their files are on this machine."""

import csv
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PACKAGES = Path(__file__).with_name("packages.csv")
"""Debian packages: name, the version whose files are listed, and the licence that its `copyright` names."""

TYPEFACES = Path(__file__).with_name("typefaces.csv")

PARTS = ("train", "val", "test")

FONTS_DIR = Path("/usr/share/fonts")
"""Where Debian and Ubuntu put the files of their font packages."""


@dataclass(frozen=True, kw_only=True)
class ListedTypeface:
    """A line of `typefaces.csv`, which `python -m recipe.glyphs.choose` writes."""

    part: Literal["train", "val", "test"]
    """Where all its images belong."""
    family: str
    """Typefaces that resemble each other have the same, and the same part."""
    package: str
    file: str
    """Its path below the folder of fonts."""
    sha256: str
    """First 16 hex digits, of the file."""

    def is_the_same(self, path: Path) -> bool:
        """Whether this file is the one that was listed."""
        return file_digest(path) == self.sha256


def listed_typefaces() -> list[ListedTypeface]:
    """In the order of the list, which is that of the images."""
    with TYPEFACES.open(encoding="utf-8", newline="") as file:
        return [ListedTypeface(**row) for row in csv.DictReader(file)]


def listed_versions() -> dict[str, str]:
    """The version of each package."""
    with PACKAGES.open(encoding="utf-8", newline="") as file:
        return {row["package"]: row["version"] for row in csv.DictReader(file)}


def file_digest(path: Path) -> str:
    """As in the list."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def packages_of(typefaces: Sequence[ListedTypeface]) -> list[str]:
    """Their packages, each once."""
    return sorted({typeface.package for typeface in typefaces})
