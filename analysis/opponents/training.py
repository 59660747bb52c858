"""What the programs of this folder share: a changed recipe, gradients of a paced device, and validation."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro
from torch import nn

from recipe.config import Recipe
from recipe.data.peer_data import PeerData
from recipe.errors import InputError
from recipe.model import build_model
from recipe.overrides import RecipeOverrides, apply_overrides
from recipe.presets import preset
from recipe.registry import build_data
from recipe.run_folder import RunFolder
from recipe.training.heap import keep_heap
from recipe.training.pacing import Pace, computed_samples, paced_samples_per_second
from recipe.training.task import evaluation_metrics

RUN_ID = "run"


def changed(recipe: Recipe, changes: list[str]) -> Recipe:
    """The recipe with the changes `field=value`, which are read as the other programs read `--field value`.

    Raises:
        InputError: the result is not a valid recipe.
        SystemExit: with status 2 for an unknown field, or a value of another type.
    """
    arguments = [f"--{change}" for change in changes]
    config = (tyro.conf.FlagConversionOff,)
    overrides = tyro.cli(RecipeOverrides, args=arguments, prog="--change", add_help=False, config=config)
    return apply_overrides(recipe, overrides)


@dataclass
class Run:
    """What a peer trains, and its run folder."""

    recipe: Recipe
    folder: RunFolder
    module: nn.Module
    data: PeerData
    began: float
    """Start of the training, in `time.perf_counter` seconds."""

    @classmethod
    def of(cls, options: argparse.Namespace) -> Run:
        """The run that a command line describes. Weights follow from the recipe's seed, and are equal everywhere."""
        recipe = changed(preset(options.recipe), options.change)
        folder = RunFolder.create(options.output_dir, RUN_ID, options.name)
        folder.write_recipe(recipe)
        folder.write_environment()
        keep_heap()
        torch.manual_seed(recipe.seed)
        module = build_model(recipe)
        data = build_data(recipe, batch_size=options.batch_size, identity=options.name)
        data.prepare_data()
        data.setup("fit")
        return cls(recipe, folder, module, data, time.perf_counter())

    def end(self, steps: int, num_peers: int) -> None:
        """Write the summary after `steps` global updates."""
        self.folder.write_summary(
            self.recipe,
            run_id=RUN_ID,
            outcome="completed",
            steps=steps,
            samples=0,
            seconds=time.perf_counter() - self.began,
            val_accuracy=None,
            train_loss=None,
            max_num_peers=num_peers,
        )


def run_and_exit(main: Callable[[], None]) -> None:
    """Runs a program, and ends this process at once, since threads of these libraries can keep the interpreter
    alive."""
    status = 0
    try:
        main()
    except KeyboardInterrupt:
        status = 130
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Device:
    """Computes gradients, at the pace of a pretended device if the environment asks for one.

    Args:
        label_smoothing: label smoothing of the recipe.
    """

    def __init__(self, label_smoothing: float) -> None:
        self._label_smoothing = label_smoothing
        rate = paced_samples_per_second()
        self._pace = None if rate is None else Pace(rate)

    def backward(self, module: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, share: float = 1.0) -> float:
        """Adds the gradients of a micro-batch to `param.grad`; returns its loss.

        Args:
            inputs: shape [samples, ...]
            labels: shape [samples]
            share: share of the step's samples that this micro-batch has
        """
        began = time.perf_counter()
        computed = computed_samples() if self._pace else slice(None)
        logits = module(inputs[computed])
        loss = nn.functional.cross_entropy(logits, labels[computed], label_smoothing=self._label_smoothing)
        if self._pace:
            self._pace.sleep_before_backward(began, len(labels))
        (loss * share).backward()
        if self._pace:
            self._pace.end_backward(averaged=False)
        return loss.item()


def validate(module: nn.Module, data: PeerData) -> dict[str, float]:
    """The metrics `val/top1` and so on, over the whole validation part."""
    metrics = evaluation_metrics(data.recipe.num_classes)
    module.eval()
    with torch.no_grad():
        for inputs, labels in data.val_dataloader():
            metrics.update(module(inputs), labels)
    module.train()
    return {f"val/{name}": value.item() for name, value in metrics.compute().items()}
