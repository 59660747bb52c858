"""The bundled file: a gzipped CSV with the columns part, library and text."""

import csv
import gzip
import hashlib
import io
import zlib
from pathlib import Path

from recipe.errors import InputError

ARCHIVE = Path(__file__).parent / "docstrings.csv.gz"

REFERENCE_DIGEST = "62052f1eb71948d0"
"""Digest of the bundled texts, which all peers of a run must share."""


def digest_of(content: bytes) -> str:
    """The first 16 hex digits of the SHA-256 of the CSV."""
    return hashlib.sha256(content).hexdigest()[:16]


def bundled(archive: Path = ARCHIVE) -> bytes:
    """The CSV in an archive, uncompressed.

    Raises:
        InputError: the file is missing or damaged.
    """
    try:
        return gzip.decompress(archive.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{archive} cannot be read ({error}): install swarm-vit again.") from error


def read_rows() -> list[tuple[str, str, str]]:
    """(part, library, text) of each bundled docstring.

    Raises:
        InputError: the file is missing, damaged, or not the published one.
    """
    content = bundled()
    if digest_of(content) != REFERENCE_DIGEST:
        raise InputError(f"{ARCHIVE} is not the published file: install swarm-vit again.")
    return [(part, library, text) for part, library, text in csv.reader(io.StringIO(content.decode()))]
