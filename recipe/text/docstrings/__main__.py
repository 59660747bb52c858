"""Builds the bundled data set `docstrings` again, from the libraries that it was built from.

python -m recipe.text.docstrings               # says whether it is the bundled one
python -m recipe.text.docstrings --write       # and puts it in its place
"""

import gzip
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recipe.command_line import exit_status, read_options
from recipe.interrupts import status_of
from recipe.text.docstrings.archive import ARCHIVE, bundled, digest_of
from recipe.text.docstrings.extract import PARTS, Docstring, as_csv, extract


@dataclass(frozen=True)
class DocstringOptions:
    """Read the docstrings of four installed libraries, split them by module, and compare them with the bundled ones."""

    write: bool = False
    """Put them in the place of the bundled ones. Peers with other docstrings cannot train together."""


def counts(docstrings: list[Docstring]) -> Iterator[str]:
    """One line for each part: its number of texts, and how many are of each library."""
    for part in PARTS:
        found = [one.library for one in docstrings if one.part == part]
        shares = ", ".join(f"{found.count(library)} of {library}" for library in sorted(set(found)))
        yield f"{part}: {len(found):,} texts ({shares})"


def make(write: bool, archive: Path = ARCHIVE) -> int:
    """Extracts the texts, and compares or writes them.

    Returns:
        The exit status: 0, or 1 if the texts differ from the bundled ones and are not written.

    Raises:
        InputError: a library is missing, or has another version.
    """
    docstrings = extract()
    content = as_csv(docstrings)
    print("\n".join(counts(docstrings)))
    if write:
        archive.write_bytes(gzip.compress(content, compresslevel=9, mtime=0))
        print(f"{archive}, digest {digest_of(content)}")
        return 0
    is_bundled = content == bundled(archive)
    print(f"Digest {digest_of(content)}: {'the bundled one' if is_bundled else 'not the bundled one'}.")
    return 0 if is_bundled else 1


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    prog = "python -m recipe.text.docstrings"
    return exit_status(lambda: make(read_options(DocstringOptions, arguments, prog).write))


if __name__ == "__main__":
    sys.exit(status_of(main))
