"""`VisionData`: the recipe's images for Lightning, in this peer's own order."""

from typing import Any

from torch.utils.data import Dataset

from recipe.data.augmentation import ImageView, TensorView
from recipe.data.damaged_images import ImagesByClass
from recipe.data.datasets import TensorImages, damaged_cifar10, open_splits, prepare
from recipe.data.peer_data import PeerData
from recipe.data.splits import Splits
from recipe.errors import InputError


class VisionData(PeerData):
    """Training, validation and test images of a recipe.

    Inputs are float32 (batch, channels, image_size, image_size), normalised. The folder holds CIFAR-10 (downloaded
    there if missing), `glyphs.npz`, or `train/`, `val/` and `test/`; other data sets do not use it.
    """

    def prepare_data(self) -> None:
        """Downloads CIFAR-10 if it is missing."""
        prepare(self.recipe, self.data_dir)

    @property
    def missing_download(self) -> str:
        """CIFAR-10, if the recipe needs it and it is missing; else empty."""
        if self.recipe.dataset != "cifar10" or damaged_cifar10(self.data_dir):
            return ""
        try:
            self.open()
        except InputError:
            return "CIFAR-10 (170 MB)"
        return ""

    def open(self) -> Splits:
        """Opens the images as `TensorImages`, or as data sets of (PIL image, class)."""
        return open_splits(self.recipe, self.data_dir)

    def view(self, part: Dataset, key: int | None) -> TensorView | ImageView:
        """The part in the recipe's size, normalised, and changed at random as the recipe says."""
        return (TensorView if isinstance(part, TensorImages) else ImageView)(part, self.recipe, key)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Logs files that hold no image, before the images that stand in for them are trained on.

        Raises:
            InputError: too many of a folder's images cannot be read.
        """
        for part in vars(self.splits).values():
            if isinstance(part, ImagesByClass):
                part.report()
        return super().on_before_batch_transfer(batch, dataloader_idx)
