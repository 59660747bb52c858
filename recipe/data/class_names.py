"""Names of the classes of a data set, in the order of their labels."""

from pathlib import Path

from torchvision.datasets.folder import find_classes

from recipe.config import Recipe
from recipe.errors import InputError
from recipe.glyphs.drawing import CHARACTERS
from recipe.registry import DIGITS_FOLDS

_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_KNOWN = {
    **dict.fromkeys(("digits", *DIGITS_FOLDS), tuple("0123456789")),
    "cifar10": _CIFAR10,
    "glyphs": tuple(CHARACTERS),
}


def class_names(recipe: Recipe, data_dir: Path | None = None) -> tuple[str, ...]:
    """Names of the classes; empty if they have none, or if they are names of folders that are not on this machine.

    Args:
        recipe: gives the data set.
        data_dir: folder of an `imagefolder`, whose class folders give the names; None if it is not known.

    Raises:
        InputError: the folder has no class folders, or not as many as the recipe has classes.
    """
    if recipe.dataset != "imagefolder" or data_dir is None:
        return _KNOWN.get(recipe.dataset, ())
    train = data_dir.expanduser() / "train"
    try:
        names, _ = find_classes(train)
    except OSError as error:
        raise InputError(f"{train} holds no class folders ({error}): name another --data-dir.") from error
    if len(names) != recipe.num_classes:
        raise InputError(
            f"{train} has {len(names)} class folders and the recipe {recipe.num_classes} classes: name another "
            "--data-dir."
        )
    return tuple(names)
