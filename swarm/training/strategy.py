"""Train any LightningModule with a swarm: `Trainer(strategy=SwarmStrategy(target_batch_size=256, run_id="mine"))`.

Everything else about the Trainer stays as it is. One *optimizer step* of Lightning is one update of the whole swarm,
however many micro-batches this peer needs for its part. So it is for `trainer.global_step`, `max_steps`, the logged
step, schedulers, gradient clipping and `on_before_optimizer_step`.
"""

# ruff: noqa: E402 (nothing of another Hivemind is imported)

from __future__ import annotations

from swarm.runtime.hivemind_version import check_hivemind_version

check_hivemind_version()

import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from hivemind import DHT
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, Timer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.data import extract_batch_size
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from recipe.errors import InputError
from recipe.training.heap import keep_heap
from recipe.training.replay import Replay
from swarm.membership.run_manifest import PROTOCOL
from swarm.network.dht_options import NetworkOptions, start_dht, stop_dht, visible_addresses
from swarm.protocol.auto_mode import Plan
from swarm.protocol.wire import MAX_STEP
from swarm.protocol.work import largest_micro_batch
from swarm.runtime import fault_injection as faults
from swarm.runtime.processes import keep_signal_handlers
from swarm.training.averaging_mode import Averaging
from swarm.training.coordinator import Coordinator
from swarm.training.gradient_buffer import trained_parameters
from swarm.training.island.channel import Channel
from swarm.training.island.crew import Crew
from swarm.training.island.lead import Lead
from swarm.training.island.sharded.divided import Divided
from swarm.training.limits import Limit, is_to_leave
from swarm.training.local_steps import LocalCoordinator
from swarm.training.options import CoordinatorOptions
from swarm.training.trainer_checks import check_dealt_out, check_trained, check_trainer

OUTER = "outer optimizer"
"""Key of the outer optimizer's state in a checkpoint, beside the state of the peer's own optimizer."""
EVERY_UPDATE = "global update"  # a scheduler interval on which Lightning never acts: `_adopt_step` steps schedulers


class SwarmStrategy(SingleDeviceStrategy):
    """Collaborative averaging to a target batch size, with one device per process; a peer can have several processes.

    Args:
        target_batch_size: samples over all peers per global update; equal on all peers
        run_id: peers of the same run (and the same target batch size and model) meet
        initial_peers: addresses of peers that are there already; with none, this peer starts a new swarm
        name: public name of this peer
        network: ports, addresses and identity, if the defaults do not fit; replaces `initial_peers`
        dht: a DHT that runs already; it is left running
        namespace: only peers with the same one meet; by default made of run, target batch size, averaging
            and protocol, so that peers of two versions never meet
        options: this peer's own settings
        stop_requested: when set, this peer leaves at the next opportunity
        averaging: how the swarm averages: an `Averaging`, or its name, such as "sync", "overlap-fp16" or "local-fp16";
            equal on all peers
        max_step: the step at which the run is over; a claim to be further is not believed
        keep_own: called with this peer's step before weights that it has trained are replaced by very different ones
        inside: "ddp" if this peer is several processes of torchrun (`swarm.training.island.lead`), "fsdp" if these
            share one model (`swarm.training.island.sharded`), or a channel between them; None for one process
        replay: makes any peer's micro-batches again, so that members can check each other's work; None for data and
            modules with which it cannot. Either all peers of a run have one or none has: peers that have one leave out
            a member that says nothing of its work

    Raises:
        InputError: a Trainer or module that cannot work this way, or a network that does not answer
    """

    strategy_name = "swarm"

    def __init__(
        self,
        target_batch_size: int,
        run_id: str,
        initial_peers: Sequence[str] = (),
        *,
        name: str = "peer",
        network: NetworkOptions | None = None,
        dht: DHT | None = None,
        namespace: str | None = None,
        options: CoordinatorOptions | None = None,
        stop_requested: threading.Event | None = None,
        averaging: Averaging | str = "sync",
        max_step: int = MAX_STEP,
        keep_own: Callable[[int], None] = lambda step: None,
        inside: str | Channel | None = None,
        replay: Replay | None = None,
    ):
        super().__init__()
        if target_batch_size < 1:
            raise InputError(f"The target batch size is {target_batch_size}: it has to be at least 1 sample.")
        self.target_batch_size, self.name = target_batch_size, name
        if not (inside in (None, "ddp", "fsdp") or isinstance(inside, Channel)):
            raise InputError(f"There is no inside={inside!r}: set 'ddp', 'fsdp', or None for a peer of one process.")
        self._inside, self._replay = inside, replay
        self.options = options or CoordinatorOptions()
        self.averaging = Averaging.named(averaging) if isinstance(averaging, str) else averaging
        names = f"{run_id}-{target_batch_size}-{self.averaging}-protocol-{PROTOCOL}"  # a library user has no manifest
        self.namespace = namespace or names.replace(".", "_")
        self.network = network or NetworkOptions(initial_peers=tuple(initial_peers))
        self.dht, self._owns_dht = dht, dht is None
        self.stop_requested = stop_requested or threading.Event()
        self.max_step, self.keep_own = max_step, keep_own
        self.plan: Plan | None = None
        """With the averaging auto, the plan that this peer followed when it last took part."""
        self._total_steps = max_step
        """Number of steps of the run, as the Trainer knows it."""
        self.coordinator: Coordinator | Crew | None = None
        self._outer_state: dict[str, Any] = {}
        """State of the outer optimizer, which makes the swarm's updates from local steps, as a checkpoint holds it."""
        self._trained: Sequence[torch.nn.Parameter] = ()
        """The parameters that were trained when this peer joined."""
        self.parallel_devices: list[torch.device] = []  # Lightning puts the devices of the Trainer here
        self._micro_batch_samples = 0
        self.divides = inside.divides if isinstance(inside, Channel) else inside == "fsdp"
        self._divided = Divided(self.averaging) if self.divides else None
        """What differs if the processes of this peer share one model; None if they do not."""

    @property
    def root_device(self) -> torch.device:
        """The device of this process. Lightning sets the devices of all processes on this machine."""
        place = int(os.environ.get("LOCAL_RANK", 0)) if len(self.parallel_devices) > 1 else 0
        return self.parallel_devices[place] if self.parallel_devices else torch.device("cpu")

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes files, as Lightning asks: only the first process of a peer does."""
        if isinstance(self._inside, Channel):
            return self._inside.is_first
        return self._inside is None or os.environ.get("RANK", "0") == "0"

    @property
    def _trainer(self) -> Trainer:
        return self.lightning_module.trainer

    @property
    def _is_divided(self) -> bool:
        """Whether each process of this peer holds pieces of the model now; outside of training a model is whole."""
        return self._divided is not None and self._trainer.state.fn == TrainerFn.FITTING

    @property
    def holds_all(self) -> bool:
        """Whether this process can write a checkpoint now."""
        return self._divided is None or self._divided.is_whole

    # ---- life of the strategy ---------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        super().setup_environment()
        keep_heap()  # here, so that it also holds for a Trainer that is built without this project's programs
        if len(self.parallel_devices) > 1 and self._inside is None:
            raise InputError(
                "A peer of one process computes on one device: set devices=1, or inside='ddp' and use torchrun."
            )
        if self._trainer.state.fn == TrainerFn.FITTING and self._inside in ("ddp", "fsdp"):
            device = "cpu" if self.root_device.type == "cpu" else "cuda"
            self._inside = Channel.connect(device, divides=self._inside == "fsdp")
        if not self.is_global_zero:
            return self._become_crew()
        if self.dht is None and self._trainer.state.fn == TrainerFn.FITTING:  # testing a model needs no swarm
            self.dht = start_dht(self.network)
            print(f"Other peers join with initial_peers={visible_addresses(self.dht)}", flush=True)

    def setup(self, trainer: Trainer) -> None:
        """Set up the training. If a model is to be divided, all processes learn of a problem, and one reports it."""
        if not self._is_divided:
            return super().setup(trainer)
        problem = ""
        try:
            super().setup(trainer)
            self._divided.begin(trainer, self.optimizers[0], self._inside)
        except InputError as error:
            problem = str(error)
        problem = next(filter(None, self._inside.exchange(problem)), "")
        if problem and self._inside.is_first:
            raise InputError(problem)
        if problem:
            raise SystemExit(2)

    def model_to_device(self) -> None:
        if self._is_divided:
            self._divided.divide(self.lightning_module, self._inside)
        else:
            super().model_to_device()

    def _become_crew(self) -> None:
        """Make this process one that only computes. The first process decides when training ends."""
        self._trainer.limit_val_batches = 0
        self._trainer.fit_loop.max_epochs = self._trainer.fit_loop.epoch_loop.max_steps = -1
        decides = (Checkpoint, EarlyStopping, Timer, Limit)
        self._trainer.callbacks = [one for one in self._trainer.callbacks if not isinstance(one, decides)]
        warnings.filterwarnings("ignore", message=".training_step. returned .None.")

    def process_dataloader(self, dataloader: object) -> object:
        """Check a dataloader that Lightning passes in: each process must get training samples of its own."""
        if self._inside is not None and self._trainer.training:
            check_dealt_out(dataloader)
        return super().process_dataloader(dataloader)

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        check_trainer(trainer, self.averaging, self.options.admission.is_open)
        for config in self.lr_scheduler_configs:
            config.interval = EVERY_UPDATE
            if isinstance(config.scheduler, LambdaLR):
                config.scheduler.lr_lambdas = [self._steered(rate) for rate in config.scheduler.lr_lambdas]

    def barrier(self, name: str | None = None) -> None:
        """Join the swarm at the barrier where Lightning waits for all processes before it trains."""
        if name == "run-stage" and self._trainer.state.fn == TrainerFn.FITTING:
            self._join()

    def _join(self) -> None:
        self._trained = trained_parameters(self.optimizers[0])
        if not self.is_global_zero:
            module, optimizer = self.lightning_module, self.optimizers[0]
            kind = Crew if self._divided is None else self._divided.crew
            self.coordinator = kind(self._inside, module, optimizer, self.target_batch_size, self.max_step)
            self._check_work()
            return self._begin_to_listen()
        admission = self.options.admission
        if not admission.is_open:
            self.dht.take_part(self.namespace, admission.authority, admission.certificate)
        with keep_signal_handlers():
            kind = Coordinator if self.averaging.local_steps is None else LocalCoordinator
            kind = kind if self._divided is None else self._divided.coordinator
            coordinator = kind(
                self.dht,
                self.namespace,
                self.lightning_module,
                self.optimizers[0],
                self.target_batch_size,
                self.name,
                step=self._trainer.global_step,
                options=self.options,
                should_stop=self.stop_requested.is_set,
                averaging=self.averaging,
                apply=self._make_update,
                max_step=self.max_step,
                plan=self.plan,
            )
            coordinator.start()
        self.coordinator = coordinator
        self.coordinator.version.keep_own = self.keep_own
        self.coordinator.is_to_leave = partial(is_to_leave, self._trainer)
        if self._inside is not None and self._divided is None:
            self.coordinator.lead(Lead(self._inside), self.lightning_module)
        if self._outer_state:
            self.coordinator.load_outer_state(self._outer_state)
        self._check_work()
        self._begin_to_listen()
        self.coordinator.join()
        self._adopt_step(completed=self.coordinator.step)
        is_to_leave(self._trainer)  # an owner's limit may be reached already: then nothing is begun
        self._trainer.should_stop |= self.stop_requested.is_set()

    def _begin_to_listen(self) -> None:
        """Let the other processes of an island wait for words of the first one, which may take long to join.

        Where they share one model, they have waited in this way since it was divided.
        """
        if self._inside is not None and self._divided is None:
            self._inside.exchange(None)

    def _check_work(self) -> None:
        """Let this peer state what it computes and check other members' work, where the recipe allows it."""
        if self._replay is None or not self._replay.is_shared or not self.averaging.checks_work:
            return
        if self._replay.micro_batch > (most := largest_micro_batch(self.target_batch_size)):
            raise InputError(f"Micro-batches of {self._replay.micro_batch} samples are too large: set {most} or less.")
        self.coordinator.check_work(self._replay, lambda batch: self._compute(batch, 0))

    def on_validation_start(self) -> None:
        if self.coordinator is not None:
            self.coordinator.before_validation()
        super().on_validation_start()

    def on_validation_end(self) -> None:
        if self.coordinator is not None:
            self.coordinator.after_validation()
        super().on_validation_end()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._is_divided:
            return self._divided.model_state(self.coordinator) if self.is_global_zero else {}
        state = super().lightning_module_state_dict()
        return state if self.coordinator is None else self.coordinator.shared(state)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._is_divided:
            return self._divided.optimizer_state(self.coordinator) if self.is_global_zero else {}
        if isinstance(self.coordinator, Coordinator):
            self._outer_state = self.coordinator.outer_state()
        found = super().optimizer_state(optimizer)
        return {**found, OUTER: self._outer_state} if self._outer_state else found

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._is_divided:
            self._divided.load_optimizer(checkpoint["optimizer_states"][0])
        else:
            super().load_optimizer_state_dict(checkpoint)
            self._outer_state = checkpoint["optimizer_states"][0].get(OUTER, {})

    def leave(self) -> None:
        """Leave the swarm; the model keeps the last averaged weights."""
        if self._divided is not None:
            self._divided.keep(self.coordinator)
        coordinator, self.coordinator = self.coordinator, None  # first: that its processes end now is no failure
        if isinstance(coordinator, Coordinator):
            self._outer_state = coordinator.outer_state()
        if coordinator is not None:
            coordinator.leave()
        if self._owns_dht and self.dht is not None:
            stop_dht(self.dht)
            self.dht = None

    def on_train_end(self) -> None:
        super().on_train_end()
        self.leave()

    def teardown(self) -> None:
        self.leave()
        super().teardown()

    # ---- every micro-batch ------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.coordinator.wait_while_paused()
        if not self.coordinator.begin_micro_batch():
            self.stop_requested.set()  # the first process of this peer has left
            return None
        self._micro_batch_samples = extract_batch_size(args[0] if args else next(iter(kwargs.values())))
        if self._replay is not None:
            self._replay.begin()
        return self._compute(*args, **kwargs)

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        with self._computing():
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute gradients. Those that lie in pieces are sums over the samples of all processes' micro-batches."""
        loss = closure_loss if self._divided is None else closure_loss * self._micro_batch_samples
        with self._computing():
            return super().backward(loss, *args, **kwargs)

    def _computing(self) -> AbstractContextManager:
        return nullcontext() if self._divided is None else self._inside.computing()

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        self.coordinator.begin_backward(self._micro_batch_samples)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | None = None,
        **kwargs: Any,
    ) -> Any:
        loss = closure()
        check_trained(trained_parameters(self.optimizers[0]), self._trained)
        faults.at("computing", self.coordinator.step)
        if self._contribute(loss):
            self._adopt_step(completed=self.coordinator.step)  # it may have caught up in this call
            with self.coordinator.updating():
                super().optimizer_step(optimizer, lambda: loss, model=model, **kwargs)
        # Lightning counts this call as a step when it returns
        self._adopt_step(completed=self.coordinator.step - 1)
        if self.stop_requested.is_set():
            self._trainer.should_stop = True
            self._trainer.limit_val_batches = 0  # no last validation: the peer is to leave soon
        return loss

    def _contribute(self, loss: torch.Tensor | None) -> bool:
        """Give the micro-batch to the swarm's step; return whether an average is there to apply."""
        return loss is not None and self.coordinator.contribute(self._micro_batch_samples, loss)

    def _make_update(self) -> None:
        """Make an update that the swarm has made without this peer, with the same hooks and clipping of Lightning."""
        self._adopt_step(completed=self.coordinator.step)
        super().optimizer_step(self.optimizers[0], lambda: None, model=self.lightning_module)

    def _adopt_step(self, completed: int) -> None:
        """Set Lightning's counters to this number of completed steps, and the schedulers to the swarm's step."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        progress = epoch_loop.automatic_optimization.optim_progress.optimizer.step
        for counter in (progress.total, progress.current):
            counter.ready = counter.completed = completed
        epoch_loop._batches_that_stepped = completed
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            for config in self.lr_scheduler_configs:
                while config.scheduler.last_epoch < self.coordinator.step:
                    config.scheduler.step()
        self._follow_orders()

    # ---- what the organiser orders ----------------------------------------------------------------------------------

    def _follow_orders(self) -> None:
        """Set the learning rate and the end of the run by the orders for this step, even if an order came late."""
        total, loop = self.coordinator.control.total_steps(self.coordinator.step), self._trainer.fit_loop.epoch_loop
        if total != self._total_steps:
            # A smaller `max_steps` is the wish of this peer's owner to leave earlier, and stays.
            if loop.max_steps in (-1, self._total_steps) or loop.max_steps > total:
                loop.max_steps = total
            self._total_steps = total
        if not self.coordinator.control.is_steered:
            return
        for config in self.lr_scheduler_configs:
            scheduler = config.scheduler
            if isinstance(scheduler, LambdaLR):
                for group, base, rate in zip(
                    scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
                ):
                    group["lr"] = base * rate(scheduler.last_epoch)

    def _steered(self, rate: Callable[[float], float]) -> Callable[[int], float]:
        """The learning rate by step, with the organiser's orders and the swarm's plan applied."""

        # A plain function, because `LambdaLR.state_dict` saves the attributes of any other callable.
        def steered(step: int) -> float:
            if self.coordinator is None:
                return rate(step)
            control = self.coordinator.control
            return control.orders.learning_rate_factor(step) * rate(control.schedule_position(step))

        return steered
