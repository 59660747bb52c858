"""A process of an island that only computes: it has data, a model and a device, but does not take part in the swarm."""

from __future__ import annotations

import logging
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment

from recipe.config import Recipe
from recipe.data.sampler import stable_seed
from recipe.errors import InputError
from recipe.model import check_samples
from recipe.registry import build_data, build_task
from recipe.run_folder import RunFolder
from recipe.training.replay import Replay
from recipe.training.task import ClassificationTask
from recipe.training.trainer import build_trainer
from swarm.peer.island.launch import agree
from swarm.peer.options import PeerOptions
from swarm.peer.own_profile import device_name
from swarm.training.averaging_mode import Averaging
from swarm.training.island.channel import Channel
from swarm.training.island.lost import IslandLost
from swarm.training.micro_batch.finder import measure_for_recipe, precision_on
from swarm.training.strategy import SwarmStrategy


def compute(options: PeerOptions, channel: Channel) -> int:
    """Compute for the first process until it leaves; returns the exit status."""
    computing = None
    try:
        computing = Computing(options, channel)
        computing.train()
        return 0
    except InputError as error:  # in the middle of the training, such as an image that cannot be read
        print(f"error: Process {channel.rank} of this island: {error}", file=sys.stderr, flush=True)
        return 2
    except IslandLost as lost:
        if computing is None or not computing.has_begun:
            return 2  # the first process has said what is wrong
        if channel.rank == 1:  # the other processes would say the same
            print(f"error: {lost}", file=sys.stderr, flush=True)
        return 1


class Computing:
    """A process of an island other than the first one.

    Args:
        options: the command line
        channel: to the first process, which says what is trained

    Raises:
        IslandLost: the first process has ended
        SystemExit: something does not fit, with status 2; the first process prints it
    """

    def __init__(self, options: PeerOptions, channel: Channel):
        self._options, self._channel = options, channel
        channel.hear()
        plan = channel.exchange(None)[0]
        self.recipe = Recipe.from_json(plan["recipe"])
        self.data = build_data(
            *(self.recipe, options.machine.data_dir, options.machine.batch_size or 1, plan["identity"]),
            num_workers=options.computing.num_workers,
        )
        self.task: ClassificationTask | None = None
        torch.manual_seed(stable_seed(self.recipe.seed, plan["identity"], "process", channel.rank))
        problem, samples = "", 0
        try:
            samples = self._prepare()
        except InputError as error:
            problem = str(error)
        asked = {"the data": self.data.digest if not problem else ""}
        told = {"samples": samples, "device": device_name(channel.device)}
        answers = agree(channel, {"problem": problem, "asked": asked} | told)
        self.data.batch_size = agreed_samples(answers)
        self.data.deal_out(channel.rank, channel.size)
        self.data.load_state_dict({"position": plan["position"]})
        replay = None if self.task is None else Replay(self.task, self.data)
        try:
            self._strategy = SwarmStrategy(
                self.recipe.target_batch_size,
                "",
                averaging=Averaging.of(self.recipe),
                inside=channel,
                max_step=self.recipe.total_steps,
                replay=replay,
            )
        except InputError as error:  # the recipe is wrong: the first process finds the same, and prints it
            raise SystemExit(2) from error
        self.has_begun = False
        """Whether a first micro-batch was computed."""

    def _prepare(self) -> int:
        """Prepare the data and the model; returns how many samples this device computes at once."""
        self.data.prepare_data()
        self.data.setup("fit")
        self.task = build_task(self.recipe)
        machine = self._options.machine
        if machine.batch_size:
            check_samples(self.task.model, machine.batch_size, self.recipe.model)
            samples = machine.batch_size
        else:
            size, num_samples = self._channel.size, self.data.num_train_samples
            samples = measure_for_recipe(self.task.model, self.recipe, machine.device, num_samples, size).samples
        if self._options.computing.compile:
            self.task.compile_model(self._channel.device)
        return samples

    def train(self) -> None:
        """Train until the first process leaves."""
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        warnings.filterwarnings("ignore", message=".*val_dataloader")
        trainer = build_trainer(
            self.recipe,
            RunFolder(Path()),  # where nothing is written
            **device_options(self._options.machine.device, self.recipe, self._channel),
            strategy=self._strategy,
            callbacks=[Obedient(self)],
            plugins=[LightningEnvironment()],
            loggers=(),
        )
        trainer.loggers = []
        trainer.fit(self.task, self.data)


class Obedient(L.Callback):
    """Ignores Ctrl-C and SIGTERM, which torchrun hands to all processes: the first one decides when the peer leaves.

    Args:
        computing: of this process
    """

    def __init__(self, computing: Computing):
        self._computing = computing

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Ignore the signals from now on: Lightning has set its own handlers just before."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Any) -> None:
        """Note that the training has begun."""
        self._computing.has_begun = True


def agreed_samples(answers: list[dict[str, Any]]) -> int:
    """The micro-batch of all processes: what the weakest device can do."""
    return min(answer["samples"] for answer in answers)


def device_options(device: str, recipe: Recipe, channel: Channel | None) -> dict[str, Any]:
    """Options of the trainer: where this process computes, as if Lightning ran in a single process.

    Args:
        device: auto, cpu or cuda
    """
    options = {
        "accelerator": {"auto": "auto", "cpu": "cpu", "cuda": "gpu"}[device],
        "precision": precision_on(device, recipe.precision),
    }
    if channel is not None and channel.device.type == "cuda":
        options |= {"devices": [channel.device.index]}
    return options
