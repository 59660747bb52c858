"""Use the weights of a run: write them as timm and the Hugging Face hub read them, with a model card, and as ONNX.

    swarm export runs/RUN_ID/NAME --to digits-vit                  # the best checkpoint of a run folder
    swarm export runs/RUN_ID/NAME/checkpoints/last.ckpt --to digits-vit --onnx

It needs neither the swarm nor the images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from recipe.command_line import arg, exit_status, read_options
from recipe.interrupts import raise_again
from swarm.runtime.imports import quick_imports
from swarm.runtime.log_filters import silence_libraries


@dataclass(frozen=True)
class ExportOptions:
    """Write the weights of a checkpoint as timm and the Hugging Face hub read them, with a model card."""

    source: tyro.conf.Positional[Annotated[Path, arg("RUN_FOLDER|CHECKPOINT")]]
    """A run folder, such as runs/RUN_ID/NAME, whose best checkpoint by validation is taken; or a .ckpt file."""
    to: Annotated[Path, arg("FOLDER")]
    """Folder for model.safetensors, config.json and README.md. The model gets the name of this folder."""
    onnx: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Also write model.onnx."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace the files of an earlier export in that folder."""
    name_contributors: Annotated[Path | None, arg("FILE", "no one is named")] = None
    """Text file with a name in each line: people that have agreed to be named, as they want to be named."""
    license: Annotated[str | None, arg("NAME", "none is named")] = None
    """Licence of the weights, as the hub calls it, such as mit or apache-2.0."""
    data_dir: Annotated[Path | None, arg("FOLDER", "classes have numbers")] = None
    """Folder of an imagefolder's images: its class folders give the names of the classes."""


def main(arguments: list[str], say: Callable[[str], None] = print) -> int:
    """Returns the exit status: 0, or 2 for input that cannot work."""
    return exit_status(lambda: _export(read_options(ExportOptions, arguments, "swarm export"), say))


def _export(options: ExportOptions, say: Callable[[str], None]) -> None:
    silence_libraries()
    say("Importing torch takes about 10 s …")
    with quick_imports():
        from recipe.export.folder import export_model
        from recipe.export.model_card import read_contributors
    raise_again()  # Ctrl-C leaves no half-written export behind
    folder = options.to.expanduser()
    exported = export_model(
        options.source,
        folder,
        onnx=options.onnx,
        overwrite=options.overwrite,
        contributors=() if options.name_contributors is None else read_contributors(options.name_contributors),
        license_name=options.license,
        data_dir=options.data_dir,
    )
    trained, difference = exported.trained, exported.onnx_difference
    runtime = "" if difference is None else f"; ONNX Runtime gives them within {difference:.0e}"
    say(
        f"Weights of step {trained.step} from {trained.checkpoint} are in {folder}: {', '.join(exported.files)}. timm "
        f"loads them and gives the same logits, bit for bit{runtime}.\n"
        f'In Python: timm.create_model("local-dir:{folder}", pretrained=True)'
    )
