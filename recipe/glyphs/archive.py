"""The file of the data set: images and labels of three parts, and a digest that identifies the edition."""

import hashlib
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recipe.errors import InputError
from recipe.glyphs.drawing import CHARACTERS, SIDE
from recipe.glyphs.typefaces import PARTS
from recipe.run_folder import whole_file

FILE = "glyphs.npz"
"""Name of the file in the folder of data sets."""

REFERENCE_DIGEST = "de2fdb2d58407781"
"""Digest of the archive that results from the committed list, with the listed fonts and the Pillow of
`constraints.txt`."""


@dataclass(frozen=True)
class GlyphArchive:
    """All images and labels, by part.

    Args:
        images: for each part uint8 (num_images, SIDE, SIDE), 255 is white.
        labels: for each part uint8 (num_images,), positions in `CHARACTERS`.
    """

    images: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]

    @property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of all arrays: equal on every machine, for equal images only."""
        found = hashlib.sha256()
        for part in PARTS:
            for array in (self.images[part], self.labels[part]):
                found.update(repr(array.shape).encode())
                found.update(np.ascontiguousarray(array))
        return found.hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Writes the file whole or not at all."""
        arrays = {f"{part}_images": self.images[part] for part in PARTS}
        arrays |= {f"{part}_labels": self.labels[part] for part in PARTS}
        with whole_file(path) as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> "GlyphArchive":
        """Reads what `save` wrote.

        Raises:
            InputError: the file does not exist, or holds something else.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                archive = cls(
                    {part: file[f"{part}_images"] for part in PARTS}, {part: file[f"{part}_labels"] for part in PARTS}
                )
        except FileNotFoundError:
            raise InputError(
                f"There is no {path}: make it with `python -m recipe.glyphs --data-dir {path.parent}`, or ask "
                "the run's organiser for the file."
            ) from None
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise _not_an_archive(path, str(error)) from error
        archive._check(path)
        return archive

    def _check(self, path: Path) -> None:
        for part in PARTS:
            images, labels = self.images[part], self.labels[part]
            if images.dtype != np.uint8 or images.shape[1:] != (SIDE, SIDE):
                raise _not_an_archive(path, f"its {part} images are {images.dtype} of {images.shape}")
            if labels.dtype != np.uint8 or labels.shape != images.shape[:1] or not len(labels):
                raise _not_an_archive(path, f"its {part} labels are {labels.dtype} of {labels.shape}")
            if labels.max() >= len(CHARACTERS):
                raise _not_an_archive(path, f"its {part} part has a label {labels.max()}")


def _not_an_archive(path: Path, reason: str) -> InputError:
    return InputError(
        f"{path} is no archive of glyphs ({reason}): delete it, and make it with `python -m recipe.glyphs --data-dir "
        f"{path.parent}`."
    )
