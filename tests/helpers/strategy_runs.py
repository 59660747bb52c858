"""A small model that swarms of processes train in tests, and the record of each peer's updates."""

import time
from dataclasses import dataclass, field

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from swarm.peer.membership.member_watch import MemberWatch
from swarm.training.helper import NO_BATCHES, HelperStrategy
from swarm.training.options import CoordinatorOptions
from swarm.training.strategy import SwarmStrategy
from tests.helpers.swarm_peers import running_dht

FEATURES, CLASSES, NUM_SAMPLES, MICRO_BATCH = 12, 4, 512, 8


class Samples(Dataset):
    """Samples (features, label, index); the same everywhere."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(NUM_SAMPLES, FEATURES, generator=generator)
        self.y = (self.x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int):
        return self.x[index], self.y[index], index


def loader(seed: int) -> DataLoader:
    """Return micro-batches in an order that the seed determines."""
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(Samples(), batch_size=MICRO_BATCH, shuffle=True, generator=generator)


def nan_loader(_seed: int) -> DataLoader:
    """Return micro-batches whose gradients are not finite."""
    samples = Samples()
    samples.x.fill_(torch.nan)
    return DataLoader(samples, batch_size=MICRO_BATCH)


@dataclass(frozen=True)
class Plan:
    """How a model is built and updated, for the swarm and for the process with which it is compared."""

    batch_norm: bool = False
    optimizer: str = "adamw"
    clip: float | None = 0.5
    compute_seconds: float = 0.0
    seed: int = 7

    def net(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        norm = nn.BatchNorm1d(16) if self.batch_norm else nn.LayerNorm(16)
        # BatchNorm undoes a bias before it: its gradient would be rounding noise, which AdamW blows up to full size
        return nn.Sequential(nn.Linear(FEATURES, 16, bias=not self.batch_norm), norm, nn.ReLU(), nn.Linear(16, CLASSES))

    def update(self, net: nn.Module):
        if self.optimizer == "sgd":
            optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
            return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)


def learning_rate_factor(step: int) -> float:
    return min(1.0, (step + 1) / 5) / (1 + step / 10)


class Task(L.LightningModule):
    def __init__(self, plan: Plan):
        super().__init__()
        self.plan, self.net = plan, plan.net()
        self.indices: list[list[int]] = []

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        self.indices.append(index.tolist())
        time.sleep(self.plan.compute_seconds)  # as if the model were larger
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        optimizer, scheduler = self.plan.update(self.net)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@dataclass(frozen=True)
class Update:
    """One global update as a peer saw it, and the resulting weights."""

    step: int
    num_peers: int
    samples: int
    own_samples: int
    loss: float
    peer_ids: frozenset
    order: tuple
    complete: bool
    indices: list[list[int]]
    weights: dict[str, torch.Tensor]
    global_step: int
    scheduler_step: int
    learning_rate: float
    at: float = field(default_factory=time.monotonic)


class Record(L.Callback):
    """Keeps every update, and tells the test about it.

    Args:
        stop: asked with the updates so far; all peers see the same groups, so they stop at the same one
    """

    def __init__(self, line=None, stop=lambda updates: False):
        self.updates: list[Update] = []
        self.joined_at: tuple[int, float] | None = None
        self.sent: dict[int, torch.Tensor] = {}
        self._line, self._stop, self._step = line, stop, 0

    def on_train_start(self, trainer, pl_module):
        self._step = trainer.global_step
        self.joined_at = trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"]
        averager = trainer.strategy.coordinator.averager
        run_round = averager.run_round

        def keep_and_run(order):
            self.sent[order.ticket.step] = averager.vector.clone()
            return run_round(order)

        averager.run_round = keep_and_run

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        coordinator = trainer.strategy.coordinator
        if coordinator.samples == 0 and coordinator.step != self._step and coordinator.last_step is not None:
            if coordinator.last_step.step == coordinator.step:
                self._keep(trainer, pl_module, coordinator.last_step)
            self._step, pl_module.indices = coordinator.step, []
            trainer.should_stop |= self._stop(self.updates)

    def _keep(self, trainer, pl_module, report):
        update = Update(
            step=report.step,
            num_peers=report.num_peers,
            samples=report.samples,
            own_samples=report.own_samples,
            loss=report.loss,
            peer_ids=frozenset(map(str, report.round.group.peer_ids)) if report.round else frozenset(),
            order=tuple(map(str, report.round.group.peer_ids)) if report.round else (),
            complete=report.round is None or report.round.complete,
            indices=pl_module.indices,
            weights={name: tensor.clone() for name, tensor in weights_of(trainer).items()},
            global_step=trainer.global_step,
            scheduler_step=trainer.lr_scheduler_configs[0].scheduler.last_epoch,
            learning_rate=trainer.optimizers[0].param_groups[0]["lr"],
        )
        self.updates.append(update)
        if self._line is not None:
            self._line.put((update.step, update.num_peers, update.at, update.own_samples))


def weights_of(trainer: L.Trainer) -> dict[str, torch.Tensor]:
    """Return the model's weights, whole also where processes hold pieces of it."""
    if trainer.strategy.divides:
        state = trainer.strategy.lightning_module_state_dict()
        return {name.removeprefix("net."): tensor for name, tensor in state.items()}
    return trainer.lightning_module.net.state_dict()


def trainer_for(strategy="auto", callbacks=(), **options) -> L.Trainer:
    options = {
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "callbacks": list(callbacks),
        **options,
    }
    return L.Trainer(strategy=strategy, **options)


def patience(min_peers: int, matchmaking_seconds: float = 3.0) -> CoordinatorOptions:
    return CoordinatorOptions(
        min_peers=min_peers, matchmaking_seconds=matchmaking_seconds, averaging_timeout_seconds=20.0
    )


@dataclass
class Outcome:
    """The result of a peer.

    Args:
        sent: by step, the vector of this peer's last round for that step
        followed: updates that it has made with averages of other peers, where they are counted
    """

    peer_id: str
    updates: list[Update]
    joined_at: tuple[int, float]
    state: dict
    optimizer: dict
    sent: dict[int, torch.Tensor] = field(default_factory=dict)
    followed: int = 0


def train(
    name,
    initial_peers,
    line,
    plan,
    target,
    *,
    min_peers=1,
    matchmaking_seconds=3.0,
    stop=lambda _: False,
    max_steps=-1,
    data=loader,
    client_mode=False,
    averaging="sync",
    kind=SwarmStrategy,
    host="127.0.0.1",
):
    """Run a peer. Its samples come in an order that its name seeds."""
    with running_dht(initial_peers, line, client_mode=client_mode, host_maddrs=(f"/ip4/{host}/tcp/0",)) as dht:
        options = patience(min_peers, matchmaking_seconds)
        strategy = kind(target, "test", dht=dht, name=name, options=options, averaging=averaging)
        record = Record(line, stop)
        task = Task(plan)
        trainer = trainer_for(strategy, [record], max_steps=max_steps, gradient_clip_val=plan.clip)
        trainer.fit(task, data(ord(name)))
        state = {key: value.clone() for key, value in task.net.state_dict().items()}
        optimizer = trainer.optimizers[0].state_dict()
        return Outcome(str(dht.peer_id), record.updates, record.joined_at, state, optimizer, record.sent)


def member_watch(strategy, dht, admission, namespace, on_end=lambda sentence: None) -> MemberWatch:
    """Return a watch that hands the organiser's signed lists to the strategy's averaging process, as a peer does."""

    def tell(certificate, lists):
        if strategy.coordinator is None:
            return False
        strategy.coordinator.averager.set_admission(certificate, lists)
        return True

    return MemberWatch(dht, admission, namespace, tell, lambda before: before, on_end)


def helper(name, initial_peers, line, plan, target, **options):
    """Run a peer that trains nothing."""
    return train(name, initial_peers, line, plan, target, data=lambda _: NO_BATCHES, kind=HelperStrategy, **options)


def assert_same_bits(one: dict, other: dict) -> None:
    shared = [key for key in one if "num_batches_tracked" not in key]  # counts this peer's own micro-batches
    torch.testing.assert_close([one[k] for k in shared], [other[k] for k in shared], rtol=0, atol=0)


def assert_equal_updates(one: Outcome, other: Outcome) -> None:
    """Check that both saw the same groups, and held the same bits after every update that both took part in."""
    others = {update.step: update for update in other.updates}
    common = [(update, others[update.step]) for update in one.updates if update.step in others]
    assert common
    for update, same in common:
        assert update.peer_ids == same.peer_ids
        assert update.samples == same.samples
        assert update.loss == same.loss
        assert_same_bits(update.weights, same.weights)


def union(peers: list[list[list[int]]]) -> list[int]:
    return [index for batches in peers for batch in batches for index in batch]


def replay(plan: Plan, steps: list[list[list[list[int]]]], together: bool, held: list[dict] | None = None):
    """Make the same updates in one process: `steps[i]` holds each peer's micro-batches of sample indices.

    `together`: one pass over the union. Otherwise each peer's micro-batches run through a model with statistics of
    its own (BatchNorm), and the next step starts from their means over samples.
    `held`: weights after each step, with which the next one begins, in place of this process's own.

    Yields (loss, weights, norm of the gradient before clipping).
    """
    samples, net = Samples(), plan.net()
    optimizer, scheduler = plan.update(net)
    for number, peers in enumerate(steps):
        if held and number:
            net.load_state_dict(held[number - 1])
        total = sum(len(batch) for batches in peers for batch in batches)
        before = [buffer.clone() for buffer in net.buffers()]
        after = [torch.zeros_like(buffer, dtype=torch.float64) for buffer in before]
        loss_sum = 0.0
        optimizer.zero_grad()
        for batches in [[union(peers)]] if together else peers:
            for buffer, start in zip(net.buffers(), before, strict=True):
                buffer.copy_(start)
            for batch in batches:
                loss = F.cross_entropy(net(samples.x[batch]), samples.y[batch])
                (loss * len(batch) / total).backward()
                loss_sum += loss.item() * len(batch)
            for mean, buffer in zip(after, net.buffers(), strict=True):
                mean += buffer.double() * sum(map(len, batches)) / total
        for buffer, mean in zip(net.buffers(), after, strict=True):
            buffer.copy_(mean)
        norm = nn.utils.clip_grad_norm_(net.parameters(), plan.clip or float("inf")).item()
        optimizer.step()
        scheduler.step()
        yield loss_sum / total, {name: tensor.clone() for name, tensor in net.state_dict().items()}, norm
