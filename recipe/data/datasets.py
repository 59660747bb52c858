"""Opens the recipe's images, split into training, validation and test parts that are equal on every machine."""

import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset
from torchvision.datasets import CIFAR10
from torchvision.datasets.utils import check_integrity, check_md5

from recipe.config import Recipe
from recipe.data.damaged_images import ImagesByClass
from recipe.data.splits import Splits
from recipe.errors import InputError
from recipe.glyphs.archive import FILE, GlyphArchive
from recipe.glyphs.typefaces import PARTS
from recipe.registry import DIGITS_FOLDS

# The split belongs to the data set and not to a run, so that results with different recipe seeds stay comparable.
_SPLIT_SEED = 0
_DIGITS_SPLIT = Path(__file__).parent / "digits_split.txt"
ONE_EDITION = ("digits", *DIGITS_FOLDS, "cifar10", "synthetic")
"""Data sets without a digest: there is only one edition of each."""
_SYNTHETIC_SAMPLES = {"train": 4096, "val": 512, "test": 512}
_SYNTHETIC_BANK_FLOATS = 2**25  # 128 MiB per part; a larger part repeats its images


class TensorImages(Dataset):
    """Images that fit into memory.

    Args:
        images: tensor (num_images, channels, height, width), float in [0, 1], or bytes.
        labels: int64 tensor (num_images,).
        length: number of samples; beyond num_images, the images repeat.
    """

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, length: int | None = None) -> None:
        self.images, self.labels = images, labels
        self.length = length or len(images)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return as_float(self.images[index % len(self.images)]), self.labels[index % len(self.images)]

    def gather(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """A whole batch at once: images (batch, channels, height, width), float in [0, 1], and labels (batch,)."""
        chosen = torch.as_tensor(indices) % len(self.images)
        return as_float(self.images[chosen]), self.labels[chosen]


def as_float(images: torch.Tensor) -> torch.Tensor:
    """The images as floats in [0, 1]; floats stay as they are."""
    return images if images.is_floating_point() else images / 255


def prepare(recipe: Recipe, data_dir: Path) -> None:
    """Downloads what can be downloaded and is missing; peers on one machine wait for each other.

    Where nothing is missing, nothing is written: the folder may be read-only.

    Raises:
        InputError: the folder cannot be written, or the download failed.
    """
    if recipe.dataset != "cifar10":
        return
    try:
        if all(check_integrity(path, md5) for path, md5 in _cifar10_files(data_dir)):
            return
        data_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(data_dir / ".download.lock"):
            CIFAR10(data_dir, download=True)
    except Exception as error:  # urllib, tarfile, pickle and torchvision each have their own errors
        if damaged := damaged_cifar10(data_dir):
            raise damaged from error
        raise InputError(
            f"CIFAR-10 cannot be downloaded into {data_dir} ({type(error).__name__}: {error}): connect this machine to "
            f"the network, or put {CIFAR10.filename} from {CIFAR10.url} into that folder (--data-dir)."
        ) from error


def open_splits(recipe: Recipe, data_dir: Path) -> Splits:
    """Opens the data set; nothing is downloaded.

    Raises:
        InputError: the files are missing, damaged, or have another number of classes than the recipe.
    """
    opened = {"cifar10": _cifar10, "glyphs": _glyphs, "imagefolder": _imagefolder, "synthetic": _synthetic}
    opened |= dict.fromkeys(("digits", *DIGITS_FOLDS), _digits)
    return opened[recipe.dataset](recipe, data_dir)


def _digits(recipe: Recipe, _: Path) -> Splits:
    """1,797 handwritten digits of 8 x 8 pixels (UCI ML, bundled with scikit-learn): 1,257 / 270 / 270.

    Scikit-learn itself is not imported: that would make a volunteer wait for two seconds. `digits_split.txt` has the
    result of `stratified`, a letter for each image: t(rain), v(alidation), (t)e(st).
    """
    file = Path(find_spec("sklearn").submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.int64))
    pixels, classes = table[:, :-1], table[:, -1].contiguous()
    images = _fitted(pixels.float().view(-1, 1, 8, 8) / 16.0, recipe)
    train, val, test = (torch.from_numpy(part) for part in _digits_parts(recipe.dataset, classes.numpy()))
    return Splits(
        TensorImages(images[train], classes[train]),
        TensorImages(images[val], classes[val]),
        TensorImages(images[test], classes[test]) if len(test) else None,
    )


def _digits_parts(dataset: str, classes: np.ndarray) -> list[np.ndarray]:
    """Indices of the three parts; a fold validates every fifth image of each class and has no test part."""
    if dataset not in DIGITS_FOLDS:
        letters = np.array(list("".join(_DIGITS_SPLIT.read_text().split())))
        return [np.flatnonzero(letters == letter) for letter in "tve"]
    place_in_class = (classes[:, None] == np.arange(10)).cumsum(0)[np.arange(len(classes)), classes] - 1
    validates = place_in_class % len(DIGITS_FOLDS) == DIGITS_FOLDS.index(dataset)
    return [np.flatnonzero(~validates), np.flatnonzero(validates), np.array([], dtype=np.int64)]


def _glyphs(recipe: Recipe, data_dir: Path) -> Splits:
    """62 characters of typefaces, as drawn by `python -m recipe.glyphs`; a typeface is in one part only."""
    archive = GlyphArchive.load(data_dir / FILE)
    parts = (
        TensorImages(_fitted(torch.from_numpy(images)[:, None], recipe), torch.from_numpy(labels).long())
        for images, labels in ((archive.images[part], archive.labels[part]) for part in PARTS)
    )
    return Splits(*parts, digest=archive.digest)


def _fitted(images: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Grey images (num_images, 1, side, side), resized and repeated to the recipe's size and number of channels."""
    if recipe.image_size != images.shape[-1]:
        images = F.interpolate(images, size=recipe.image_size, mode="bilinear", antialias=True)
    return images.expand(-1, recipe.channels, -1, -1).contiguous()


def stratified(labels: np.ndarray, second_share: float) -> tuple[np.ndarray, np.ndarray]:
    """Two sorted arrays of indices; every class has the same share in both."""
    from sklearn.model_selection import train_test_split  # takes two seconds

    everything = np.arange(len(labels))
    first, second = train_test_split(everything, test_size=second_share, stratify=labels, random_state=_SPLIT_SEED)
    return np.sort(first), np.sort(second)


def _cifar10(_: Recipe, data_dir: Path) -> Splits:
    """CIFAR-10 (Krizhevsky 2009): 45,000 / 5,000 of the training batches, and the official 10,000 test images."""
    try:
        train, test = CIFAR10(data_dir, train=True), CIFAR10(data_dir, train=False)
    except Exception as error:  # torchvision raises RuntimeError, unpickling any exception
        if damaged := damaged_cifar10(data_dir):
            raise damaged from error
        raise InputError(
            f"There is no complete CIFAR-10 in {data_dir} ({error}): put {CIFAR10.filename} from {CIFAR10.url} "
            "there, or name another --data-dir."
        ) from error
    first, second = stratified(np.asarray(train.targets), 0.10)
    return Splits(Subset(train, first.tolist()), Subset(train, second.tolist()), test)


def damaged_cifar10(data_dir: Path) -> InputError | None:
    """The error about the first file whose checksum is not the published one; None if there is none."""
    for path, md5 in (*_cifar10_files(data_dir), (data_dir / CIFAR10.filename, CIFAR10.tgz_md5)):
        if path.is_file() and not check_md5(path, md5):
            return InputError(
                f"{path} has the wrong checksum, so it is damaged or not the published file: delete it, and connect "
                f"this machine to the network or put {CIFAR10.filename} from {CIFAR10.url} into {data_dir}."
            )
    return None


def _cifar10_files(data_dir: Path) -> list[tuple[Path, str]]:
    """The files of a complete CIFAR-10, with their published checksums."""
    batches = data_dir / CIFAR10.base_folder
    listed = (*CIFAR10.train_list, *CIFAR10.test_list, (CIFAR10.meta["filename"], CIFAR10.meta["md5"]))
    return [(batches / name, md5) for name, md5 in listed]


def _imagefolder(recipe: Recipe, data_dir: Path) -> Splits:
    """Images by class: `train/<class>/*.jpg`, `val/<class>/*.jpg` and perhaps `test/<class>/*.jpg`, as ImageNet has
    them."""
    parts = {name: _folder(data_dir / name) for name in ("train", "val", "test") if _needed(data_dir / name)}
    for name, part in parts.items():
        if part.classes != parts["train"].classes:
            raise InputError(
                f"{data_dir / name} and {data_dir / 'train'} have different class folders: make them equal."
            )
    found = len(parts["train"].classes)
    if found != recipe.num_classes:
        raise InputError(
            f"{data_dir / 'train'} has {found} class folders and the recipe {recipe.num_classes} classes: "
            f"set --num-classes {found}, or name another --data-dir."
        )
    return Splits(parts["train"], parts["val"], parts.get("test"), digest_of_classes(parts["train"].classes))


def digest_of_classes(names: Sequence[str]) -> str:
    """Digest of the names of class folders, in the order of their labels."""
    return hashlib.sha256("/".join(names).encode()).hexdigest()[:16]


def _needed(folder: Path) -> bool:
    return folder.name != "test" or folder.exists()


def _folder(folder: Path) -> ImagesByClass:
    try:
        return ImagesByClass(folder)
    except OSError as error:
        raise InputError(
            f"{folder} holds no images by class ({error}): name a --data-dir with train/<class>/ and val/<class>/."
        ) from error


def _synthetic(recipe: Recipe, _: Path) -> Splits:
    """Noise over a coarse pattern for each class: learnable, so that a benchmark's loss is meaningful."""
    generator = torch.Generator().manual_seed(_SPLIT_SEED)
    patterns = torch.rand(recipe.num_classes, recipe.channels, 4, 4, generator=generator)
    parts = (_synthetic_part(recipe, patterns, samples, generator) for samples in _SYNTHETIC_SAMPLES.values())
    return Splits(*parts)


def _synthetic_part(recipe: Recipe, patterns: torch.Tensor, samples: int, generator: torch.Generator) -> TensorImages:
    side = recipe.image_size
    in_memory = max(1, min(samples, _SYNTHETIC_BANK_FLOATS // (recipe.channels * side * side)))
    labels = torch.randint(recipe.num_classes, (in_memory,), generator=generator)
    images = torch.rand(in_memory, recipe.channels, side, side, generator=generator)
    for image, label in zip(images, labels, strict=True):
        image.add_(F.interpolate(patterns[label][None], size=side)[0]).div_(2.0)
    return TensorImages(images, labels, samples)
