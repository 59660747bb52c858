"""Snapshots: all that a killed run needs to resume as if nothing had happened, in one file."""

import json
import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint

from baseline_ddp.processes import RunFailed
from recipe.config import Recipe
from recipe.errors import InputError
from recipe.run_folder import read_metrics, whole_file
from recipe.training.checkpoint_io import AtomicCheckpointIO, checkpoint_recipe, read_checkpoint


class SnapshotIO(AtomicCheckpointIO):
    """Ends the run when the disk is full or gone, because the run could not be resumed from where it is."""

    def failed(self, path: Path, error: OSError) -> None:
        """Raise RunFailed; the old snapshot stays."""
        raise RunFailed(
            f"The snapshot {path} could not be written ({error.strerror}): make room and go on with --resume. "
            f"{'The one before it is still there' if path.exists() else 'There is none before it'}."
        ) from error


class Snapshots(Checkpoint):
    """Writes the snapshot `last.ckpt` after every `every` updates, and at the end.

    Lightning saves model, optimizer, schedule, loss scaler, position in the data, step and timer. This callback adds
    the strategy, and the states of the random generators of all processes. If an update is also validated, the snapshot
    comes after that, so that a resumed run has the same validations. Only a run that is interrupted leaves out the
    validation of its last update, which may take longer than is left until it is killed. A run may resume with another
    number of processes and other micro-batches: the size of updates does not change.
    """

    def __init__(self, path: Path, every: int, strategy_name: str) -> None:
        self.path, self.every, self.strategy_name = path, every, strategy_name
        self._saved_step = -1
        self._random_state: dict[str, Any] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Notes that the step of a resumed run is saved already, and restores the random generators."""
        self._saved_step = trainer.global_step
        if self._random_state is not None:
            set_random_state(self._random_state)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves if a snapshot is due after this micro-batch, unless a validation follows at once."""
        if trainer.val_check_batch != batch_idx + 1:
            self._save_if_due(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves if a snapshot is due."""
        self._save_if_due(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves the last state of the training."""
        if trainer.global_step != self._saved_step or not self.path.exists():
            self._save(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The strategy and the random states of all processes, by rank; called in all processes at once."""
        states = [random_state()]
        if dist.is_initialized() and dist.get_world_size() > 1:
            states *= dist.get_world_size()
            dist.all_gather_object(states, random_state())
        return {"strategy": self.strategy_name, "random_states": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps this process's random states until the start; ranks that the snapshot does not have get none."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        if rank < len(state_dict["random_states"]):
            self._random_state = state_dict["random_states"][rank]

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adjusts Lightning's count of micro-batches, so that the next update begins with its first micro-batch.

        With another number of processes or another micro-batch, an update takes another number of micro-batches.
        Lightning goes by the number of all of them, and would end the next update early.
        """
        counts = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
        more = checkpoint["global_step"] * trainer.accumulate_grad_batches - counts["ready"]
        counts.update({name: count + more for name, count in counts.items()})

    @property
    def state_key(self) -> str:
        """Name under which Lightning keeps the state."""
        return "Snapshots"

    def _save_if_due(self, trainer: L.Trainer) -> None:
        if trainer.global_step != self._saved_step and trainer.global_step % self.every == 0:
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        self._saved_step = trainer.global_step
        trainer.save_checkpoint(self.path)


def random_state() -> dict[str, Any]:
    """The states of torch's, numpy's and Python's generators, as plain tensors, numbers and strings."""
    name, keys, *rest = np.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],
        "python": random.getstate(),
    }
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_state(state: dict[str, Any]) -> None:
    """Restores the generators to a state that `random_state` returned."""
    torch.set_rng_state(state["torch"].cpu())
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def check_resumable(path: Path, recipe: Recipe, strategy_name: str) -> int:
    """The step of a snapshot from which this run can resume.

    Raises:
        InputError: the snapshot is missing, damaged, of another recipe, or of a strategy that orders the optimizer's
            state differently.
    """
    checkpoint = read_checkpoint(path)
    if difference := checkpoint_recipe(checkpoint, path).difference(recipe):
        shown = "; ".join(f"{field}: there {there}, now {now}" for field, (there, now) in difference.items())
        raise InputError(f"{path} is of another recipe ({shown}): give the same options, or another --run-id.")
    saved_by = checkpoint.get("callbacks", {}).get("Snapshots", {}).get("strategy")
    if (saved_by == "fsdp") != (strategy_name == "fsdp"):
        raise InputError(
            f"{path} was saved by --strategy {saved_by} and does not fit {strategy_name}: give --strategy {saved_by}."
        )
    return checkpoint["global_step"]


def forget_after(metrics: Path, step: int) -> None:
    """Drops the lines after `step`, because a resumed run will make these steps again."""
    if not metrics.exists():
        return
    kept = [line for line in read_metrics(metrics) if (line.get("step") or 0) <= step]
    with whole_file(metrics) as file:
        file.writelines(f"{json.dumps(line)}\n".encode() for line in kept)
