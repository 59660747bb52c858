"""Collaborative training of one model: add up gradients until the swarm has the target batch, average, go on together.

The trainer calls :meth:`Collaboration.contribute` after every backward pass. When that returns True the averaged
gradient lies in ``param.grad`` and an ordinary optimizer step follows; :meth:`Collaboration.finish_step` ends it. Every
peer starts from the same weights, sees the same average and makes the same update, so all stay equal without a second
averaging of the weights.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

import torch
from hivemind import DHT
from hivemind.utils import get_logger
from torch import nn

from recipe.errors import InputError
from swarm.averager import SwarmAverager
from swarm.gradients import GradientVector
from swarm.progress import ProgressTracker
from swarm.record import AVERAGING, TRAINING, WAITING
from swarm.rounds import (
    LINEAGE_BYTES,
    Behind,
    CollaborationOptions,
    Group,
    Refused,
    RoundFailed,
    RoundReport,
    ShortBatch,
    StepReport,
    Ticket,
)
from swarm.state import SharedState
from swarm.version import POLL_SECONDS, Version, wait_a_little

logger = get_logger(__name__)

RATE_SMOOTHING = 0.2


class Collaboration:
    """One peer's part in a swarm.

    :param dht: a running DHT
    :param namespace: run and recipe; only peers with the same one meet
    :param model: all its parameters and float buffers (BatchNorm's running statistics) are kept equal over the swarm
    :param optimizer: any torch optimizer over the model's parameters
    :param target_batch_size: samples over all peers per global update
    :param name: public name
    :param step: the step of the weights in ``model`` (a checkpoint's), 0 for a fresh start
    :param should_stop: asked while waiting; a true answer ends the wait
    """

    def __init__(
        self,
        dht: DHT,
        namespace: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        target_batch_size: int,
        name: str,
        step: int = 0,
        options: CollaborationOptions | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ):
        self.options = options or CollaborationOptions()
        self.target_batch_size = target_batch_size
        self._should_stop = should_stop
        self.version = Version(SharedState(model, optimizer), step)
        self._gradients = GradientVector(
            [param for param in self.version.state.optimized if param.requires_grad],
            [buffer for buffer in model.buffers() if buffer.is_floating_point()],
        )
        self.samples, self._loss_sum, self._rate = 0, 0.0, 0.0
        self.last_step: StepReport | None = None
        self.tracker = ProgressTracker(dht, namespace, target_batch_size, name)
        self.averager = SwarmAverager(self._gradients.wire, dht, namespace, self.version.export, target_batch_size)
        self.averager.set_step(step)

    @property
    def step(self) -> int:
        """Global updates that the weights have seen."""
        return self.version.step

    # ---- joining ----------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Become a member: take over the swarm's state if there is a swarm, else begin with this peer's own.

        :raises InputError: a swarm is there but nobody hands over its state
        """
        self.tracker.report(step=self.step)
        self.tracker.start()
        if not self.tracker.wait_refreshed(20):
            raise InputError("The DHT does not answer: check the connection to --initial-peers and try again.")
        if self.tracker.superiors:
            self._catch_up()
        else:
            self._begin_step()
        self._wait_for_peers()
        self.resume()

    def _wait_for_peers(self) -> None:
        """Peers that begin together wait for each other; whoever is here can take over the state meanwhile."""
        while len(self.tracker.members) < self.options.min_peers and not self._should_stop():
            self.tracker.report(urgent=True, phase=WAITING)
            self.tracker.wait_refreshed(1.0)
            if self.tracker.swarm_step > self.step:
                self._catch_up()

    def _catch_up(self) -> None:
        """Take over the state of the swarm; what this peer has accumulated on other weights is dropped."""
        self.tracker.report(samples=0)
        self.version.catch_up(self.tracker, self.averager, self.options.join_timeout_seconds, self._should_stop)
        self._begin_step()

    # ---- training ---------------------------------------------------------------------------------------------------

    def contribute(self, samples: int, loss: float) -> bool:
        """Add the gradients in ``param.grad`` (means over ``samples``) to this step.

        :returns: True when the step has ended: the averaged gradient is in ``param.grad``, update the weights and call
            :meth:`finish_step`. False: go on with the next micro-batch.
        """
        self._gradients.add(samples)
        self.samples += samples
        self._loss_sum += samples * loss if math.isfinite(loss) else 0.0
        self._measure_rate(samples)
        self.tracker.report(samples=self.samples, rate=self._rate, phase=TRAINING)
        if self.tracker.swarm_step > self.step:
            self._catch_up()
            return False
        if not (self.tracker.step_is_over or self.averager.waiting_step >= self.step):
            return False
        return self._end_step()

    def _measure_rate(self, samples: int) -> None:
        now = time.perf_counter()
        rate = samples / max(now - self._computing_since, 1e-9)
        self._computing_since = now
        self._rate = rate if self._rate == 0 else (1 - RATE_SMOOTHING) * self._rate + RATE_SMOOTHING * rate

    def resume(self) -> None:
        """A pause (validation, a checkpoint) ends now: it does not count for anybody's pace."""
        self._computing_since = time.perf_counter()
        self.tracker.resume()

    def _begin_step(self, group=frozenset()) -> None:
        self._gradients.reset()
        self.samples, self._loss_sum = 0, 0.0
        self._step_began = self._computing_since = time.perf_counter()
        self.averager.set_step(self.step)
        self.tracker.begin_step(self.step, group)

    def _end_step(self) -> bool:
        compute_seconds = time.perf_counter() - self._step_began
        self._drop_non_finite()
        while not self._should_stop():
            if len(self.tracker.members) == 1 and not self._has_company:
                return self._update_alone(compute_seconds, None)
            try:
                report = self._run_round()
            except ShortBatch as short:
                return self._compute_on(*short.args)
            except (Behind, Refused, RoundFailed) as error:
                if not self._recover(error):
                    return False
                continue
            if len(report.group.peer_ids) > 1:
                self._gradients.from_wire()
                return self._hand_over(compute_seconds, report)
            self.tracker.wait_refreshed(POLL_SECONDS * 5)  # nobody came: gone, or have they gone on without us?
            if self.tracker.swarm_step > self.step:
                self._catch_up()
                return False
            return self._update_alone(compute_seconds, report)
        return False

    def _compute_on(self, group: Group) -> bool:
        """The pace of the others was overestimated, or somebody's samples are lost: the step has not ended yet."""
        self.tracker.recount(group)
        self.resume()
        return False

    @property
    def _has_company(self) -> bool:
        """Somebody whose record has not reached us is at the door already."""
        return self.averager.has_company or self.averager.waiting_step >= self.step

    def _update_alone(self, compute_seconds: float, report: RoundReport | None) -> bool:
        if self.samples < self.target_batch_size:
            self.resume()
            return False
        self._gradients.average_alone(self.samples)
        return self._hand_over(compute_seconds, report)

    def _drop_non_finite(self) -> None:
        """One NaN would spoil everybody's weights; this peer only listens in this round instead."""
        if self._gradients.is_finite:
            return
        logger.warning(f"The gradients of step {self.step} are not finite: {self.samples} samples are dropped")
        self._gradients.drop()
        self.samples, self._loss_sum = 0, 0.0
        self.tracker.report(samples=0)

    def _run_round(self) -> RoundReport:
        """Meet and exchange once; what was accumulated stays until it is known to have succeeded."""
        self._gradients.to_wire(self.samples)
        self.tracker.report(urgent=True, phase=AVERAGING)
        loss = self._loss_sum / max(1, self.samples)
        ticket = Ticket(self.step, self.samples, self.tracker.own.client_mode, loss, self.version.lineage)
        members = self.tracker.members
        expected = {member.peer_id for member in members}
        options = self.options
        future = self.averager.run_round(
            ticket, members, options.matchmaking_seconds, options.averaging_timeout_seconds
        )
        leave_by = math.inf
        while not future.done():
            wait_a_little(future)
            if self._should_stop():
                leave_by = min(leave_by, time.monotonic() + 2)
                if time.monotonic() >= leave_by:
                    self.averager.cancel_round()
            now_expected = {member.peer_id for member in self.tracker.members}
            if now_expected != expected:
                expected = now_expected
                self.averager.expect(expected)
        try:
            report = future.result()
        except ShortBatch as short:
            self.tracker.missed(expected - set(short.args[0].peer_ids))
            raise
        self.tracker.missed(expected - set(report.group.peer_ids))
        return report

    def _recover(self, error: Exception) -> bool:
        """After a round that failed: True to try it again with the same samples, False to go on computing."""
        if isinstance(error, Refused):
            raise InputError(f"{error}: start it with the recipe of the swarm (give --initial-peers and nothing else).")
        if isinstance(error, RoundFailed):
            logger.warning(f"The round of step {self.step} failed and is tried again: {error}")
        self.tracker.wait_refreshed(POLL_SECONDS * 5)
        if isinstance(error, Behind) or self.tracker.swarm_step > self.step:
            self._catch_up()
            return False
        return True

    def _hand_over(self, compute_seconds: float, report: RoundReport | None) -> bool:
        """Put the average where the optimizer finds it; the step belongs to the trainer until :meth:`finish_step`."""
        self.version.lock.acquire()  # nobody may download a half-made update
        self._gradients.hand_over()
        self.last_step = StepReport(
            step=self.step + 1,
            num_peers=len(report.group.peer_ids) if report else 1,
            samples=report.group.samples if report else self.samples,
            own_samples=self.samples,
            loss=report.loss if report else self._loss_sum / self.samples,
            compute_seconds=compute_seconds,
            round=report,
        )
        return True

    def finish_step(self) -> None:
        """The weights have been updated: the next step begins."""
        report = self.last_step.round
        self.version.advance(report.group.group_id if report else os.urandom(LINEAGE_BYTES))
        self.version.lock.release()
        self._gradients.release()
        self._begin_step(frozenset(report.group.peer_ids) if report else frozenset())
        self.tracker.report(phase=TRAINING)

    def leave(self) -> None:
        """Say goodbye and stop; the others train on."""
        self.tracker.close()
        if self.averager.is_alive():
            self.averager.shutdown()
