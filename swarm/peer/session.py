"""One peer's training in one run: data, model, trainer, run folder and summary."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import psutil
import torch
from hivemind import DHT
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from recipe.config import Recipe
from recipe.durations import parse_duration
from recipe.errors import InputError
from recipe.run_folder import RunFolder
from recipe.training.callbacks import StepMetrics
from recipe.training.checkpoint_io import AtomicCheckpointIO
from recipe.training.trainer import build_trainer
from swarm.averaging.slow_members import USUAL_MBPS
from swarm.ledger.ledger import Ledger
from swarm.membership.run_manifest import RunManifest
from swarm.network.home.interfaces import own_addresses
from swarm.peer.callbacks.checkpoint_upload import CheckpointUpload
from swarm.peer.callbacks.evaluation import Evaluation
from swarm.peer.callbacks.first_contribution import FirstContribution
from swarm.peer.callbacks.home_pause import HomePause
from swarm.peer.callbacks.ledger_keeper import LedgerKeeper
from swarm.peer.callbacks.plan_keeper import PlanKeeper
from swarm.peer.callbacks.profile_reporter import ProfileReporter
from swarm.peer.callbacks.reachable_peer_check import ReachablePeerCheck
from swarm.peer.callbacks.slow_line_advice import SlowLineAdvice
from swarm.peer.callbacks.status_reporter import StatusReporter
from swarm.peer.callbacks.swarm_metrics import SwarmMetrics
from swarm.peer.callbacks.time_limit import TimeLimit
from swarm.peer.callbacks.traffic_limit import TrafficLimit
from swarm.peer.checkpoints import kept_checkpoints, save_own, sweep_checkpoints
from swarm.peer.helping.helper import NoStepMetrics
from swarm.peer.island.computing import device_options
from swarm.peer.membership.entry import Entry
from swarm.peer.options import PeerOptions
from swarm.peer.own_profile import how_reached, software_version, together
from swarm.peer.startup_timer import StartupTimer
from swarm.peer.status import Status, how_to_use, percent, tensorboard_command
from swarm.peer.supervisor import Supervisor
from swarm.peer.workload import prepare_data, prepare_workload
from swarm.protocol.admission import OPEN
from swarm.protocol.notes import Profile
from swarm.runtime.line_use import LineUse
from swarm.runtime.processes import kill
from swarm.training.averaging_mode import Averaging
from swarm.training.helper import HelperStrategy
from swarm.training.island.channel import Channel
from swarm.training.island.lost import IslandLost
from swarm.training.micro_batch.finder import largest_sensible
from swarm.training.micro_batch.review import MicroBatchReview
from swarm.training.options import CoordinatorOptions
from swarm.training.strategy import SwarmStrategy

logger = logging.getLogger(__name__)

AVERAGING_PROCESS = "The averaging process"


class Session:
    """Prepares and runs one peer's training in one run.

    The constructor finds everything that can be wrong before the training: the folder, the data, the device, the
    micro-batch.

    Args:
        options: this peer's own settings
        name: public name
        dht: a running DHT; stays running
        manifest: what is trained
        joins: other peers train already: an unreadable checkpoint of this peer is then no error
        addresses: where this peer can be reached
        stop_requested: when set, this peer leaves at the next opportunity
        clock: times the start
        on_death: called, from another thread, with the name of a process of this peer that has died by itself
        entry: this peer's membership, and how it got it
        channel: to the other processes of this peer; None if it is one process

    Raises:
        InputError: something that a person gave cannot work
    """

    def __init__(
        self,
        options: PeerOptions,
        name: str,
        dht: DHT,
        manifest: RunManifest,
        joins: bool,
        addresses: tuple[str, ...],
        stop_requested: threading.Event,
        clock: StartupTimer,
        on_death: Callable[[str], None],
        entry: Entry,
        channel: Channel | None = None,
    ):
        self.channel, self.num_processes = channel, 1 if channel is None else channel.size
        self.options, self.name, self.dht, self.joins = options, name, dht, joins
        self.stop_requested, self.addresses, self.clock = stop_requested, addresses, clock
        self.recipe: Recipe = manifest.recipe
        self.averaging = Averaging.of(self.recipe)
        self.total_steps = options.leaving.max_steps or self.recipe.total_steps
        self.admission = OPEN if entry.membership is None else entry.membership.new_admission()
        """Which peers may take part, and what the organiser orders, as the trainer knows it."""
        self._check_options()
        self.folder = RunFolder.create(options.machine.output_dir, manifest.run_id, name)
        self._check_folder()
        identity = dht.peer_id.to_base58()
        own_data = prepare_data(options, manifest, self.folder, identity, joins)
        self.manifest = entry.signed(own_data.manifest)
        self._entry = entry
        self.upload = self._upload()
        self.work = prepare_workload(options, self.recipe, own_data, identity, joins, channel)
        self.why_ended: InputError | None = None
        """Why this peer may not take part any more; None as long as it may."""
        self._begin_folder()
        entry.keep(self.admission, self.manifest, self.folder)
        self.metrics = SwarmMetrics(self.folder.rounds)
        run, protocol = self.manifest.key_prefix, self.manifest.protocol
        self.ledger = Ledger(self.folder.ledger, run, protocol, dht.records, name, self.admission)
        self.company = ReachablePeerCheck(dht.client_mode, stop_requested)
        self.line = LineUse(options.connection.max_upload_mbps or math.inf)
        self.traffic = TrafficLimit(self.line, options.leaving.max_traffic_gb, stop_requested)
        self.pause = HomePause(lambda: options.leaving.why_spared, stop_requested)
        self.profile = self._profile()
        self.strategy = self._strategy()
        self._processes = self._own_processes()
        self._averaging: psutil.Process | None = None
        self._on_death = on_death
        self.supervisor = Supervisor(self._current_processes, self._part_died, self.folder.leftovers, stop_requested)
        self.awaits_company = not joins and not self.work.helps and options.patience.min_peers > 1
        """Whether this peer prints a join line and does not train before other peers have joined."""
        first = self._first_status()
        self.reporter = StatusReporter(self.folder, first, self.metrics, stop_requested, self.awaits_company)
        self.review = self._review()
        self.evaluation = None if self.work.helps else self._evaluation()

    def _check_options(self) -> None:
        options = self.options
        options.check_steps(self.admission.lists.orders.total_steps(math.inf, self.recipe.total_steps))
        options.check_micro_batch(self.recipe.target_batch_size)
        if options.role.helps and (options.leaving.target_accuracy or options.results.evaluate_every_steps):
            raise InputError("A helper measures nothing: leave out --target-accuracy and --evaluate-every-steps.")
        if options.machine.device == "cuda" and not torch.cuda.is_available():
            raise InputError("There is no CUDA device that torch can use: give --device cpu, or install a CUDA torch.")

    def _profile(self) -> Profile:
        """What other peers are told about this machine."""
        device = "" if self.options.machine.hide_device else together(self.work.devices)
        addresses = () if self.dht.client_mode else self.addresses
        return Profile(device, software_version(), how_reached(addresses, own_addresses()))

    def _own_processes(self) -> dict[str, psutil.Process]:
        """Child processes by name, without the averaging process, which is started later."""
        processes = {"The DHT process": psutil.Process(self.dht.pid)}
        processes |= {process.name(): process for process in self.dht.processes}
        if self._entry.enrolment_process is not None:
            processes["The enrolment server"] = self._entry.enrolment_process
        return processes

    def _upload(self) -> CheckpointUpload | None:
        if self.options.results.upload_to is None:
            return None
        upload = CheckpointUpload(self.options.results.upload_to, self.manifest.run_id, self.name)
        if not self.clock.again:  # a storage that fails for an hour must not end a training that has begun
            upload.check()
        return upload

    def _first_status(self) -> Status:
        return Status(
            name=self.name,
            run_id=self.manifest.run_id,
            phase="joining",
            total_steps=self.total_steps,
            target_batch_size=self.recipe.target_batch_size,
            addresses=self.addresses,
        )

    def _begin_folder(self) -> None:
        """Remove what a crash may have left, and write down what is trained; a full disk only causes a warning."""
        self.folder.summary.unlink(missing_ok=True)  # it would say that the run has ended
        for half in self.folder.path.rglob(".*.tmp"):
            half.unlink(missing_ok=True)
        if self.work.own.resumed_step is not None:
            sweep_checkpoints(self.folder.checkpoints, self.work.own.resumed_step)
        try:
            self.folder.write_recipe(self.recipe)
            self.folder.write_environment()
        except OSError as error:
            self._not_written(error)

    def _not_written(self, error: OSError) -> None:
        logger.warning(f"{self.folder.path} cannot be written ({error.strerror}): make room.")

    def _check_folder(self) -> None:
        """Raises InputError: the folder holds a run of another recipe, which must not be continued by accident"""
        if not self.folder.recipe.exists():
            return
        try:
            before = Recipe.from_json(self.folder.recipe.read_bytes())
        except InputError:
            return
        if difference := before.difference(self.recipe):
            shown = "; ".join(f"{field}: there {there}, now {now}" for field, (there, now) in difference.items())
            raise InputError(
                f"{self.folder.path} holds a run of another recipe ({shown}): choose another --run-id, --public-name "
                "or --output-dir."
            )

    def train(self) -> str:
        """Train until the run ends or this peer leaves.

        Returns:
            a few sentences for the volunteer

        Raises:
            InputError: no peer is left that this client-mode peer could call, or this peer may not take part any more;
                its weights are saved
        """
        trainer = self._trainer()
        _silence_lightning()
        self.clock.ends("data and model")
        outcome = "failed"
        try:
            # Lightning raises it after SIGTERM; this peer leaves in order, as after Ctrl-C
            with contextlib.suppress(SIGTERMException):
                trainer.fit(self.work.task, self.work.own.data, ckpt_path=self.work.own.checkpoint)
            if self._has_weights(trainer.global_step):
                trainer.save_checkpoint(self.folder.checkpoints / "last.ckpt", weights_only=False)
            outcome = self.outcome(trainer)
        except Exception as error:
            if isinstance(error, IslandLost):
                outcome = "starting again"
                if self.strategy.holds_all:
                    trainer.save_checkpoint(self.folder.checkpoints / "last.ckpt", weights_only=False)
            if self.supervisor.found is None:
                raise
            outcome = "starting again"  # the error follows from the death of that process
        finally:
            seconds = self.metrics.seconds
            final = self.reporter.finish(outcome)
        try:
            self._write_summary(final, seconds)
        except OSError as error:
            self._not_written(error)
        if self.upload is not None and self.supervisor.found is None:
            self.upload.finish(self.folder.summary, self.reporter.say)
        if self.why_ended is not None:
            raise self.why_ended
        if complaint := self.company.complaint:
            raise InputError(complaint)
        return self._farewell(final, seconds)

    def _has_weights(self, step: int) -> bool:
        """Whether this peer has weights of the run.

        A joiner that leaves before it has the swarm's weights has none. From its own initial weights it would go on
        alone later.
        """
        return step > 0 or not self.joins

    def _current_processes(self) -> dict[str, psutil.Process]:
        """All child processes by name, with the averaging process as soon as it runs."""
        if (coordinator := self.strategy.coordinator) is None:
            return self._processes
        if self._averaging is None:
            # If it has died already, other processes have died with it, or its future reports that.
            with contextlib.suppress(psutil.NoSuchProcess):
                self._averaging = psutil.Process(coordinator.averager.pid)
        return self._processes | ({} if self._averaging is None else {AVERAGING_PROCESS: self._averaging})

    def _part_died(self, name: str) -> None:
        if (averaging := self._current_processes().get(AVERAGING_PROCESS)) is not None:
            kill([averaging])  # it would only report that it cannot leave in order
        self._on_death(name)

    def tell_members(self, certificate: bytes, lists: Mapping[str, bytes]) -> bool:
        """Pass a new certificate, or lists that the organiser has signed, to the averaging process, and keep them.

        Returns:
            False if the averaging process does not run yet
        """
        if (coordinator := self.strategy.coordinator) is None:
            return False
        coordinator.averager.set_admission(certificate, lists)
        self._entry.keep(self.admission, self.manifest, self.folder)
        return True

    def end(self, why: InputError) -> None:
        """End the training, since this peer may not take part any more. Called from another thread."""
        self.why_ended = why
        self.stop_requested.set()

    def _strategy(self) -> SwarmStrategy:
        patience = self.options.patience
        return (HelperStrategy if self.work.helps else SwarmStrategy)(
            self.recipe.target_batch_size,
            self.manifest.run_id,
            dht=self.dht,
            name=self.name,
            namespace=self.manifest.key_prefix,
            options=CoordinatorOptions(
                patience.min_peers,
                patience.matchmaking_time,
                patience.averaging_timeout,
                line=self.line,
                admission=self.admission,
                ledger=self.folder.ledger,
                state_folder=self.folder.path,
                profile=self.profile,
                slowest_line_mbps=self.recipe.slowest_line_mbps or USUAL_MBPS,
            ),
            stop_requested=self.stop_requested,
            averaging=self.averaging,
            max_step=self.recipe.total_steps,
            keep_own=self._keep_own,
            inside=self.channel,
            replay=self.work.replay,
        )

    def _review(self) -> MicroBatchReview:
        most = largest_sensible(self.recipe, self.work.own.data.num_train_samples)
        # All processes of an island would have to change their micro-batch at the same moment: there it stays.
        found = self.work.micro_batch if self.channel is None else replace(self.work.micro_batch, limit="given")
        return MicroBatchReview(found, most, self.work.own.data, self.reporter.say)

    def _evaluation(self) -> Evaluation:
        every, validate_every = self.options.results.evaluate_every_steps, self.recipe.validate_every_steps
        return Evaluation(every, validate_every, self.folder.evaluations, self.reporter.say)

    def _keep_own(self, step: int) -> None:
        """Save this peer's own weights before they are replaced by weights that are far from them."""
        save = partial(self.strategy.lightning_module.trainer.save_checkpoint, weights_only=False)
        if path := save_own(self.folder.checkpoints, step, save):
            logger.warning(
                f"The swarm's weights are far from this peer's own: it takes them over, and keeps its own in {path}"
            )

    def _trainer(self) -> Trainer:
        leaving = self.options.leaving
        advice = [] if self.joins or self.averaging.auto else [SlowLineAdvice(self.averaging, self.reporter.say)]
        of_trainer = [] if self.work.helps else [FirstContribution(self.clock, self.reporter.say)]
        return build_trainer(
            self.recipe,
            self.folder,
            **device_options(self.work.device, self.recipe, self.channel),
            strategy=self.strategy,
            callbacks=[
                self.metrics,
                LedgerKeeper(self.ledger),
                PlanKeeper(self.strategy),
                self.reporter,
                *of_trainer,
                self.company,
                self.traffic,
                self.pause,
                ProfileReporter(self.line, self.profile),
                self.supervisor,
                self.review,
                *([] if leaving.max_time is None else [TimeLimit(parse_duration(leaving.max_time))]),
                *advice,
                *([] if self.evaluation is None else [self.evaluation]),
                *kept_checkpoints(self.folder.checkpoints, self.options.results.checkpoint_every_steps),
            ],
            plugins=[
                AtomicCheckpointIO(None if self.upload is None else self.upload.saved),
                *([] if self.channel is None else [LightningEnvironment()]),
            ],
            max_steps=leaving.max_steps,
            target_accuracy=leaving.target_accuracy,
            step_metrics=NoStepMetrics() if self.work.helps else StepMetrics(times=self.num_processes),
        )

    def outcome(self, trainer: Trainer) -> str:
        if self.supervisor.found:
            return "starting again"
        if self.pause.has_stopped:
            return "paused"
        if self.traffic.has_stopped and trainer.global_step < trainer.max_steps:
            return "traffic limit reached"
        if self.why_ended is not None:
            return "no member any more"
        if self.stop_requested.is_set():
            return "no server-mode peer" if self.company.complaint else "interrupted"
        accuracy = trainer.callback_metrics.get("val/top1", 0.0)
        target = self.options.leaving.target_accuracy
        if target is not None and accuracy >= target:
            return "target accuracy reached"
        if trainer.global_step < trainer.max_steps:
            return "time is up"
        has_taken_part = self.metrics.updates > 0 or (self.work.own.resumed_step or 0) >= trainer.max_steps
        return "completed" if has_taken_part else "over before this peer took part"

    def _write_summary(self, final: Status, seconds: float) -> None:
        self.folder.write_summary(
            self.recipe,
            run_id=self.manifest.run_id,
            outcome=final.ended,
            steps=final.step,
            samples=self.metrics.contributed,
            seconds=seconds,
            val_accuracy=final.val_accuracy,
            train_loss=self.metrics.own_loss,
            max_num_peers=self.metrics.max_num_peers,
            name=self.name,
            swarm_samples=self.metrics.swarm_samples,
            updates=self.metrics.updates,
            complete_updates=self.metrics.complete_updates,
            micro_batch=self.review.samples,
            start_seconds=self.clock.seconds,
            traffic_bytes=self.traffic.num_bytes,
            tested=None if self.evaluation is None else self.evaluation.best,
            upload_to=None if self.upload is None else self.upload.url,
        )

    def _farewell(self, final: Status, seconds: float) -> str:
        metrics = self.metrics
        share = metrics.contributed / metrics.swarm_samples if metrics.swarm_samples else None
        ended, how = f"{final.ended.capitalize()} at step {final.step} after {seconds:.0f} s", ""
        if self.work.helps:
            gave = f"This helper took part in {metrics.updates} updates of {metrics.swarm_samples:,} samples."
        else:
            how = f"; validation accuracy {percent(final.val_accuracy)}"
            gave = (
                f"You gave {metrics.contributed:,} samples to {metrics.updates} updates, which is {percent(share)} of "
                "what the swarm computed for them."
            )
        weights = "Weights: none yet, since this peer left before it had the swarm's"
        if self._has_weights(final.step):
            weights = f"Weights: {self.folder.checkpoints}\nTo use:  {how_to_use(self.recipe, self.folder)}"
        return (
            f"{ended}{how}.\n"
            f"{gave} Rounds and states took {self.traffic.num_bytes / 1e9:.2f} GB of your line.\n"
            f"{weights}\n"
            f"Curves:  {tensorboard_command(self.folder.path)}"
        )


def _silence_lightning() -> None:
    """Hide what Lightning tells developers in every run, such as how it reads a checkpoint; warnings stay."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in ("Checkpoint directory .* exists and is not empty", ".*could not find the monitored key"):
        warnings.filterwarnings("ignore", message=message)
