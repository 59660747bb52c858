"""Use what was trained: the weights as timm and the Hugging Face hub read them, with a model card, and as ONNX.

    swarm export runs/RUN_ID/NAME --to digits-vit                  # the best checkpoint of a run folder
    swarm export runs/RUN_ID/NAME/checkpoints/last.ckpt --to digits-vit --onnx

It needs neither the swarm nor the images.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from recipe.command_line import arg, exit_status, read_options
from recipe.errors import InputError
from recipe.interrupts import raise_again
from swarm.runtime.imports import quick_imports
from swarm.runtime.log_filters import silence_libraries

CARD = "README.md"


@dataclass(frozen=True)
class ExportOptions:
    """Write the weights of a checkpoint as timm and the Hugging Face hub read them, with a model card."""

    source: tyro.conf.Positional[Annotated[Path, arg("RUN_FOLDER|CHECKPOINT")]]
    """A run folder, such as runs/RUN_ID/NAME, of which the best checkpoint by validation is taken; or a .ckpt file."""
    to: Annotated[Path, arg("FOLDER")]
    """Where model.safetensors, config.json and README.md go. The model is called like this folder."""
    onnx: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write model.onnx as well."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace the files of an earlier export in that folder."""
    name_contributors: Annotated[Path | None, arg("FILE", "nobody is named")] = None
    """Text file with a name in each line: people who told you that they agree to be named, as they want to be named."""
    license: Annotated[str | None, arg("NAME", "none is named")] = None
    """Licence of the weights, as the hub calls it, such as mit or apache-2.0."""
    data_dir: Annotated[Path | None, arg("FOLDER", "classes have numbers")] = None
    """Folder of an imagefolder's images: its class folders give the names of the classes."""


def main(arguments: list[str], say: Callable[[str], None] = print) -> int:
    """Returns the exit status: 0, or 2 for input that cannot work."""
    return exit_status(lambda: _export(read_options(ExportOptions, arguments, "swarm export"), say))


def _export(options: ExportOptions, say: Callable[[str], None]) -> None:
    folder = options.to.expanduser()
    silence_libraries()
    say("Importing torch takes about 10 s …")
    with quick_imports():
        from recipe.data.class_names import class_names
        from recipe.export.model_card import model_card, model_name, read_contributors
        from recipe.export.onnx_file import MODEL, check_onnx_packages, write_onnx
        from recipe.export.run_record import read_record
        from recipe.export.timm_folder import CONFIG, WEIGHTS, write_timm_folder
        from recipe.export.trained import load_trained
    raise_again()  # Ctrl-C leaves nothing half behind
    name = model_name(folder)
    _check_free(folder, options.overwrite)
    contributors = [] if options.name_contributors is None else read_contributors(options.name_contributors)
    if options.onnx:
        check_onnx_packages()
    trained = load_trained(options.source)
    record = None if trained.run_folder is None else read_record(trained.run_folder, trained.step)
    checked = "timm loads it and gives the same logits, bit for bit"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder.parent) as made:
            half = Path(made)
            write_timm_folder(trained, half, class_names(trained.recipe, options.data_dir), options.license)
            if options.onnx:
                difference = write_onnx(trained, half / MODEL)
                checked += f"; ONNX Runtime gives them within {difference:.0e}"
            card = model_card(
                trained,
                record,
                name=name,
                contributors=contributors,
                license_name=options.license,
                has_onnx=options.onnx,
            )
            (half / CARD).write_text(card, encoding="utf-8")
            written = _put_in_place(half, folder, [WEIGHTS, MODEL, f"{MODEL}.data", CARD, CONFIG])
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written ({error.strerror}): name another --to, or make room there."
        ) from error
    say(
        f"Weights of step {trained.step} from {trained.checkpoint} are in {folder}: "
        f"{', '.join(written)}. {checked}.\n"
        f'In Python: timm.create_model("local-dir:{folder}", pretrained=True)'
    )


def _check_free(folder: Path, overwrite: bool) -> None:
    """Raises InputError: something is there that nobody said could go"""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: name a folder with --to.")
    if folder.exists() and any(folder.iterdir()) and not overwrite:
        raise InputError(f"{folder} is not empty: name another --to, or add --overwrite to replace an earlier export.")


def _put_in_place(made: Path, folder: Path, names: list[str]) -> list[str]:
    """Moves the files that were made; one of an earlier export that was not made again would be of other weights.

    Returns:
        names of those that were made
    """
    folder.mkdir(exist_ok=True)
    for name in names:
        if (made / name).exists():
            os.replace(made / name, folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    return [name for name in names if (folder / name).exists()]
