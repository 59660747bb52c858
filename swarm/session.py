"""One peer's training in one run: data, model, trainer, run folder and summary."""

from __future__ import annotations

import threading
import time

import torch
from hivemind import DHT
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from recipe.config import Recipe
from recipe.data import VisionData
from recipe.errors import InputError
from recipe.run_folder import RunFolder
from recipe.task import VisionTask
from recipe.trainer import build_trainer
from swarm.collaboration import CollaborationOptions
from swarm.options import PeerOptions
from swarm.reporting import StatusReporter, SwarmMetrics
from swarm.run_card import RunCard
from swarm.status import Status, percent
from swarm.strategy import SwarmStrategy

DEFAULT_MICRO_BATCH = 32


class Session:
    """Everything that can be wrong before training is wrong here: the folder, the data, the device, the micro-batch.

    :param options: this peer's own settings
    :param name: public name
    :param dht: a running DHT; stays running
    :param card: what is trained
    :param addresses: where this peer can be reached
    :param stop_requested: when set, this peer leaves at the next opportunity
    :raises InputError: something that a person gave cannot work
    """

    def __init__(
        self,
        options: PeerOptions,
        name: str,
        dht: DHT,
        card: RunCard,
        addresses: tuple[str, ...],
        stop_requested: threading.Event,
    ):
        self.options, self.name, self.dht, self.card = options, name, dht, card
        self.addresses, self.stop_requested = addresses, stop_requested
        self.recipe: Recipe = card.recipe
        self.total_steps = options.max_steps or self.recipe.total_steps
        self.batch_size = self._micro_batch()
        if options.device == "cuda" and not torch.cuda.is_available():
            raise InputError("There is no CUDA device that torch can use: give --device cpu, or install a CUDA torch.")
        self.folder = RunFolder.create(options.output_dir, card.run_id, name)
        self._check_folder()
        self.data = VisionData(self.recipe, options.data_dir, self.batch_size, dht.peer_id.to_base58())
        self.data.prepare_data()
        self.data.setup("fit")
        self.task = VisionTask(self.recipe)
        self.folder.write_recipe(self.recipe)
        self.folder.write_environment()
        self.metrics = SwarmMetrics()
        self.reporter = StatusReporter(self.folder, self._first_status(), self.metrics)

    def _micro_batch(self) -> int:
        target = self.recipe.target_batch_size
        batch_size = self.options.batch_size or min(DEFAULT_MICRO_BATCH, target)
        if batch_size > target:
            raise InputError(
                f"A micro-batch of {batch_size} does not fit the target batch size of {target}: give --batch-size "
                f"{target} or less."
            )
        return batch_size

    def _first_status(self) -> Status:
        return Status(
            name=self.name,
            run_id=self.card.run_id,
            phase="joining",
            total_steps=self.total_steps,
            target_batch_size=self.recipe.target_batch_size,
            addresses=self.addresses,
        )

    def _check_folder(self) -> None:
        """A folder with another recipe's checkpoint must not be continued by accident."""
        if not self.folder.recipe.exists():
            return
        try:
            before = Recipe.from_json(self.folder.recipe.read_text())
        except InputError:
            return
        if difference := before.difference(self.recipe):
            raise InputError(
                f"{self.folder.path} holds a run of another recipe ({', '.join(difference)} differ): choose another "
                "--run-id, --public-name or --output-dir."
            )

    def train(self) -> str:
        """Train until the run ends or this peer leaves.

        :returns: a few sentences for the person who gave the machine
        """
        trainer = self._trainer()
        last = self.folder.checkpoints / "last.ckpt"
        began, outcome = time.monotonic(), "failed"
        try:
            trainer.fit(self.task, self.data, ckpt_path=last if last.exists() else None)
            trainer.save_checkpoint(last, weights_only=False)
            outcome = self._outcome(trainer)
        finally:
            final = self.reporter.finish(outcome)
        self._write_summary(final, time.monotonic() - began)
        return self._farewell(final, time.monotonic() - began)

    def _trainer(self) -> Trainer:
        options = self.options
        strategy = SwarmStrategy(
            self.recipe.target_batch_size,
            self.card.run_id,
            dht=self.dht,
            name=self.name,
            namespace=self.card.key_prefix,
            options=CollaborationOptions(options.min_peers, options.matchmaking_time, options.averaging_timeout),
            stop_requested=self.stop_requested,
        )
        checkpoints = ModelCheckpoint(
            self.folder.checkpoints,
            "best",
            monitor="val/top1",
            mode="max",
            save_last=True,
            enable_version_counter=False,
        )
        return build_trainer(
            self.recipe,
            self.folder,
            accelerator={"auto": "auto", "cpu": "cpu", "cuda": "gpu"}[options.device],
            strategy=strategy,
            callbacks=[self.metrics, self.reporter, checkpoints],
            max_steps=options.max_steps,
            max_time=options.max_time,
            target_accuracy=options.target_accuracy,
        )

    def _outcome(self, trainer: Trainer) -> str:
        if self.stop_requested.is_set():
            return "interrupted"
        accuracy = trainer.callback_metrics.get("val/top1", 0.0)
        if self.options.target_accuracy is not None and accuracy >= self.options.target_accuracy:
            return "target accuracy reached"
        return "completed" if trainer.global_step >= self.total_steps else "time is up"

    def _write_summary(self, final: Status, seconds: float) -> None:
        self.folder.write_summary(
            self.recipe,
            run_id=self.card.run_id,
            outcome=final.ended,
            steps=final.step,
            samples=self.metrics.contributed,
            seconds=seconds,
            val_accuracy=final.val_accuracy,
            train_loss=self.metrics.loss,
            max_num_peers=self.metrics.max_num_peers,
            name=self.name,
            swarm_samples=self.metrics.swarm_samples,
            updates=self.metrics.updates,
            complete_updates=self.metrics.complete_updates,
        )

    def _farewell(self, final: Status, seconds: float) -> str:
        metrics = self.metrics
        share = metrics.contributed / metrics.swarm_samples if metrics.swarm_samples else None
        return (
            f"{final.ended.capitalize()} at step {final.step} after {seconds:.0f} s; validation accuracy "
            f"{percent(final.val_accuracy)}.\n"
            f"You gave {metrics.contributed:,} samples to {metrics.updates} updates, which is {percent(share)} of what "
            f"the swarm computed for them.\n"
            f"Weights: {self.folder.checkpoints}\n"
            f"Curves:  tensorboard --logdir {self.folder.path}"
        )
