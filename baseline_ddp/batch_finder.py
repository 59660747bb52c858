"""Finds the largest micro-batch that fits into memory, with Lightning's batch-size finder."""

import logging
import tempfile

import lightning as L
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.tuner import Tuner

from recipe.data.peer_data import PeerData
from recipe.model import fewest_samples
from recipe.training.task import ClassificationTask

STEPS_PER_TRIAL = 3


def find_largest_batch(
    task: ClassificationTask, data: PeerData, device: torch.device, precision: str, limit: int
) -> int:
    """Doubles the micro-batch until memory is full, then bisects the interval.

    Every process searches for itself on its own device, before the processes connect their models: Lightning's finder
    works in single processes only. The result holds for a model per process (`single`, `ddp`), apart from DDP's
    buckets. Shards (`fsdp`) need less memory.

    Args:
        task: a task that is used for the search only; its weights stay as they are.
        data: set up; its `batch_size` is changed.
        device: of this process.
        precision: Lightning's name of the number format.
        limit: most samples that a process can use.

    Returns:
        Samples, at most `limit`.
    """
    logging.getLogger("lightning.pytorch.tuner.batch_size_scaling").setLevel(logging.WARNING)
    data.batch_size = fewest = fewest_samples(task.model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=[device.index] if device.type == "cuda" else 1,
            precision=precision,
            plugins=[LightningEnvironment()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            max_steps=STEPS_PER_TRIAL,
            default_root_dir=folder,
        )
        found = Tuner(trainer).scale_batch_size(
            task,
            datamodule=data,
            mode="binsearch",
            steps_per_trial=STEPS_PER_TRIAL,
            init_val=fewest,
            margin=0.0,  # the largest divisor is taken, which is mostly less
            max_val=2 * limit,  # Lightning does not try the highest value itself
        )
    return max(fewest, min(found or fewest, limit))
