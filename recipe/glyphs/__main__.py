"""Draws the data set `glyphs` with installed fonts; it installs nothing.

python -m recipe.glyphs                         # data/glyphs.npz, where all programs look for it
python -m recipe.glyphs --data-dir /data
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from recipe.command_line import arg, exit_status, read_options
from recipe.errors import InputError
from recipe.glyphs.archive import FILE, REFERENCE_DIGEST, GlyphArchive
from recipe.glyphs.drawing import CHARACTERS, Typeface, Variation
from recipe.glyphs.typefaces import FONTS_DIR, PARTS, ListedTypeface, listed_typefaces, listed_versions, packages_of
from recipe.interrupts import status_of
from recipe.run_folder import make_writable

VARIATIONS = {"train": 2, "val": 1, "test": 1}
"""Number of images of each character; the first one is drawn without variation."""


@dataclass(frozen=True)
class GlyphOptions:
    """Draw 62 characters of each listed typeface, and keep the images in one file."""

    data_dir: Annotated[Path, arg("FOLDER")] = Path("data")
    """Folder of the data set: glyphs.npz is written there."""
    fonts_dir: Annotated[Path, arg("FOLDER")] = FONTS_DIR
    """Folder of the fonts."""


def check_fonts(typefaces: Sequence[ListedTypeface], fonts_dir: Path) -> None:
    """Raises InputError if typefaces are missing; the message has the command that installs them."""
    missing = [typeface for typeface in typefaces if not (fonts_dir / typeface.file).is_file()]
    if missing:
        raise InputError(
            f"{len(missing)} of {len(typefaces)} typefaces are not in {fonts_dir}: install them, as root, with "
            f"`apt-get install --no-install-recommends {' '.join(packages_of(missing))}` (Debian 12 has them all), or "
            f"take {FILE} from the run's organiser."
        )


def other_versions(typefaces: Sequence[ListedTypeface], fonts_dir: Path) -> list[str]:
    """Packages with a file that differs from the listed one."""
    return packages_of([typeface for typeface in typefaces if not typeface.is_the_same(fonts_dir / typeface.file)])


def draw(typefaces: Iterable[ListedTypeface], fonts_dir: Path) -> GlyphArchive:
    """Draw all images, in the order of the list.

    Raises:
        InputError: a font file cannot be drawn.
    """
    images, labels = defaultdict(list), defaultdict(list)
    for listed in typefaces:
        typeface = Typeface(fonts_dir / listed.file)
        for label, character in enumerate(CHARACTERS):
            for number in range(VARIATIONS[listed.part]):
                variation = Variation.of(f"{listed.file}/{character}", number)
                images[listed.part].append(typeface.draw(character, variation))
                labels[listed.part].append(label)
    return GlyphArchive(
        {part: np.stack(images[part]) for part in PARTS}, {part: np.array(labels[part], np.uint8) for part in PARTS}
    )


def summary(typefaces: Sequence[ListedTypeface], archive: GlyphArchive) -> Table:
    """A table of the numbers of families, typefaces and images in each part."""
    table = Table()
    for column in ("part", "families", "typefaces", "images"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part in PARTS:
        own = [typeface for typeface in typefaces if typeface.part == part]
        families = {typeface.family for typeface in own}
        table.add_row(part, str(len(families)), str(len(own)), f"{len(archive.images[part]):,}")
    return table


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns the exit status: 0, 2 for input that cannot work, 130 after Ctrl-C."""

    def run() -> None:
        options = read_options(GlyphOptions, arguments, "python -m recipe.glyphs")
        typefaces = listed_typefaces()
        fonts_dir, path = options.fonts_dir.expanduser(), options.data_dir.expanduser() / FILE
        check_fonts(typefaces, fonts_dir)
        make_writable(path.parent)
        errors = Console(stderr=True, soft_wrap=True, highlight=False)
        versions = listed_versions()
        for package in other_versions(typefaces, fonts_dir):
            errors.print(f"{package} is not the listed version {versions[package]}: its images differ.", markup=False)
        shown = track(typefaces, "Drawing", console=errors, transient=True, disable=not errors.is_terminal)
        archive = draw(shown, fonts_dir)
        archive.save(path)
        Console().print(summary(typefaces, archive))
        print(f"Wrote {path}, {path.stat().st_size / 1e6:.0f} MB. {verdict(archive.digest)}")

    return exit_status(run)


def verdict(digest: str) -> str:
    """A sentence that says whether these are the published images."""
    if digest == REFERENCE_DIGEST:
        return f"Its digest {digest} is the published one."
    return (
        f"Its digest {digest} is not the published {REFERENCE_DIGEST}, because fonts or Pillow have other versions: "
        "all peers of a run need the same file, so hand it to them."
    )


if __name__ == "__main__":
    sys.exit(status_of(main))
