"""A folder of images in which some files cannot be read. They are skipped up to a limit, and each is logged once."""

import logging
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader

from recipe.errors import InputError, first_line

LIMIT_FRACTION, LIMIT_LEAST, LIMIT_MOST = 0.01, 10, 100
"""How many files of a folder may be damaged: 1 % of them, but 10 in a small folder, and never more than 100."""

logger = logging.getLogger(__name__)


class DamagedImage(InputError):  # noqa: N818 (reads as what happened)
    """A file that holds no image or only a part of one.

    Args:
        path: the file.
        reason: message of the decoder.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} is no readable image ({reason}): repair or remove the file.")
        self.reason = reason


class ImagesByClass(ImageFolder):
    """torchvision's `ImageFolder`, with the next readable file in place of each one that cannot be read.

    So all peers with the same files see the same samples. The processes of a loader share what they find with the
    process that made them. That process logs it, and ends the training if there is too much: see `report`.

    Args:
        folder: holds a folder of images for each class.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, loader=open_image)
        self._is_damaged = multiprocessing.RawArray("B", len(self.samples))
        self._reported: set[int] = set()

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        """Names of the class folders, and their labels.

        Raises:
            InputError: a name is not in UTF-8, as in an old archive. It could be neither compared nor shown everywhere.
        """
        names, labels = super().find_classes(directory)
        for name in names:
            if name != name.encode(errors="ignore").decode():
                raise InputError(f"The name of a class folder in {directory} is not in UTF-8 ({name!a}): rename it.")
        return names, labels

    @property
    def limit(self) -> int:
        """Number of damaged files that are skipped; one more ends the training."""
        share = int(LIMIT_FRACTION * len(self))
        return min(max(LIMIT_LEAST, min(share, LIMIT_MOST)), len(self) - 1)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """(PIL image, class) of the file, or of the next one that can be read.

        If none of the next `limit` files can be read, the image is black. `report` then raises before it is trained on.
        """
        for place in range(index, index + self.limit + 1):
            try:
                return super().__getitem__(place % len(self))
            except DamagedImage:
                self._is_damaged[place % len(self)] = 1
        return Image.new("RGB", (1, 1)), self.targets[index]

    def is_damaged(self, index: int) -> bool:
        """Whether this file could not be read when it was last asked for, so that another one stood in for it."""
        return bool(self._is_damaged[index])

    def report(self) -> None:
        """Logs the damaged files that were found since the last report.

        Raises:
            InputError: more than `limit` files are damaged.
        """
        marks = np.frombuffer(self._is_damaged, np.uint8)
        if np.count_nonzero(marks) == len(self._reported):
            return
        found = np.flatnonzero(marks).tolist()
        for index in found:
            if index not in self._reported:
                self._reported.add(index)
                path, _ = self.samples[index]
                if len(self._reported) > self.limit:
                    raise InputError(
                        f"{len(found)} of {len(self):,} images in {self.root} cannot be read, such as {path} "
                        f"({damage(path)}): repair or remove them; `swarm doctor --data-dir "
                        f"{Path(self.root).parent} --check-images` names them all."
                    )
                count = f"{len(self._reported)} of {len(self):,}, at most {self.limit}"
                logger.warning(f"{path} is no readable image ({damage(path)}) and is skipped ({count}).")


def damage(path: str) -> str:
    """Why a file is not a readable image; empty if it is one."""
    try:
        open_image(path)
    except DamagedImage as error:
        return error.reason
    return ""


def open_image(path: str) -> Any:
    """A PIL image in RGB.

    Raises:
        DamagedImage: the file is no image, is cut off, or cannot be read.
    """
    try:
        return default_loader(path)
    except MemoryError:
        raise
    except Exception as error:  # the decoder of each format has its own errors
        raise DamagedImage(path, first_line(error)) from error
