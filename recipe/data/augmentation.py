"""Prepares stored images for the model: size, normalisation, and random changes that can be repeated exactly."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchvision.transforms import v2

from recipe.config import Recipe
from recipe.data.damaged_images import ImagesByClass
from recipe.data.datasets import TensorImages
from recipe.data.sampler import PADDING, sample_randomness
from recipe.registry import DIGITS_FOLDS
from recipe.seeding import seeded_on_cpu

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_DIGITS = ((0.3053,) * 3, (0.3761,) * 3)  # of the 1,797 images, scaled to [0, 1]
_STATISTICS = {
    **dict.fromkeys(("digits", *DIGITS_FOLDS), _DIGITS),
    "glyphs": ((0.079,) * 3, (0.246,) * 3),  # of the training images
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),  # of the 50,000 training images
    "imagefolder": _IMAGENET,
    "synthetic": ((0.5,) * 3, (0.2,) * 3),
}
CROP_FRACTION = 0.875
"""Share of an enlarged image's side that the crop keeps, as in the ResNet and ViT evaluations on ImageNet."""
_CIFAR_PIXELS = 32


def normalisation(recipe: Recipe) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel: those of the pretrained weights, or else of the data set."""
    mean, std = _STATISTICS[recipe.dataset]
    if recipe.pretrained:
        import timm

        weights = timm.get_pretrained_cfg(recipe.model)
        mean, std = (weights.mean, weights.std) if weights is not None else _IMAGENET
    if recipe.channels == 1:
        mean, std = (sum(mean) / 3,), (sum(std) / 3,)
    return list(mean), list(std)


class TensorView(Dataset):
    """A part of a data set in memory: normalised images, fetched one batch at a time.

    Args:
        key: seed of the random changes, with which the entries to fetch are (position, index). None for no changes,
            with which they are indices.
    """

    gives_batches = True

    def __init__(self, source: TensorImages, recipe: Recipe, key: int | None) -> None:
        self._mean, self._std = (torch.tensor(values).view(-1, 1, 1) for values in normalisation(recipe))
        self.is_normalised = source.images.is_floating_point()  # bytes are normalised per batch, to save memory
        if self.is_normalised:
            source = TensorImages((source.images - self._mean) / self._std, source.labels, len(source))
        self.source = source
        self.background = ((0.0 - self._mean) / self._std).view(1, -1, 1, 1)
        self.max_shift = max(1, recipe.image_size // 8) if recipe.augmentation == "light" else 0
        self.key = key

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, entries: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        if self.key is None:
            return self._normalised(entries)
        positions, indices = np.asarray(entries, dtype=np.int64).T
        images, labels = self._normalised(indices)
        return self._shifted(images, sample_randomness(self.key, positions)), labels

    def _normalised(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = self.source.gather(indices)
        return images if self.is_normalised else (images - self._mean) / self._std, labels

    def _shifted(self, images: torch.Tensor, words: np.ndarray) -> torch.Tensor:
        """Moves every image by up to `max_shift` pixels in both directions; black fills the edges."""
        if not self.max_shift:
            return images
        span = np.uint64(2 * self.max_shift + 1)
        down = torch.from_numpy((words % span).astype(np.int64))
        right = torch.from_numpy(((words >> np.uint64(32)) % span).astype(np.int64))
        side = torch.arange(images.shape[-1])
        padded = F.pad(images - self.background, (self.max_shift,) * 4) + self.background
        rows, columns = (down[:, None] + side)[:, None, :, None], (right[:, None] + side)[:, None, None, :]
        batch, channels = torch.arange(len(images)), torch.arange(images.shape[1])
        return padded[batch[:, None, None, None], channels[None, :, None, None], rows, columns]


class ImageView(Dataset):
    """A part of a data set of PIL images, transformed one by one; `key` is as for `TensorView`."""

    gives_batches = False

    def __init__(self, source: Dataset, recipe: Recipe, key: int | None) -> None:
        self.source, self.key = source, key
        self.transform = eval_transform(recipe) if key is None else train_transform(recipe)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, entry: Any) -> tuple[torch.Tensor, int]:
        if self.key is None:
            image, label = self.source[entry]
            if isinstance(self.source, ImagesByClass) and self.source.is_damaged(entry):
                label = PADDING  # the image that stands in for it must not count twice
            return self.transform(image), label
        position, index = entry
        image, label = self.source[index]
        seed = int(sample_randomness(self.key, np.asarray([position]))[0] >> np.uint64(1))
        with seeded_on_cpu(seed):  # torchvision draws from torch's global generator
            return self.transform(image), label


def train_transform(recipe: Recipe) -> v2.Compose:
    """The transform from a PIL image to a float tensor (channels, image_size, image_size), with the recipe's random
    changes."""
    if recipe.augmentation == "none":
        return eval_transform(recipe)
    return v2.Compose([*_random_changes(recipe), *_to_tensor(recipe)])


def eval_transform(recipe: Recipe) -> v2.Compose:
    """The transform from a PIL image to a float tensor (channels, image_size, image_size), without random changes."""
    side = recipe.image_size
    if recipe.dataset == "cifar10":
        return v2.Compose([*_resize_cifar(side), *_to_tensor(recipe)])
    return v2.Compose([v2.Resize(round(side / CROP_FRACTION)), v2.CenterCrop(side), *_to_tensor(recipe)])


def _random_changes(recipe: Recipe) -> list[v2.Transform]:
    side = recipe.image_size
    mirrored = [] if recipe.augmentation == "light" else [v2.RandomHorizontalFlip()]
    # Two operations of magnitude 9: the defaults of RandAugment (Cubuk et al. 2019) for ImageNet.
    further = [v2.RandAugment(num_ops=2, magnitude=9)] if recipe.augmentation == "randaugment" else []
    if recipe.dataset == "cifar10":
        # On the original 32 px, before enlarging: the same result for a fraction of the work.
        return [v2.RandomCrop(_CIFAR_PIXELS, padding=4), *mirrored, *further, *_resize_cifar(side)]
    if recipe.augmentation == "light":
        return [v2.Resize(round(side / CROP_FRACTION)), v2.RandomCrop(side)]
    return [v2.RandomResizedCrop(side), *mirrored, *further]


def _resize_cifar(side: int) -> list[v2.Transform]:
    return [] if side == _CIFAR_PIXELS else [v2.Resize((side, side))]


def _to_tensor(recipe: Recipe) -> list[v2.Transform]:
    mean, std = normalisation(recipe)
    grey = [v2.Grayscale()] if recipe.channels == 1 else []
    return [*grey, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
