"""What a helper has in place of a trainer's data, micro-batches and metrics."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L

from recipe.config import Recipe
from recipe.data.datasets import ONE_EDITION
from recipe.errors import InputError
from recipe.glyphs.archive import REFERENCE_DIGEST
from recipe.registry import build_data
from recipe.training.callbacks import StepMetrics
from swarm.membership.run_manifest import RunManifest
from swarm.training.helper import NO_BATCHES, NoBatches
from swarm.training.micro_batch.finder import MicroBatch

NO_MICRO_BATCH = MicroBatch(0, math.nan, "given")


class NoData(L.LightningDataModule):
    """Stands in for the data of a helper, which has none.

    Args:
        recipe: of the run
        digest: of the data that the training peers have
    """

    num_train_samples = 0

    def __init__(self, recipe: Recipe, digest: str):
        super().__init__()
        self.recipe, self.digest, self.batch_size = recipe, digest, 0

    def train_dataloader(self) -> NoBatches:
        """Return what Lightning draws in place of micro-batches, without an end."""
        return NO_BATCHES


class NoStepMetrics(StepMetrics):
    """Logs nothing, since a helper computes nothing; `SwarmMetrics` logs what the swarm has computed."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Do nothing."""


def digest_for(manifest: RunManifest, data_dir: Path, given: str | None) -> str:
    """Return the digest of the data of a run, for a helper, which does not train on them.

    Args:
        manifest: of the run
        data_dir: where the data are, if the helper has them all the same
        given: the digest on the command line

    Raises:
        InputError: the helper starts a run in which all peers need the same data, and nothing says which
    """
    recipe: Recipe = manifest.recipe
    if manifest.classes or recipe.dataset in ONE_EDITION:
        return manifest.classes
    if given is not None:
        return given
    data = build_data(recipe, data_dir, batch_size=1)
    try:
        data.setup("fit")
    except InputError as error:
        if recipe.dataset == "glyphs":
            return REFERENCE_DIGEST
        raise InputError(
            "A helper needs no data, but one that starts a run has to say which data its peers have: give their "
            "--data-digest (swarm doctor --check-images shows that of a folder of images), or start the run where they "
            "are and let the helper join."
        ) from error
    return data.digest
