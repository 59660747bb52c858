"""`PeerData`: data for Lightning in a peer's own order, for samples of any kind."""

from abc import abstractmethod
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from recipe.config import Recipe
from recipe.data.sampler import PADDING, PeerBatches, PeerSampler, ShardBatches, stable_seed
from recipe.data.splits import Splits
from recipe.errors import InputError


class View(Protocol):
    """A part of the data as the model sees it, fetched one micro-batch at a time.

    The entries to fetch are indices. Where training samples change at random, they are (position, index): the position
    in the peer's order seeds the changes.
    """

    gives_batches: bool
    """Whether all data are in memory, and `__getitems__` returns (inputs, labels) of a whole micro-batch. Else
    `__getitem__` returns one input and its label, and loader processes may call it."""

    def __len__(self) -> int:
        """Number of samples."""


class StoredView(Dataset):
    """Samples as they are stored: (input, label), one by one.

    Args:
        part: of the splits.
        key: as for `PeerData.view`; nothing changes at random here.
    """

    gives_batches = False

    def __init__(self, part: Dataset, key: int | None) -> None:
        self.part, self.has_positions = part, key is not None

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, entry: Any) -> tuple[torch.Tensor, int]:
        inputs, label = self.part[entry[1] if self.has_positions else entry]
        return inputs, int(label)


class PeerData(L.LightningDataModule):
    """Training, validation and test samples of a recipe. A task defines how they are opened and prepared for the model.

    Batches are (inputs, labels), with labels int64 (batch,). The training loader never ends, and all its micro-batches
    have the same size. Validation and test loaders pass over their part once, in order. Under a trainer of several
    processes, each process gets its share. Of the training order it gets every n-th micro-batch; of a pass it gets
    every n-th sample, padded with the label `PADDING` to equal lengths.

    Args:
        recipe: gives the data set and how samples are prepared for the model.
        data_dir: folder of data that are not bundled; unused for others.
        batch_size: micro-batch, in samples.
        identity: peers with different identities visit the samples in different orders.
        num_workers: processes that load samples; data sets in memory never use any.

    Raises:
        InputError: from `prepare_data` and `setup`, if the folder or the micro-batch cannot work.
    """

    def __init__(
        self,
        recipe: Recipe,
        data_dir: str | Path = "data",
        batch_size: int = 32,
        identity: str = "",
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.recipe = recipe
        self.data_dir = Path(data_dir).expanduser()
        self.batch_size = batch_size
        self.identity = identity
        self.num_workers = num_workers
        self.samples_trained = 0
        self.first_position = 0
        """Position in this peer's order of the micro-batch that was handed to training last."""
        self._splits: Splits | None = None
        self._batches: PeerBatches | None = None
        self._dealt: tuple[int, int] | None = None

    @abstractmethod
    def open(self) -> Splits:
        """Opens the data set; nothing is downloaded.

        Raises:
            InputError: the data set is missing, damaged, or not what the recipe says.
        """

    def view(self, part: Dataset, key: int | None) -> View:
        """A part as the model sees it: as it is stored, unless a task overrides this.

        Args:
            part: of the splits.
            key: seed of the random changes of training samples; None for no changes, with which entries are indices.
        """
        return StoredView(part, key)

    @property
    def missing_download(self) -> str:
        """What `prepare_data` would download now, such as "CIFAR-10 (170 MB)"; empty if nothing is missing."""
        return ""

    def setup(self, stage: str | None = None) -> None:
        """Opens the data set, once."""
        if self.batch_size < 1 or self.num_workers < 0:
            raise InputError("A micro-batch has at least one sample: set --batch-size to 1 or more.")
        if self._splits is None:
            self._splits = self.open()
        if self.num_train_samples < self.batch_size:
            raise InputError(
                f"{self.num_train_samples} training samples are fewer than one micro-batch of {self.batch_size}: "
                "set a smaller --batch-size, or add samples."
            )

    @property
    def splits(self) -> Splits:
        """The parts of the data set, as they are stored."""
        if self._splits is None:
            self.setup()
        return self._splits

    @property
    def num_train_samples(self) -> int:
        """Size of the training part."""
        return len(self.splits.train)

    @property
    def digest(self) -> str:
        """Digest of what all peers of a run must share: see `Splits.digest`."""
        return self.splits.digest

    def deal_out(self, rank: int, num_processes: int) -> None:
        """Trains on the share of this process in the peer's order, although the trainer knows of no other process."""
        self._dealt = rank, num_processes

    def train_dataloader(self) -> DataLoader:
        """Endless micro-batches, beginning after the samples that were already trained on."""
        sampler = self._order(self.identity, self.samples_trained)
        self._batches = PeerBatches(sampler, self.batch_size, *(self._dealt or self._share))
        return self._loader(self._training_view(self.identity), self._batches)

    def micro_batch_of(self, identity: str, first_position: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, labels) that the peer of this identity trains on, beginning at that position of its order.

        The result is the same on every machine that has the data, whatever loaders and micro-batches that peer uses.
        """
        indices = islice(self._order(identity, first_position), samples)
        entries = [(first_position + number, index) for number, index in enumerate(indices)]
        view = self._training_view(identity)
        return view.__getitems__(entries) if view.gives_batches else default_collate([view[entry] for entry in entries])

    def _order(self, identity: str, position: int) -> PeerSampler:
        sampler = PeerSampler(self.num_train_samples, self.recipe.seed, identity)
        sampler.load_state_dict({"position": position})
        return sampler

    def _training_view(self, identity: str) -> View:
        return self.view(self.splits.train, stable_seed(self.recipe.seed, identity, "augmentation"))

    def resize_micro_batch(self, samples: int) -> None:
        """Changes the size of the training loader's next micro-batches; those that it has drawn ahead stay.

        Samples keep their order and their random changes, which depend on their position alone.
        """
        self.batch_size = samples
        if self._batches is not None:
            self._batches.batch_size = samples

    def val_dataloader(self) -> DataLoader:
        """The validation part, once, in order."""
        return self._pass_over(self.splits.val)

    def test_dataloader(self) -> DataLoader:
        """The test part, once, in order."""
        if self.splits.test is None:
            raise InputError(
                f"{self.recipe.dataset} has no samples to test with here: for imagefolder, add "
                f"{self.data_dir / 'test'} with a folder per class; for csv, {self.data_dir / 'test.csv'}; a fold of "
                "digits has none."
            )
        return self._pass_over(self.splits.test)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Counts the samples when a batch is handed to training. Loaders draw ahead, so their own count would be too
        high."""
        if self.trainer is not None and self.trainer.training:
            rank, num_processes = self._dealt or self._share
            self.first_position = self.samples_trained + rank * len(batch[1])
            self.samples_trained += len(batch[1]) * num_processes
        return batch

    def state_dict(self) -> dict[str, int]:
        """The number of samples that all processes together trained on; Lightning keeps it in checkpoints."""
        return {"position": self.samples_trained}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Makes the next training loader continue after that many samples."""
        self.samples_trained = state_dict["position"]

    @property
    def _share(self) -> tuple[int, int]:
        """Rank of this process and number of training processes."""
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _pass_over(self, part: Dataset) -> DataLoader:
        return self._loader(self.view(part, None), ShardBatches(len(part), self.batch_size, *self._share))

    def _loader(self, view: View, batches: PeerBatches | ShardBatches) -> DataLoader:
        workers = 0 if view.gives_batches else self.num_workers
        return DataLoader(
            view if isinstance(batches, PeerBatches) else _PaddedView(view),
            batch_sampler=batches,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available(),
            collate_fn=_as_is if view.gives_batches else None,
            # A loader draws a seed when it starts. It must not come from the global generator, which dropout uses.
            generator=torch.Generator().manual_seed(self.recipe.seed),
        )


class _PaddedView(Dataset):
    """A view without random changes; for the index `PADDING` it gives some sample with the label `PADDING`."""

    def __init__(self, view: View) -> None:
        self.view = view

    def __len__(self) -> int:
        return len(self.view)

    def __getitems__(self, indices: list[int]) -> Any:
        existing = [max(index, 0) for index in indices]
        if self.view.gives_batches:
            inputs, labels = self.view.__getitems__(existing)
            return inputs, torch.where(torch.tensor(indices) == PADDING, PADDING, labels)
        pairs = zip(indices, (self.view[index] for index in existing), strict=True)
        return [(one, PADDING if index == PADDING else int(label)) for index, (one, label) in pairs]


def _as_is(batch: Any) -> Any:
    return batch
