"""Recomputes micro-batches: all randomness in one follows from (seed, identity, position).

The order of a peer's samples and their augmentation already follow from these three (`recipe.data`). This module also
seeds the generators from which a model draws while it computes (dropout, stochastic depth), anew for each micro-batch.
"""

import contextlib
import copy
import platform
from collections.abc import Iterator

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import nn

from recipe.data.peer_data import PeerData
from recipe.data.sampler import stable_seed
from recipe.drop_path import PortableDropPath
from recipe.registry import OWN_DATA
from recipe.training.pacing import computes_all
from recipe.training.task import Batch, ClassificationTask


class Replay:
    """Recomputes micro-batches on one peer, whose trainer has this task and these data.

    Args:
        task: the task; its model draws from torch's global generators only.
        data: the data, in this peer's order.
    """

    def __init__(self, task: ClassificationTask, data: PeerData) -> None:
        self._task, self._data = task, data

    @property
    def is_shared(self) -> bool:
        """Whether all peers that train this recipe have the same samples."""
        return self._data.recipe.dataset not in OWN_DATA

    @property
    def is_mixed(self) -> bool:
        """Whether the recipe computes with bfloat16 on devices that can."""
        return self._data.recipe.precision != "32"

    @property
    def kind(self) -> str:
        """The kind of device, if it decides which elements dropout zeroes; else empty.

        Even two kinds of GPUs draw different numbers from one seed.
        """
        device = self._task.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        return f"{device.type} {name}"[:64] if self._has_dropout else ""

    @property
    def _has_dropout(self) -> bool:
        return any(isinstance(module, nn.Dropout) and module.p > 0 for module in self._task.modules())

    @property
    def has_slices(self) -> bool:
        """Whether a micro-batch gives the same result when it is computed in slices.

        Dropout draws other numbers for a slice, and BatchNorm sees other samples.
        """
        normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self._task.modules())
        return not (self._has_dropout or normed) and computes_all()

    @property
    def micro_batch(self) -> int:
        """Samples of the micro-batches that this peer computes."""
        return self._data.batch_size

    @property
    def identity(self) -> str:
        """This peer's identity in the order of samples."""
        return self._data.identity

    @property
    def first_position(self) -> int:
        """Position of the first sample of the micro-batch that this peer computes."""
        return self._data.first_position

    def begin(self) -> None:
        """Seed the generators for the micro-batch that was handed to training last."""
        self._seed(self.identity, self.first_position)

    @contextlib.contextmanager
    def of(self, identity: str, first_position: int, samples: int) -> Iterator[Batch]:
        """Yields a micro-batch of any peer, on this device, to be computed inside the block as that peer computed it.

        After the block, metrics, running statistics and generators are as they were before.
        """
        with self._slice(identity, first_position, samples, 0, samples) as batch:
            yield batch

    def slices_of(
        self, identity: str, first_position: int, samples: int, most: int
    ) -> Iterator[contextlib.AbstractContextManager[Batch]]:
        """The same micro-batch in slices of at most `most` samples: contexts as of `of`, to be entered one after the
        other."""
        for first in range(0, samples, most):
            yield self._slice(identity, first_position, samples, first, min(most, samples - first))

    @contextlib.contextmanager
    def _slice(self, identity: str, first_position: int, whole: int, first: int, samples: int) -> Iterator[Batch]:
        task = self._task
        batch = self._data.micro_batch_of(identity, first_position + first, samples)
        batch = move_data_to_device(batch, task.device)
        drop_paths = [module for module in task.modules() if isinstance(module, PortableDropPath)]
        metrics, buffers = task.train_metrics, [buffer.clone() for buffer in task.buffers()]
        devices = [task.device] if task.device.type == "cuda" else []
        with torch.random.fork_rng(devices), self._uncompiled():
            task.train_metrics = copy.deepcopy(metrics)
            self._seed(identity, first_position)
            for module in drop_paths:
                module.slice_of = None if samples == whole else (first, whole)
            try:
                yield batch
            finally:
                for module in drop_paths:
                    module.slice_of = None
                task.train_metrics = metrics
                with torch.no_grad():
                    for buffer, before in zip(task.buffers(), buffers, strict=True):
                        buffer.copy_(before)

    @contextlib.contextmanager
    def _uncompiled(self) -> Iterator[None]:
        """Computes without compiled code: compiling for another micro-batch size would keep other peers waiting.

        `set_stance` takes effect when it is called, so it is called inside this block.
        """
        with torch.compiler.set_stance("force_eager") if self._task.is_compiled else contextlib.nullcontext():
            yield

    def _seed(self, identity: str, position: int) -> None:
        seed = stable_seed(self._data.recipe.seed, identity, position, "model")
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 0.7 ms: it looks for all kinds of devices
        if self._task.device.type == "cuda":
            torch.cuda.manual_seed(seed)
