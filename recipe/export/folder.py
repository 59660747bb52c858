"""Exports a model into one folder: all files are made and checked in a temporary folder before any is moved there."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from recipe.data.class_names import class_names
from recipe.errors import InputError
from recipe.export.model_card import model_card, model_name
from recipe.export.onnx_file import MODEL, check_onnx_packages, write_onnx
from recipe.export.run_record import read_record
from recipe.export.timm_folder import CONFIG, WEIGHTS, write_timm_folder
from recipe.export.trained import Trained, load_trained

CARD = "README.md"
FILES = (WEIGHTS, MODEL, f"{MODEL}.data", CARD, CONFIG)
"""All files of an export, in the order in which they are put in place: without `CONFIG`, no program loads the others.
`MODEL` is written only if it was asked for, and its `.data` only for weights of 2 GB and more."""


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    Args:
        trained: the model that was exported.
        files: names of the files.
        onnx_difference: largest difference of ONNX Runtime's logits from torch's; None without an ONNX file.
    """

    trained: Trained
    files: tuple[str, ...]
    onnx_difference: float | None


def export_model(
    source: Path,
    folder: Path,
    *,
    onnx: bool = False,
    overwrite: bool = False,
    contributors: Sequence[str] = (),
    license_name: str | None = None,
    data_dir: Path | None = None,
) -> Exported:
    """Writes the weights of a run folder or a checkpoint, and checks that they can be loaded.

    Args:
        source: a run folder, or a checkpoint file.
        folder: the target; the model gets its name.
        onnx: write an ONNX file as well.
        overwrite: replace an earlier export; other files in the folder stay.
        contributors: names of the contributors who agreed to be named.
        license_name: name of the licence on the hub.
        data_dir: folder of images whose class folders give the names of the classes; None if there is none.

    Raises:
        InputError: something is missing or in the way, or another program does not load what was written.
    """
    name = model_name(folder)
    _check_free(folder, overwrite)
    if onnx:
        check_onnx_packages()
    trained = load_trained(source)
    names = class_names(trained.recipe, data_dir)
    record = None if trained.run_folder is None else read_record(trained.run_folder, trained.step)
    card = model_card(trained, record, name=name, contributors=contributors, license_name=license_name, has_onnx=onnx)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder.parent) as made:
            half = Path(made)
            write_timm_folder(trained, half, names, license_name)
            difference = write_onnx(trained, half / MODEL) if onnx else None
            (half / CARD).write_text(card, encoding="utf-8")
            return Exported(trained, _put_in_place(half, folder), difference)
    except (OSError, SafetensorError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{folder} cannot be written ({said}): name another --to, or make room there.") from error


def _check_free(folder: Path, overwrite: bool) -> None:
    """Raises InputError if the target is a file, or holds something and `overwrite` is not set."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: name a folder with --to.")
    if folder.exists() and any(folder.iterdir()) and not overwrite:
        raise InputError(f"{folder} is not empty: name another --to, or add --overwrite to replace an earlier export.")


def _put_in_place(made: Path, folder: Path) -> tuple[str, ...]:
    """Moves the new files into the folder. The files of an earlier export are deleted before.

    So a kill in between leaves a folder that lacks files, and never new weights beside an old config or card.
    """
    folder.mkdir(exist_ok=True)
    for name in reversed(FILES):
        (folder / name).unlink(missing_ok=True)
    files = tuple(name for name in FILES if (made / name).exists())
    for name in files:
        os.replace(made / name, folder / name)
    return files
