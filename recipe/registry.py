"""Maps data sets to tasks: the one place that knows all tasks. A new task is a file and a line in `TASKS`.

Importing this module is quick, and so is importing a task: torch is imported with the first model.
"""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipe.config import Recipe
    from recipe.data.peer_data import PeerData
    from recipe.tasks.task_kind import TaskKind
    from recipe.training.task import ClassificationTask

DIGITS_FOLDS = tuple(f"digits-fold-{number}" for number in range(1, 6))
"""Five data sets of the same digits. Each validates another fifth, so that all five together validate every image
once."""

TASKS = {
    "recipe.tasks.images:Images": ("digits", *DIGITS_FOLDS, "cifar10", "glyphs", "imagefolder", "synthetic"),
    "recipe.tasks.texts:Texts": ("docstrings", "ag-news", "csv"),
}
"""The class of each task, as module:class, and the names of its data sets. A recipe's data set decides its task."""

OWN_DATA = ("imagefolder", "csv")
"""Data sets of which each peer may have its own samples: no other peer can recompute what it computed."""

DATASETS = tuple(name for names in TASKS.values() for name in names)


@cache
def kind_of(dataset: str) -> "TaskKind":
    """The task that a data set belongs to."""
    place = next(place for place, names in TASKS.items() if dataset in names)
    module, name = place.split(":")
    return getattr(import_module(module), name)()


def build_task(recipe: "Recipe", channels_last: bool = False) -> "ClassificationTask":
    """The recipe's model with its loss and metrics, for Lightning.

    Raises:
        InputError: the recipe's model cannot be built.
    """
    return kind_of(recipe.dataset).build_task(recipe, channels_last)


def build_data(
    recipe: "Recipe",
    data_dir: str | Path = "data",
    batch_size: int = 32,
    identity: str = "",
    num_workers: int = 0,
) -> "PeerData":
    """The recipe's data, for Lightning, in this peer's own order; arguments as for `PeerData`."""
    return kind_of(recipe.dataset).build_data(recipe, data_dir, batch_size, identity, num_workers)
