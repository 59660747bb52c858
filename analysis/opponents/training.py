"""What the programs of this folder have in common: a changed recipe, gradients of a paced device, and validation."""

from __future__ import annotations

import time
from dataclasses import fields, replace

import torch
from torch import nn

from recipe.config import Recipe
from recipe.data.peer_data import PeerData
from recipe.training.pacing import Pace, computed_samples, paced_samples_per_second
from recipe.training.task import evaluation_metrics

RUN_ID = "run"


def changed(recipe: Recipe, changes: list[str]) -> Recipe:
    """The recipe with `field=value` applied; values take the type that the field has."""
    kinds = {item.name: type(getattr(recipe, item.name)) for item in fields(Recipe)}
    pairs = dict(change.split("=", 1) for change in changes)
    return replace(recipe, **{name: kinds[name](value) for name, value in pairs.items()})


class Device:
    """Computes gradients, at the pace of a pretended device if the environment asks for one."""

    def __init__(self) -> None:
        rate = paced_samples_per_second()
        self._pace = None if rate is None else Pace(rate)

    def backward(self, module: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, share: float = 1.0) -> float:
        """Adds the gradients of a micro-batch to `param.grad`; its loss.

        Args:
            inputs: shape [samples, ...]
            labels: shape [samples]
            share: of the step's samples that are in this micro-batch
        """
        began = time.perf_counter()
        computed = computed_samples() if self._pace else slice(None)
        loss = nn.functional.cross_entropy(module(inputs[computed]), labels[computed])
        if self._pace:
            self._pace.sleep_before_backward(began, len(labels))
        (loss * share).backward()
        if self._pace:
            self._pace.end_backward(averaged=False)
        return loss.item()


def validate(module: nn.Module, data: PeerData) -> dict[str, float]:
    """`val/top1` and so on, of the whole validation part."""
    metrics = evaluation_metrics(data.recipe.num_classes)
    module.eval()
    with torch.no_grad():
        for inputs, labels in data.val_dataloader():
            metrics.update(module(inputs), labels)
    module.train()
    return {f"val/{name}": value.item() for name, value in metrics.compute().items()}
