"""One process of a run: checks everything, trains, and measures the result on the test split."""

import contextlib
import logging
import os
import random
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import Logger

from baseline_ddp.batch_finder import find_largest_batch
from baseline_ddp.batching import BatchPlan, largest_divisor, plan_batches
from baseline_ddp.checkpoints.best_checkpoint import BestCheckpointCopy
from baseline_ddp.checkpoints.snapshots import SnapshotIO, Snapshots, check_resumable, forget_after
from baseline_ddp.measuring.resources import ResourceMeter
from baseline_ddp.measuring.timing import DataClock, StepSplit, Stopwatch
from baseline_ddp.options import BaselineOptions
from baseline_ddp.processes import Processes
from baseline_ddp.results import deliver_best, finish
from baseline_ddp.stopping import StopRequest
from baseline_ddp.strategies import build_strategy, choose_strategy, cluster_environment, prepare_task
from recipe.config import Recipe
from recipe.data.peer_data import PeerData
from recipe.data.sampler import stable_seed
from recipe.errors import InputError
from recipe.model import check_samples
from recipe.registry import build_data, build_task
from recipe.remote_file import RemoteCopy, RemoteFile
from recipe.run_folder import RunFolder
from recipe.training.callbacks import StepMetrics
from recipe.training.checkpoint_io import BEST, best_checkpoint
from recipe.training.trainer import build_trainer, tensorboard_logger


def run(options: BaselineOptions, recipe: Recipe) -> int:
    """Trains, tests the best checkpoint and writes the run folder; returns the exit status.

    Raises:
        InputError: something that a person gave cannot work.
        RunFailed: the run cannot go on.
    """
    processes = Processes.from_environment()
    device = processes.device(options.compute.device)
    strategy_name = choose_strategy(options.compute, processes, device)
    size = options.compute.batch_size
    plan = plan_batches(recipe.target_batch_size, None if size == "auto" else size, processes.size)
    _silence_libraries()
    waiting = (options.compute.connect_timeout, options.compute.collective_timeout)
    complete = None
    with contextlib.nullcontext() if strategy_name == "single" else processes.connected(device, *waiting):
        try:
            session = Session(options, recipe, processes, device, strategy_name, plan)
            session.train()
        except RunComplete as found:
            complete = found
    # From here on the first process works alone; the others have nothing left to do and must not wait.
    if not processes.is_first:
        return 0
    if complete is None:
        return finish(session)
    if complete.remote is not None:
        deliver_best(complete.folder, complete.remote)
    print(complete, flush=True)
    return 0


class RunComplete(Exception):  # noqa: N818 (reads as what happened)
    """Raised if nothing is left to train and the results exist.

    Args:
        said: the message.
        folder: the run folder.
        remote: where the best checkpoint has to be copied; None for nowhere.
    """

    def __init__(self, said: str, folder: RunFolder, remote: RemoteFile | None) -> None:
        super().__init__(said)
        self.folder, self.remote = folder, remote


@dataclass(frozen=True)
class Beginning:
    """What the first process decides for all processes.

    Args:
        checkpoint: the checkpoint that the run resumes from; None for a new run.
        resumed_step: step of that checkpoint.
        note: what a person should know about this choice; may be empty.
        complete: why nothing is left to do; empty if something is.
    """

    run_id: str
    folder: Path
    checkpoint: Path | None = None
    resumed_step: int | None = None
    note: str = ""
    complete: str = ""


class Session:
    """One run in this process. The constructor checks everything that can be checked before the training.

    Args:
        options: the command line.
        recipe: what is trained.
        processes: this process among those of the run, connected.
        device: the device of this process.
        strategy_name: single, ddp or fsdp.
        plan: how an update's samples are divided; with `--batch-size auto`, it is replaced here.

    Raises:
        InputError: something that a person gave cannot work.
        RunComplete: in all processes, if the run that is resumed has ended.
    """

    def __init__(
        self,
        options: BaselineOptions,
        recipe: Recipe,
        processes: Processes,
        device: torch.device,
        strategy_name: str,
        plan: BatchPlan,
    ) -> None:
        self.options, self.recipe, self.processes, self.device = options, recipe, processes, device
        self.strategy_name, self.plan = strategy_name, plan
        self.precision = options.compute.precision or recipe.precision
        url = options.files.best_checkpoint_url
        self.remote = RemoteFile(url, "--best-checkpoint-url") if url else None
        self.beginning: Beginning = processes.first_does(self._begin)
        self.folder = RunFolder(self.beginning.folder)
        if self.beginning.complete:
            raise RunComplete(self.beginning.complete, self.folder, self.remote)
        self._seed()
        self.data = self._open_data()
        self.largest_batch = self._find_batch() if options.compute.batch_size == "auto" else None
        self.data.batch_size = self.plan.micro_batch
        self.communication = Stopwatch()
        self.task = prepare_task(strategy_name, recipe, options.compute, self.communication, device)
        if not options.compute.sync_batchnorm:
            check_samples(self.task.model, self.plan.micro_batch, recipe.model)
        self.split = StepSplit(DataClock(), self.communication)
        self.stop_request = StopRequest(options.stops.max_time)
        self.snapshots = Snapshots(self.folder.checkpoints / "last.ckpt", options.files.snapshot_every, strategy_name)
        self.best = best_checkpoint(self.folder.checkpoints)
        self.copy = None if self.remote is None else RemoteCopy(self.remote)
        self.trainer = self._trainer()
        self.seconds = 0.0

    def _begin(self) -> Beginning:
        """Prepares the run folder and chooses the checkpoint to resume from; called in the first process only."""
        files = self.options.files
        began = time.strftime("%Y%m%d-%H%M%S", time.localtime(self.processes.run_began()))
        run_id = files.run_id or f"{self.recipe.name}-{began}"
        name = files.name or f"{self.strategy_name}-{self.processes.size}"
        folder = RunFolder.create(files.output_dir, run_id, name)
        checkpoint, note = self._to_resume(folder)
        resumed_step = None if checkpoint is None else check_resumable(checkpoint, self.recipe, self.strategy_name)
        last_step = self.options.stops.max_steps or self.recipe.total_steps
        if resumed_step is not None and resumed_step >= last_step and folder.summary.exists():
            results = f"its results are in {folder.path / 'logbook.md'}"
            complete = f"Run {run_id} is complete at step {resumed_step} of {last_step}: {results}."
            return Beginning(run_id, folder.path.absolute(), complete=complete)
        forget_after(folder.metrics, -1 if resumed_step is None else resumed_step)
        if self.remote is not None:
            self.remote.check()
        folder.summary.unlink(missing_ok=True)  # its existence says that a run has ended
        folder.write_recipe(self.recipe)
        folder.write_environment()
        return Beginning(run_id, folder.path.absolute(), checkpoint, resumed_step, note)

    def _to_resume(self, folder: RunFolder) -> tuple[Path | None, str]:
        """The checkpoint that this run resumes from, or None, and a note about that for a person.

        A run that was killed early may have no snapshot, but a best checkpoint, which holds as much. A worker that
        torchrun has restarted resumes by itself, but only from a file that this run has written. torchrun also restarts
        a worker that refused its options, and an earlier run's checkpoint has to be refused each time.
        """
        snapshot, best = folder.checkpoints / "last.ckpt", folder.checkpoints / BEST
        resume, is_restarted = self.options.files.resume, self.processes.restarts > 0
        found = next((path for path in (snapshot, best) if path.exists()), None)
        if found is not None:
            is_own = is_restarted and found.stat().st_mtime >= self.processes.run_began()
            if not resume and not is_own:
                raise InputError(
                    f"{folder.path} holds a run already: add --resume, or choose another --run-id or --name."
                )
            return found, "" if found == snapshot else f"There is no snapshot yet; {best} holds as much."
        if not resume and not is_restarted:
            return None, ""
        if resume and not folder.recipe.exists():
            raise InputError(
                f"--resume finds no run in {folder.path}: give the --run-id, --name and --output-dir of before, or "
                "leave --resume out to begin one."
            )
        return None, "It was interrupted before its first snapshot: the run begins anew."

    def _seed(self) -> None:
        seed = stable_seed(self.recipe.seed, "process", self.processes.rank)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)

    def _open_data(self) -> PeerData:
        files, compute = self.options.files, self.options.compute
        data = build_data(self.recipe, files.data_dir, self.plan.micro_batch, num_workers=compute.num_workers)
        data.prepare_data()
        data.setup("fit")
        return data

    def _find_batch(self) -> int:
        """Sets the plan; returns the largest micro-batch that fits in all processes."""
        share = self.recipe.target_batch_size // self.processes.size
        limit = min(share, self.data.num_train_samples)
        data = build_data(self.recipe, self.options.files.data_dir, 1)
        task = build_task(self.recipe, self.options.compute.channels_last)
        found = self.processes.smallest(find_largest_batch(task, data, self.device, self.precision, limit))
        self.plan = plan_batches(self.recipe.target_batch_size, largest_divisor(share, found), self.processes.size)
        return found

    def _trainer(self) -> L.Trainer:
        on_gpu = self.device.type == "cuda"
        single_gpu = on_gpu and self.strategy_name == "single"
        strategy = build_strategy(self.strategy_name, self.options.compute, self.processes, self.communication)
        copies = [] if self.copy is None else [BestCheckpointCopy(self.copy, self.best)]
        checkpoints = [self.best, self.snapshots, *copies]
        return build_trainer(
            self.recipe,
            self.folder,
            accelerator="gpu" if on_gpu else "cpu",
            devices=[self.device.index] if single_gpu else self.processes.local_size,
            num_nodes=self.processes.nodes,
            strategy=strategy,
            callbacks=[self.split, self.stop_request, *checkpoints],
            max_steps=self.options.stops.max_steps,
            target_accuracy=self.options.stops.target_accuracy,
            accumulate_grad_batches=self.plan.accumulation,
            precision=self.precision,
            plugins=[SnapshotIO(), cluster_environment(self.strategy_name)],
            profiler=self.split.data,
            sync_batchnorm=self.options.compute.sync_batchnorm and self.strategy_name == "ddp",
            loggers=self._loggers(),
            step_metrics=StepMetrics(
                [self.split, ResourceMeter(self.device)],
                wants_to_stop=lambda: self.stop_request.time_is_up,
                is_interrupted=lambda: self.stop_request.interrupted,
            ),
        )

    def _loggers(self) -> list[Logger]:
        loggers: list[Logger] = []
        if "tensorboard" in self.options.files.logger_names:
            loggers.append(tensorboard_logger(self.folder, self.beginning.resumed_step))
        if "wandb" in self.options.files.logger_names:
            loggers.append(_wandb_logger(self.beginning.run_id, self.folder))
        return loggers

    def train(self) -> None:
        """Trains until a limit or a request stops it; the last state is then in `last.ckpt`.

        Raises:
            RunFailed: another process is lost, or the disk is full.
        """
        if self.processes.is_first:
            self._introduce()
        began = time.monotonic()
        resumed = self.beginning.checkpoint
        with self.stop_request.listening(speaks=self.processes.is_first):
            self.trainer.fit(self.task, self.data, ckpt_path=resumed, weights_only=True)
        self.seconds = time.monotonic() - began

    def _introduce(self) -> None:
        recipe, folder = self.recipe, self.folder.path
        print(
            f"{recipe.model} on {recipe.dataset}: {self.strategy_name} on {self.processes.size} process(es), "
            f"{self.device.type}, precision {self.precision}; samples per update {self.plan}.\n"
            f"Run folder: {folder}"
        )
        if self.beginning.note:
            print(self.beginning.note)
        if self.beginning.resumed_step is not None:
            kind = "snapshot" if self.beginning.checkpoint == self.snapshots.path else "best checkpoint"
            print(f"Going on from the {kind} of step {self.beginning.resumed_step}.")
        print(f"If it is interrupted: the same command with --run-id {self.beginning.run_id} --resume", flush=True)


def _wandb_logger(name: str, folder: RunFolder) -> Logger:
    """The logger for Weights & Biases. Without WANDB_API_KEY its files stay in the run folder, for `wandb sync`."""
    try:
        from lightning.pytorch.loggers import WandbLogger

        offline = "WANDB_API_KEY" not in os.environ
        return WandbLogger(
            project="swarm-vit", name=f"{name}/{folder.path.name}", save_dir=folder.path, offline=offline
        )
    except ImportError as error:
        raise InputError(
            "Weights & Biases is not installed: pip install wandb, or leave out --logger wandb."
        ) from error


def _silence_libraries() -> None:
    """Hides Lightning's messages to developers; warnings that a person can act on stay."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*")  # the metrics are already summed over all processes
