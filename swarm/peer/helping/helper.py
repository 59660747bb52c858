"""What a helper has in place of a trainer's images, micro-batches and metrics."""

from __future__ import annotations

import math
from typing import Any

import lightning as L

from recipe.config import Recipe
from recipe.data.datasets import WITH_DIGEST
from recipe.errors import InputError
from recipe.glyphs.archive import REFERENCE_DIGEST
from recipe.training.callbacks import StepMetrics
from swarm.membership.run_manifest import RunManifest
from swarm.training.batch_size_finder import MicroBatch
from swarm.training.helper import NO_BATCHES, NoBatches

NO_MICRO_BATCH = MicroBatch(0, math.nan, "given")


class NoImages(L.LightningDataModule):
    """No images, and what they would say of themselves.

    Args:
        digest: of the images that those have who train
    """

    num_train_samples = 0

    def __init__(self, digest: str):
        super().__init__()
        self.digest, self.batch_size = digest, 0

    def train_dataloader(self) -> NoBatches:
        """Moments without a micro-batch."""
        return NO_BATCHES


class NoStepMetrics(StepMetrics):
    """A helper has computed nothing that could be logged; `SwarmMetrics` logs what the swarm has."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Nothing."""


def digest_for(manifest: RunManifest, given: str | None) -> str:
    """Of the images of a run, for a helper, which does not see them.

    Args:
        given: on the command line

    Raises:
        InputError: it starts a run whose peers have to have the same images, and nothing says which
    """
    recipe: Recipe = manifest.recipe
    if recipe.dataset not in WITH_DIGEST or manifest.classes:
        return manifest.classes
    if given is None and recipe.dataset == "glyphs":
        return REFERENCE_DIGEST
    if given is None:
        raise InputError(
            "A helper has no images, and this run has to say which its peers have: give --data-digest, which swarm "
            "doctor --check-images --data-dir FOLDER shows on a machine that has them; or start the run there, and let "
            "the helper join."
        )
    return given
