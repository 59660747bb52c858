"""The typefaces of the data set: two committed lists, and where their files are on this machine."""

import csv
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PACKAGES = Path(__file__).with_name("packages.csv")
"""List of Debian packages: name, the version whose files are listed, and the licence that its `copyright` names."""

TYPEFACES = Path(__file__).with_name("typefaces.csv")

PARTS = ("train", "val", "test")

FONTS_DIR = Path("/usr/share/fonts")
"""Folder of the files of font packages on Debian and Ubuntu."""


@dataclass(frozen=True, kw_only=True)
class ListedTypeface:
    """A line of `typefaces.csv`, which `python -m recipe.glyphs.choose` writes."""

    part: Literal["train", "val", "test"]
    """The part that all its images belong to."""
    family: str
    """Name of the family. Typefaces that resemble each other are of one family, and a family is in one part."""
    package: str
    file: str
    """Its path below the folder of fonts."""
    sha256: str
    """The first 16 hex digits of the file's SHA-256."""

    def is_the_same(self, path: Path) -> bool:
        """Whether this file is equal to the listed one."""
        return file_digest(path) == self.sha256


def listed_typefaces() -> list[ListedTypeface]:
    """The listed typefaces, in the order of the list, which is also that of the images."""
    with TYPEFACES.open(encoding="utf-8", newline="") as file:
        return [ListedTypeface(**row) for row in csv.DictReader(file)]


def listed_versions() -> dict[str, str]:
    """The listed version of each package."""
    with PACKAGES.open(encoding="utf-8", newline="") as file:
        return {row["package"]: row["version"] for row in csv.DictReader(file)}


def file_digest(path: Path) -> str:
    """The digest of a file, as it is in the list."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def packages_of(typefaces: Sequence[ListedTypeface]) -> list[str]:
    """The packages of these typefaces, each once."""
    return sorted({typeface.package for typeface in typefaces})
