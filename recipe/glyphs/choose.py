"""Writes the list of typefaces anew, from installed packages. For maintainers: the data set changes with the list.

    python -m recipe.glyphs.choose

It reads the names of the packages from `packages.csv`. It leaves out typefaces that lack a character, that have two
equal or many similar characters (such as capitals in place of small letters), or that resemble a kept one. It also
leaves out pictures: a nearest-neighbour search among other families recognises less than a fifth of their characters. A
family is all that comes from one package, and all that resembles these.
"""

import csv
import hashlib
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from scipy.sparse.csgraph import connected_components

from recipe.glyphs.drawing import CHARACTERS, SIDE, Typeface, UnusableTypeface
from recipe.glyphs.typefaces import FONTS_DIR, PACKAGES, TYPEFACES, ListedTypeface, file_digest
from recipe.interrupts import status_of

SIMILAR = 0.97
"""Cosine of two images, or of all images of two typefaces, above which they count as equal."""

MOST_ALIKE = 5
"""Largest number of pairs of similar characters in a typeface, such as l and I."""

PICTURES = 0.2
"""Share of recognised characters below which a typeface counts as pictures and not as letters."""

HELD_OUT = 0.1
"""Share of the typefaces in the validation part, and in the test part."""

LARGEST_HELD_OUT = 6
"""Largest family that is held out, in typefaces. Larger ones are for training, so that many families are held out."""

MANY_FAMILIES = "fonts-aenigma"
"""A package of hundreds of families by one author. Files whose names begin alike are taken for one family."""
_BEGINNING = 5


@dataclass
class Candidate:
    """A typeface that could be listed."""

    package: str
    path: Path
    images: np.ndarray

    @property
    def origin(self) -> str:
        """Name of the family, as far as package and file name tell it."""
        return f"aenigma-{self.path.stem[:_BEGINNING].lower()}" if self.package == MANY_FAMILIES else self.package


def candidates(packages: Sequence[str]) -> Iterator[Candidate]:
    """The complete typefaces of these packages, in the order of their paths."""
    for package in packages:
        files = subprocess.run(["dpkg-query", "-L", package], capture_output=True, text=True, check=True).stdout
        for path in sorted(Path(line) for line in files.splitlines() if line.lower().endswith((".ttf", ".otf"))):
            try:
                typeface = Typeface(path)
                if path.is_relative_to(FONTS_DIR) and typeface.is_complete:
                    yield Candidate(package, path, typeface.images)
            except UnusableTypeface:
                continue


def vectors(found: Sequence[Candidate]) -> np.ndarray:
    """The images as vectors, shape (typeface, character, pixel), at half the resolution."""
    images = np.stack([candidate.images for candidate in found]).astype(np.float32)
    halved = images.reshape(len(found), len(CHARACTERS), SIDE // 2, 2, SIDE // 2, 2).mean((3, 5))
    return halved.reshape(len(found), len(CHARACTERS), -1)


def similarities(images: np.ndarray) -> np.ndarray:
    """Cosine of each pair of typefaces."""
    whole = images.reshape(len(images), -1)
    whole = whole / np.linalg.norm(whole, axis=1, keepdims=True)
    return whole @ whole.T


def families(found: Sequence[Candidate], similarity: np.ndarray) -> np.ndarray:
    """A number for each typeface, equal within a family.

    Typefaces of one origin are in one family, and so are two that resemble each other, directly or through others.
    """
    origins = np.array([candidate.origin for candidate in found])
    return connected_components((origins[:, None] == origins[None]) | (similarity > SIMILAR), directed=False)[1]


def recognised(images: np.ndarray, family: np.ndarray) -> np.ndarray:
    """Share of each typeface's characters whose nearest image in other families is of the same character."""
    labels = np.arange(len(CHARACTERS))
    everything, squares = images.reshape(-1, images.shape[-1]), (images**2).sum(-1).reshape(-1)
    shares = np.empty(len(images))
    for place, own in enumerate(images):
        distances = squares - 2 * own @ everything.T
        distances[:, np.repeat(family == family[place], len(labels))] = np.inf
        shares[place] = (distances.argmin(1) % len(labels) == labels).mean()
    return shares


def num_alike(images: np.ndarray) -> np.ndarray:
    """Pairs of similar characters within each typeface."""
    units = images / np.linalg.norm(images, axis=2, keepdims=True)
    pairs = units @ units.transpose(0, 2, 1) > SIMILAR
    return np.triu(pairs, 1).sum((1, 2))


def without_repetitions(similarity: np.ndarray) -> list[int]:
    """Positions of the typefaces to keep: of those that resemble each other, the first one."""
    kept: list[int] = []
    for place in range(len(similarity)):
        if not (similarity[place, kept] > SIMILAR).any():
            kept.append(place)
    return kept


def split(members: dict[str, list[int]]) -> dict[str, str]:
    """The part of each family. Families are assigned in an order that depends on nothing but their names."""
    wanted = HELD_OUT * sum(map(len, members.values()))
    parts, counts = {}, {"val": 0, "test": 0}
    for name in sorted(members, key=lambda name: hashlib.sha256(name.encode()).digest()):
        part = min(counts, key=counts.get)
        fits = len(members[name]) <= LARGEST_HELD_OUT and counts[part] + len(members[name]) <= wanted
        parts[name] = part if fits else "train"
        counts[part] += len(members[name]) * fits
    return parts


def main() -> int:
    """Writes both lists."""
    with PACKAGES.open(encoding="utf-8", newline="") as file:
        packages = {row["package"]: row for row in csv.DictReader(file)}
    complete = list(candidates(sorted(packages)))
    distinct = num_alike(vectors(complete)) <= MOST_ALIKE
    found = [candidate for candidate, is_distinct in zip(complete, distinct, strict=True) if is_distinct]
    images = vectors(found)
    similarity = similarities(images)
    family = families(found, similarity)
    readable = recognised(images, family) >= PICTURES
    kept = [place for place in without_repetitions(similarity) if readable[place]]
    members = defaultdict(list)
    for place in kept:
        members[found[np.flatnonzero(family == family[place])[0]].origin].append(place)
    parts = split(members)
    rows = [
        ListedTypeface(
            part=parts[name],
            family=name,
            package=found[place].package,
            file=str(found[place].path.relative_to(FONTS_DIR)),
            sha256=file_digest(found[place].path),
        )
        for name, places in members.items()
        for place in places
    ]
    _write(TYPEFACES, [asdict(row) for row in sorted(rows, key=lambda row: row.file)])
    used = {row.package for row in rows}
    for package, row in packages.items():
        query = ["dpkg-query", "-W", "-f", "${Version}", package]
        row["version"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    _write(PACKAGES, [packages[package] for package in sorted(used)])
    print(f"{len(complete)} typefaces are complete, {len(rows)} of {len(members)} families are listed.")
    return 0


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(status_of(main))
