"""Opens the recipe's texts, split into training, validation and test parts that are equal on every machine."""

import csv
import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from filelock import FileLock
from torch.utils.data import Dataset
from torchvision.datasets.utils import check_integrity, check_md5, download_url

from recipe.config import Recipe
from recipe.data.splits import Splits
from recipe.errors import InputError
from recipe.text.docstrings.archive import REFERENCE_DIGEST, read_rows
from recipe.text.docstrings.extract import PARTS

AG_NEWS_URL = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
AG_NEWS_MD5 = {"train.csv": "b1a00f826fdfbd249f79597b59e1dc12", "test.csv": "d52ea96a97a2d943681189a97654912d"}
"""The files of Zhang et al. 2015, "Character-level convolutional networks for text classification"."""

VALIDATION_SHARE = 20
"""Without a `val.csv`, every 20th training text of each class is held out for validation."""

MANY_LINES = 100
"""A row of this many lines is logged as a warning. Two quotation marks of different rows turn all that lies between
them into one text."""

csv.field_size_limit(2**20)

logger = logging.getLogger(__name__)


class Texts(Dataset):
    """Texts and their classes, in memory.

    Args:
        texts: the texts of one part.
        labels: int64 tensor (num_texts,).
    """

    def __init__(self, texts: Sequence[str], labels: torch.Tensor) -> None:
        self.texts, self.labels = texts, labels

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[str, torch.Tensor]:
        return self.texts[index], self.labels[index]


def prepare(recipe: Recipe, data_dir: Path) -> None:
    """Downloads what can be downloaded and is missing; peers on one machine wait for each other.

    Where nothing is missing, nothing is written: the folder may be read-only.

    Raises:
        InputError: the folder cannot be written, or the download failed.
    """
    if recipe.dataset != "ag-news":
        return
    try:
        if all(check_integrity(_ag_news_folder(data_dir) / name, md5) for name, md5 in AG_NEWS_MD5.items()):
            return
        data_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(data_dir / ".download.lock"):
            for name, md5 in AG_NEWS_MD5.items():
                download_url(AG_NEWS_URL + name, str(_ag_news_folder(data_dir)), name, md5)
    except Exception as error:  # urllib and torchvision each have their own errors
        raise InputError(
            f"AG News cannot be downloaded into {_ag_news_folder(data_dir)} ({type(error).__name__}: {error}): connect "
            f"this machine to the network, or put train.csv and test.csv from {AG_NEWS_URL} into that folder."
        ) from error


def open_splits(recipe: Recipe, data_dir: Path) -> Splits:
    """Opens the data set; nothing is downloaded.

    Raises:
        InputError: the files are missing, damaged, or have another number of classes than the recipe.
    """
    opened = {"docstrings": _docstrings, "ag-news": _ag_news, "csv": _own_files}
    return opened[recipe.dataset](recipe, data_dir)


def _docstrings(_: Recipe, __: Path) -> Splits:
    """The bundled docstrings of four libraries. All docstrings of a module are in one part: see
    `recipe.text.docstrings`."""
    rows = read_rows()
    classes = {library: label for label, library in enumerate(sorted({library for _, library, _ in rows}))}
    parts = (_texts([(classes[library], text) for part, library, text in rows if part == wanted]) for wanted in PARTS)
    return Splits(*parts, digest=REFERENCE_DIGEST)


def _ag_news(_: Recipe, data_dir: Path) -> Splits:
    """120,000 news in four classes, every 20th of which is held out for validation; the official 7,600 are the test
    part."""
    folder = _ag_news_folder(data_dir)
    for name, md5 in AG_NEWS_MD5.items():
        if (folder / name).is_file() and not check_md5(folder / name, md5):
            raise InputError(
                f"{folder / name} has the wrong checksum, so it is damaged or not the published file: delete it, and "
                f"connect this machine to the network or put the file from {AG_NEWS_URL} there."
            )
    train, test = (_read(folder / name, strict=False) for name in ("train.csv", "test.csv"))
    kept, held_out = _divided(train, _every_20th(range(len(train))))  # the published order is a random one
    return Splits(*(_texts([(int(label) - 1, text) for label, text in part]) for part in (kept, held_out, test)))


def _own_files(recipe: Recipe, data_dir: Path) -> Splits:
    """The user's `train.csv`, and `val.csv` and `test.csv` if they exist: a row is the class, then one or more
    texts."""
    train = _read(data_dir / "train.csv")
    names = sorted({label for label, _ in train})
    if len(names) != recipe.num_classes:
        found = f"{data_dir / 'train.csv'} has {len(names)} classes and the recipe {recipe.num_classes}"
        header, *others = (label for label, _ in train)
        if header not in others:
            raise InputError(
                f"{found}, and its first row is the only one of its class, {header[:60]!r}: delete that row if it is a "
                f"header, or set --num-classes {len(names)}."
            )
        raise InputError(f"{found}: set --num-classes {len(names)}, or name another --data-dir.")
    if (data_dir / "val.csv").exists():
        kept, held_out = train, _read(data_dir / "val.csv")
    else:
        kept, held_out = _divided(train, _of_each_class(train))
    if not held_out:
        raise InputError(
            f"{data_dir / 'train.csv'} has one row of each class, and none can be held out for validation: add rows, "
            "or a val.csv."
        )
    test = _read(data_dir / "test.csv") if (data_dir / "test.csv").exists() else None
    for name, part in (("val.csv", held_out), ("test.csv", test or [])):
        if unknown := sorted({label for label, _ in part} - set(names)):
            raise InputError(
                f"{data_dir / name} has the class {unknown[0][:60]!r}, which train.csv has not: make the names equal."
            )
    places = {name: place for place, name in enumerate(names)}
    kept, held_out, test = (
        part and _texts([(places[label], text) for label, text in part]) for part in (kept, held_out, test)
    )
    return Splits(kept, held_out, test, hashlib.sha256("/".join(names).encode()).hexdigest()[:16])


def _ag_news_folder(data_dir: Path) -> Path:
    return data_dir / "ag_news_csv"


def _every_20th(places: Sequence[int]) -> Sequence[int]:
    return places[VALIDATION_SHARE - 1 :: VALIDATION_SHARE]


def _of_each_class(rows: list[tuple[str, str]]) -> list[int]:
    """Places of the rows held out for validation.

    Of each class every 20th row is held out, or its last one where it has fewer than 20, but never its only one. So the
    classes have nearly equal shares in both parts, whatever the order of the rows is.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for place, (label, _) in enumerate(rows):
        places[label].append(place)
    return [place for own in places.values() for place in _every_20th(own) or own[1:][-1:]]


def _divided(rows: list[tuple[str, str]], places: Sequence[int]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The rows to train on, and the rows at the given places, which are held out."""
    chosen = set(places)
    kept = [row for place, row in enumerate(rows) if place not in chosen]
    return kept, [row for place, row in enumerate(rows) if place in chosen]


def _read(path: Path, strict: bool = True) -> list[tuple[str, str]]:
    """(class, text) of each row; several columns of text are joined with spaces.

    Args:
        strict: whether a quoted text must have its quotation marks doubled and nothing after the closing one. Without
            this check, a mark that is never closed makes one text of all rows after it.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # Excel writes a byte order mark
            rows = [(row[0], " ".join(row[1:]).replace("\\", " ")) for row in _rows(file, strict) if row]
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}): name a --data-dir that has it, with the class and a text in "
            "each row."
        ) from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} is not a CSV file in UTF-8 ({error}): write the class and a text in each row. In a quoted text, "
            "double each quotation mark, and write nothing after the closing one."
        ) from error
    if not rows or not all(label and text.strip() for label, text in rows):
        raise InputError(f"{path} has no rows, or one without a class or a text: write both in each row.")
    return rows


def _rows(file: TextIO, strict: bool) -> Iterator[list[str]]:
    """The rows of a file; csv.Error names the line in which the row begins. An open quotation mark is far from the
    end."""
    reader, line = csv.reader(file, strict=strict), 1
    try:
        for row in reader:
            if strict and (num_lines := reader.line_num + 1 - line) >= MANY_LINES:
                where = f"{file.name}: the row that begins in line {line:,} has {num_lines:,} lines"
                logger.warning(f"{where}. Is a quotation mark missing?")
            yield row
            line = reader.line_num + 1
    except csv.Error as error:
        raise csv.Error(f"{error}, in the row that begins in line {line:,}") from error


def _texts(rows: list[tuple[int, str]]) -> Texts:
    return Texts([text for _, text in rows], torch.from_numpy(np.array([label for label, _ in rows], dtype=np.int64)))
