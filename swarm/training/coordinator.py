"""Collaborative training of one model: add up gradients until the swarm has the target batch, average, make an update.

The trainer calls `Coordinator.begin_backward` before and `Coordinator.contribute` after every backward
pass. When that returns True, an ordinary optimizer step follows within `Coordinator.updating`, which puts the
averaged gradient into `param.grad`. Every peer starts from the same weights, gets the same average and makes the
same update, so all stay equal without a second averaging of the weights.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hivemind import DHT
from hivemind.utils import get_logger

from recipe.errors import InputError
from recipe.training.replay import Replay
from swarm.membership.progress_record import TRAINING, VALIDATING, WAITING
from swarm.protocol.auto_mode import Plan
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.round_report import RoundEvent, StepReport
from swarm.state_sync.training_state import SharedState
from swarm.training.audit.work_log import Loss
from swarm.training.averaging_mode import Averaging
from swarm.training.gradient_buffer import GradientVector, averaged_tensors
from swarm.training.island.lead import Island
from swarm.training.joining.attester import Attester
from swarm.training.joining.catch_up import CatchUp
from swarm.training.joining.follower import Follower
from swarm.training.joining.healers import Healers
from swarm.training.joining.listener import Listener
from swarm.training.joining.probation import Probation
from swarm.training.options import CoordinatorOptions
from swarm.training.own_peer import OwnPeer
from swarm.training.rounds.own_round import OwnRound
from swarm.training.rounds.own_update import OwnUpdate
from swarm.training.rounds.pause import Pause
from swarm.training.rounds.recovery import NEWS_SECONDS, Recovery
from swarm.training.rounds.step_orders import StepOrders
from swarm.training.undo.going_back import GoingBack

FIRST_RECORDS_SECONDS = 60
"""Longest wait for the first records of other peers. A DHT node that names a dozen silent ones costs more than 30 s."""

logger = get_logger(__name__)


class Coordinator:
    """One peer's part in a swarm.

    Args:
        dht: a running DHT
        namespace: names the run and its recipe; only peers with the same namespace meet
        model: all its parameters and float buffers (BatchNorm's running statistics) are kept equal over the swarm
        optimizer: over the model's parameters; its statistics are tensors of their shapes, or scalar tensors
        target_batch_size: samples over all peers per global update
        name: public name
        step: the step of the weights in `model` (a checkpoint's), 0 for a fresh start
        options: this peer's own settings
        should_stop: called while waiting; a true answer ends the wait
        averaging: how the swarm averages; equal on all peers
        apply: makes an update that other peers have already made, with the average in `param.grad`
        max_step: the step at which the run is over; a claim to be further is not believed
        plan: with `--averaging auto`, the plan that this peer followed when it last took part
    """

    def __init__(
        self,
        dht: DHT,
        namespace: str,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        target_batch_size: int,
        name: str,
        *,
        step: int,
        options: CoordinatorOptions,
        should_stop: Callable[[], bool],
        averaging: Averaging,
        apply: Callable[[], None],
        max_step: int,
        plan: Plan | None,
    ):
        self.options, self.averaging, self._should_stop, self._apply = options, averaging, should_stop, apply
        self.waited_seconds = 0.0  # for other peers, before this peer began to train
        self.on_round: Callable[[RoundEvent], None] = lambda event: None
        """Called for each update, also one made alone (then under the version's lock), and each round that failed."""
        self.on_update: Callable[[StepReport], None] = lambda report: None
        """Called for each average that is applied."""
        self.is_to_leave: Callable[[], bool] = lambda: False
        """Called while the peer joins, or waits without computing: whether its owner's limits make it leave."""
        vector, state = self._share(model, optimizer)
        own = OwnPeer.of(
            dht,
            namespace,
            name,
            vector,
            state,
            step=step,
            target_batch_size=target_batch_size,
            max_step=max_step,
            options=options,
            averaging=averaging,
            plan=plan,
            should_stop=should_stop,
        )
        self.version, self.tracker, self.averager, self.control = own.version, own.tracker, own.averager, own.control
        self._gradients, self._contribution, self._attendance = own.gradients, own.contribution, own.attendance
        self._attester = Attester(self.version, self._gradients.weights[0].device)
        self._probation = Probation(self.version, self.tracker, self._attester)
        # The peer's rounds, and the updates that come out of them.
        self._step_orders = StepOrders(own)
        self._going_back = GoingBack(self.version, averaging.rule.clips, options.state_folder)
        self._round = OwnRound(
            own, step_orders=self._step_orders, going_back=self._going_back, tell=lambda event: self.on_round(event)
        )
        self._update = OwnUpdate(
            own, breaker=self._going_back.breaker, probation=self._probation, tell=self._tell_of_update
        )
        # Catching up with peers that are further.
        self._listener = Listener(own)
        self._follower = Follower(own, apply=self._make_up, listener=self._listener, probation=self._probation)
        self._healers = Healers(own, self._probation)
        self.catching_up = CatchUp(
            own, self._round, self._listener, self._follower, self._healers, self._probation, self._may_wait
        )
        self._pause = Pause(own, self._step_orders, self._round, self.catching_up, self._may_wait)
        self._recovery = Recovery(
            own, self._round, self._step_orders, self._going_back, self._attester, self.catching_up, self._healers
        )

    def _share(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[GradientVector, SharedState]:
        """The vector that rounds average, and the state that joiners download."""
        vector = GradientVector(*averaged_tensors(model, optimizer), self.averaging.overlaps)
        return vector, SharedState(model, [optimizer])

    @property
    def step(self) -> int:
        """Global updates that the weights have seen."""
        return self.version.step

    @property
    def is_averaging(self) -> bool:
        """Whether a round is under way."""
        return self._round.is_running

    @property
    def last_step(self) -> StepReport | None:
        """The report of the last global update; None before the first one."""
        return self._update.last_step

    @property
    def target(self) -> BatchTarget:
        """Samples over all peers for the update that ends the present step."""
        return self._step_orders.target

    @property
    def samples(self) -> int:
        """Samples that this peer has computed for the present step."""
        return self._contribution.samples

    def lead(self, island: Island, model: torch.nn.Module) -> None:
        """Make this process the first of a peer of several processes."""
        self._contribution.lead(island, model)

    def check_work(self, replay: Replay, loss: Loss) -> None:
        """Take part in checks, in which members recompute random parts of each other's work."""
        self._contribution.check_work(replay, loss, self.averaging.overlaps and not self.options.helps)

    # ---- joining and catching up ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the averaging process, which answers other peers from now on.

        Raises:
            InputError: the process died while it started
        """
        self.averager.start()
        self.averager.set_step(self.step, self.version.lineage)

    def join(self) -> None:
        """Join the swarm, after `start`: take over the swarm's state if there is one, else begin with the own state.

        Raises:
            InputError: the DHT does not answer, or there is a swarm but no peer hands over its state
        """
        self.tracker.holds(self.step, self.version.lineage)
        self._step_orders.follow()
        self.tracker.start()
        if not self.tracker.exchange.wait_refreshed(FIRST_RECORDS_SECONDS):
            raise InputError("The DHT does not answer: check the connection to --initial-peers and try again.")
        if self.tracker.swarm.superiors:
            self.catching_up.join()
        else:
            self.control.begin(self.step)
            self._round.begin_step()
        self._attester.begin()
        self._wait_for_peers()
        self._going_back.begin()
        self._round.resume()
        self.catching_up.go_on_with_the_round()

    def _wait_for_peers(self) -> None:
        """Wait until `min_peers` peers that train are there. If one of them is ahead, take over its state meanwhile."""
        began = time.perf_counter()
        while self.tracker.swarm.num_trainers < self.options.min_peers and self._may_wait():
            self.tracker.report(urgent=True, phase=WAITING)
            self.tracker.exchange.wait_refreshed(1.0)
            if self.tracker.swarm.latest_step > self.step:
                self.catching_up.join()
            self.waited_seconds = time.perf_counter() - began

    def _may_wait(self) -> bool:
        return not (self._should_stop() or self.is_to_leave())

    # ---- every micro-batch ------------------------------------------------------------------------------------------

    def begin_micro_batch(self) -> bool:
        """Begin a micro-batch, in all processes of this peer, on the present weights; always return True."""
        self._contribution.begin_micro_batch()
        return True

    def begin_backward(self, samples: int) -> None:
        """Prepare for the backward pass that comes next, whose gradients are means over `samples`."""
        self._contribution.begin_backward(samples)

    def contribute(self, samples: int, loss: torch.Tensor | float) -> bool:
        """Count a micro-batch after its backward pass, and begin or end a round if it is time.

        Args:
            samples: samples of the micro-batch
            loss: mean loss over them, without dimensions

        Returns:
            True when an average is there: update the weights within `updating`. False: go on with the next micro-batch.
        """
        self._count(samples, loss)
        return self._synchronise()

    def attend(self) -> bool:
        """Take part without a gradient: a helper calls this in place of `contribute`.

        Returns:
            True when an average is there: update the weights within `updating`. False: call this again after the next
            event
        """
        self._probation.review()
        if self.catching_up.is_behind:
            self.catching_up.report()
        else:
            self.tracker.report(phase=TRAINING)
        return self._synchronise()

    def _count(self, samples: int, loss: torch.Tensor | float) -> int:
        """Count a micro-batch and report it; return its samples in all processes of this peer."""
        self._attendance.look()
        samples = self._contribution.add(samples, loss)
        self._probation.review()
        if self._probation.gives_nothing:
            self._contribution.withhold()
        if self.catching_up.is_behind:
            self.catching_up.report()
        elif self._probation.gives_nothing:
            self.tracker.report(samples=0, rate=0.0, phase=TRAINING)
        else:
            self.tracker.report(samples=self.samples, rate=self._contribution.samples_per_second, phase=TRAINING)
        return samples

    def _synchronise(self) -> bool:
        """Begin or end a round, if it is time; return True when there is an average to apply."""
        if self._round.is_running:
            self._round.expect()
            if self._round.is_done or self._is_over or self._step_orders.has_nothing_to_compute:
                return self._end_round()
            return False
        if self.catching_up.keep_up():
            return False
        if self._step_orders.has_nothing_to_compute or not self._is_over:
            return False
        self._contribution.finish()
        if not self._contribution.is_finite and self._drop_unusable():
            return False
        signals = self.averager.signals
        is_awaited = signals.has_company or signals.waiting_step >= self.step  # by peers that no record shows yet
        if len(self.tracker.swarm.members) == 1 and not is_awaited:
            return self._update_alone()
        self._round.begin()
        if self.averaging.overlaps and not self._step_orders.has_nothing_to_compute:
            return False
        return self._end_round()

    @property
    def _is_over(self) -> bool:
        """Whether the samples of the present step are complete, or a peer waits for this one to end the step."""
        swarm, waiting_step = self.tracker.swarm, self.averager.signals.waiting_step
        return swarm.step_is_over or (waiting_step >= swarm.own.round and not swarm.has_just_met)

    def _drop_unusable(self) -> bool:
        """Drop gradients that are not finite: this peer gives nothing to the round, or takes over a state instead.

        Returns:
            whether no round may begin now
        """
        logger.warning(f"The gradients of step {self.step} are not finite: {self.samples} samples are dropped")
        is_often = self._contribution.drop()
        self.tracker.report(samples=0, loss=math.nan)
        self._going_back.breaker.note_unusable()
        donor = self._healers.find_healer(self._follower.last_donor) if is_often else None
        if donor is None:
            return False
        self.catching_up.begin(donor)
        return True

    # ---- pauses, validation, checkpoints ----------------------------------------------------------------------------

    def wait_while_paused(self) -> None:
        """Wait while the organiser has paused the run. The trainer calls this before each micro-batch.

        Where a round is under way, this does not wait: the `contribute` of an earlier micro-batch has to end it first.
        """
        self._step_orders.follow()
        # Catching up would forget a running round, which would go on and average what is written for the next one.
        if not self._round.is_running:
            donor = self._step_orders.donor_of_missed()
            if donor is not None:
                self.catching_up.begin(donor)
        if self._step_orders.is_paused:
            self._pause.wait()

    def before_validation(self) -> None:
        """Report that this peer validates. The model holds the swarm's weights until `after_validation`."""
        self.tracker.report(phase=VALIDATING)

    def after_validation(self) -> None:
        """Go on training."""
        self._round.resume()

    def shared(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's state as a checkpoint keeps it: with the weights of the swarm."""
        return state_dict

    def outer_state(self) -> dict[str, Any]:
        """The state of the outer optimizer as a checkpoint keeps it; empty without one."""
        return {}

    def load_outer_state(self, state: dict[str, Any]) -> None:
        """Go on with this state of the outer optimizer; this comes before the peer joins."""

    # ---- how a round ends -------------------------------------------------------------------------------------------

    def _end_round(self) -> bool:
        """Wait for the round to end; return True if there is an average to apply."""
        try:
            ended = self._round.wait()
            if ended.error is not None:
                self._recovery.recover(ended.error)
        finally:  # this time was no computing, and no peer has waited for this one
            self._contribution.resume()
            self._attendance.resume()
        if ended.error is not None:
            return False
        if ended.found_nobody:
            return self._go_on_without_others()
        self._contribution.check(ended.report.to_check)
        self._gradients.from_wire()
        own = ended.round
        self._update.prepare(own.ticket, own.work.seconds, own.blocked_seconds, ended.report, self._follower.last_donor)
        return True

    def _go_on_without_others(self) -> bool:
        """Act on a round to which no other peer came; return True if this peer makes the update alone.

        The other peers have left, or they have gone on without this one: then it catches up.
        """
        self._round.take_back()
        self.tracker.exchange.wait_refreshed(NEWS_SECONDS)
        self._contribution.resume()  # this wait was no computing
        if self.tracker.swarm.latest_step > self.step:
            self.catching_up.begin(is_told=True)
            return False
        self._contribution.finish()  # also what other processes of this peer have computed meanwhile
        return self._update_alone()

    def _update_alone(self) -> bool:
        """Make the update alone, if this peer may and has enough samples; return True if there is an average to apply.

        Samples that were computed while it waited for other peers in vain count as well.

        Raises:
            InputError: the averaging process has been dead for some time: no peer could join this one any more
        """
        self.averager.check_alive()
        # If other peers agree with each other on other weights, this peer must not advance: it would look furthest.
        may_not = self.tracker.is_odd_one_out or self._follower.waits_for_others
        if may_not or not self._step_orders.target.is_reached_by(self.samples) or not self._contribution.is_finite:
            self._round.resume()
            return False
        ticket = self._round.ticket()
        computed_seconds = self._contribution.give_alone()
        self._update.show()
        self._update.prepare(ticket, computed_seconds, 0.0, None, self._follower.last_donor)
        return True

    # ---- updates ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """A context for the optimizer step after a true `contribute`: no peer can download a half-made update.

        Then the next step begins, or goes on if it has begun already.
        """
        with self.version.lock, self._contribution.updating():
            began = time.perf_counter()
            self._gradients.hand_over()
            yield
            self._contribution.note_update()
            self._update.applied(time.perf_counter() - began)
            self._attendance.note_update()
            self._attester.note_update()
            self._probation.note_update()
        self.go_on()

    def _tell_of_update(self, step: StepReport) -> None:
        self.on_round(RoundEvent.of_update(step))
        self.on_update(step)

    def go_on(self) -> None:
        """Begin the next step, or go on with it if it has begun already."""
        self._gradients.release()
        if self.tracker.own.ahead:
            self._round.forget()
            self._contribution.resume()
            self.tracker.end_ahead(self.step, self.version.lineage, self.samples, self._update.group)
            self._step_orders.follow()
        else:
            self._round.begin_step(self._update.group)
        if self._update.healer is not None:
            self.catching_up.begin(self._update.healer)

    def _make_up(self) -> None:
        """Make an update that other peers have made, by the orders that they had: look at the newest orders first."""
        self._step_orders.follow()
        self._apply()
        self._contribution.note_update()

    def leave(self) -> None:
        """Leave the swarm and stop; the other peers train on."""
        self._contribution.leave()
        self.catching_up.cancel()
        self._attester.close()
        self._listener.leave()
        self._round.leave()
        self.tracker.close()
        if self.averager.is_alive():
            self.averager.shutdown()
