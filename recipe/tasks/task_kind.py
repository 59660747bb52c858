"""`TaskKind`: the interface of a task, through which all other code trains it."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

    from recipe.config import Recipe
    from recipe.data.peer_data import PeerData
    from recipe.training.task import ClassificationTask


class TaskKind(ABC):
    """A task: a model, its data and its metrics. It has no state of its own.

    A recipe is checked before torch is needed, so the module of a task imports torch inside its methods.
    """

    @abstractmethod
    def check(self, recipe: "Recipe") -> None:
        """Refuses a recipe that contradicts itself; types and bounds of its fields have been checked before.

        Raises:
            InputError: says in one sentence what is wrong and what to do.
        """

    @abstractmethod
    def build_model(self, recipe: "Recipe") -> "nn.Module":
        """A module that maps inputs (batch, ...) to logits (batch, num_classes), equal on every machine.

        Raises:
            InputError: the model cannot be built.
        """

    @abstractmethod
    def build_data(
        self, recipe: "Recipe", data_dir: str | Path, batch_size: int, identity: str, num_workers: int
    ) -> "PeerData":
        """The task's data; arguments as for `PeerData`."""

    @abstractmethod
    def random_inputs(self, recipe: "Recipe", num_samples: int) -> "torch.Tensor":
        """Random inputs of the largest size that training uses, to measure time and memory with."""

    @abstractmethod
    def inputs_in_words(self, recipe: "Recipe") -> str:
        """Kind and size of the samples, such as "images of 32 px"."""

    def build_task(self, recipe: "Recipe", channels_last: bool = False) -> "ClassificationTask":
        """The model with its loss and metrics: cross-entropy, accuracy, macro F1, precision and recall.

        A task with other metrics returns a subclass.
        """
        from recipe.training.task import ClassificationTask

        return ClassificationTask(recipe, self.build_model(recipe), channels_last)
