"""Measures the swarm's weights on the test images now and then, as an option or the organiser's order says."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from hivemind.p2p import PeerID

from recipe.data.peer_data import PeerData
from recipe.errors import InputError
from recipe.training.loggers import JsonlFile
from recipe.training.task import ClassificationTask
from swarm.protocol.messages import Group
from swarm.protocol.notes import Score
from swarm.training.coordinator import Coordinator


class Evaluation(L.Callback):
    """Tests the weights right after a validation.

    At that moment other peers know that this one pauses, and the model has the swarm's weights. Nothing is chosen by
    the test images, or their accuracy would be better than that on unseen images. The validation says what is best.

    Args:
        every: global updates; each time so many are over, the next validation is followed by a pass over the test
            images. None: only if the organiser orders it
        validate_every: updates between two validations
        file: gets a line for each pass
        say: prints a line
    """

    def __init__(self, every: int | None, validate_every: int, file: Path, say: Callable[[str], None]):
        self._every, self._validate_every, self._file, self._say = every, validate_every, JsonlFile(file), say
        self._last_step, self._has_complained = 0, False
        self.best: dict[str, Any] | None = None
        """The pass over the weights with the highest validation accuracy; None before this peer's first pass."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last_step = trainer.global_step

    def on_validation_end(self, trainer: L.Trainer, pl_module: ClassificationTask) -> None:
        step, coordinator = trainer.global_step, getattr(trainer.strategy, "coordinator", None)
        is_last = 0 < trainer.max_steps <= step
        is_due = self._every is not None and (is_last or step // self._every > self._last_step // self._every)
        if is_due:
            self._last_step = step
        if not is_due and not (coordinator is not None and self._is_ordered(coordinator, step, is_last)):
            return
        began = time.perf_counter()
        try:
            result = evaluate(trainer, pl_module, trainer.datamodule)
        except Exception as error:
            if is_due and not isinstance(error, InputError):
                raise
            # A pass that the organiser orders must not end a training, for example if the test images are missing.
            if not self._has_complained:
                self._say(str(error) if isinstance(error, InputError) else f"The weights cannot be tested: {error!r}")
            self._has_complained = True
            return
        line = {"step": step, "val_top1": float(trainer.callback_metrics["val/top1"]), **result}
        line["seconds"] = time.perf_counter() - began
        self._file.append(line)
        if self.best is None or line["val_top1"] >= self.best["val_top1"]:
            self.best = line
        if coordinator is not None and math.isfinite(line["loss"]):
            coordinator.tracker.report(tested=Score(step, line["top1"], line["loss"]))
        self._say(
            f"Test images at step {step}: {100 * line['top1']:.1f} % right, {100 * line['top5']:.1f} % among the first "
            f"five, loss {line['loss']:.3f}; {line['images']:,} images in {line['seconds']:.1f} s."
        )

    def _is_ordered(self, coordinator: Coordinator, step: int, is_last: bool) -> bool:
        """Whether the organiser wants these weights tested, and by this peer.

        All peers validate after the same updates, so all of them come to the same answer, also new joiners.
        """
        every, last = coordinator.control.orders.evaluate_every(step), coordinator.last_step
        scheduled = step - step % self._validate_every
        is_due = every and (is_last or scheduled // every > (scheduled - self._validate_every) // every)
        if not is_due or last is None or last.step != step:  # the last: this peer has not made this update itself
            return False
        return last.round is None or drawn(last.round.group) == coordinator.tracker.peer_id


def drawn(group: Group) -> PeerID:
    """Return the member that tests the weights of this round: one that is at least as fast as the median, by lot.

    All members of the round know the same group, and its name is the lot. So all draw the same member without a
    message.
    """
    brought = {peer: ticket.samples for peer, ticket in group.members}
    usual = statistics.median_low([samples for samples in brought.values() if samples] or [0])
    able = sorted(peer for peer, samples in brought.items() if samples >= usual)
    return able[int.from_bytes(group.group_id) % len(able)]


def evaluate(trainer: L.Trainer, task: ClassificationTask, data: PeerData) -> dict[str, float | int]:
    """Make one pass over the test images with the present weights of the model, which has to be in evaluation mode.

    Returns:
        images, loss, top1 and top5
    """
    for index, batch in enumerate(data.test_dataloader()):
        moved = trainer.strategy.batch_to_device(data.on_before_batch_transfer(batch, 0), task.device)
        with trainer.precision_plugin.test_step_context():
            task.test_step(moved, index)
    found = task.take_test_results()
    return {name: found[name] for name in ("images", "loss", "top1", "top5")}
