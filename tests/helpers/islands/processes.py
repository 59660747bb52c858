"""Islands for tests: a peer of several processes, each of which is forked as any peer of `swarm_peers`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from hashlib import sha256

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from swarm.training.island.lost import IslandLost
from swarm.training.island.sharded.pieces import local_of
from swarm.training.strategy import SwarmStrategy
from tests.helpers.islands.slow_joiners import count_followed_updates, download_states_slowly, join_slowly
from tests.helpers.programs.ports import free_port
from tests.helpers.strategy_runs import Outcome, Plan, Record, Task, loader, patience, trainer_for, weights_of
from tests.helpers.swarm_peers import Line, Peers, running_dht


@dataclass
class Computed:
    """One micro-batch of one process.

    Args:
        step: of the weights
        weights: digest of all that this process holds
        indices: of the samples
    """

    step: int
    weights: bytes
    indices: list[int]


class Share:
    """Every n-th micro-batch of an island's order."""

    def __init__(self, island: str, rank: int, size: int):
        self._batches = list(loader(ord(island)))[rank::size]

    def __iter__(self):
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class WatchedTask(Task):
    """A task that notes each micro-batch, and the weights with which it computes it."""

    def __init__(self, plan: Plan):
        super().__init__(plan)
        self.computed: list[Computed] = []

    def training_step(self, batch, batch_idx):
        step = self.trainer.strategy.coordinator.step
        weights = sha256(b"".join(local_of(one).numpy().tobytes() for one in self.net.parameters())).digest()
        self.computed.append(Computed(step, weights, batch[2].tolist()))
        return super().training_step(batch, batch_idx)


def start_island(peers: Peers, name: str, plan: Plan, target: int, size: int = 2, **options) -> None:
    """Start the island's processes, NAME0 and so on; the first one is the peer."""
    port = free_port()
    for rank in range(size):
        peers.start(f"{name}{rank}", compute, rank, size, port, plan, target, options)


def compute(name: str, initial_peers, line: Line, rank: int, size: int, port: int, plan: Plan, target: int, options):
    """Run one process of an island.

    Options: those of `train`; inside; slow, to download states slowly; silent_seconds, of `join_slowly`; folder, for
    checkpoints; checkpoint, to go on from; callback, the class of one more callback.

    Returns its Outcome and what it has computed. The Outcome is None in all but the first process, and if one was lost.
    """
    places = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in (places | address).items()})
    given = {"min_peers": 1, "max_steps": -1, "averaging": "sync", "stop": lambda _: False, "inside": "ddp"}
    options = given | dict.fromkeys(("slow", "silent_seconds", "folder", "checkpoint", "callback")) | options
    inside, callbacks = options["inside"], []
    if options["callback"] is not None:
        callbacks.append(options["callback"]())
    if options["silent_seconds"] is not None:
        join_slowly(options["silent_seconds"])
    if options["folder"] is not None:
        callbacks.append(ModelCheckpoint(options["folder"], every_n_train_steps=5, save_top_k=-1))
    task = WatchedTask(plan)
    batches = Share(name[0], rank, size)
    if rank:
        torch.manual_seed(0)
        for parameter in task.net.parameters():  # other weights than the first process's, which replace them
            torch.nn.init.normal_(parameter)
        strategy = SwarmStrategy(target, "test", inside=inside, averaging=options["averaging"])
        trainer = trainer_for(strategy, callbacks, max_steps=options["max_steps"], devices=size)
        trainer.fit(task, batches, ckpt_path=options["checkpoint"])
        return None, task.computed
    followed = count_followed_updates()
    if options["slow"]:
        download_states_slowly()
    with running_dht(initial_peers, line) as dht:
        strategy = SwarmStrategy(
            *(target, "test"),
            **{"dht": dht, "name": name, "inside": inside, "averaging": options["averaging"]},
            options=patience(options["min_peers"]),
        )
        record = Record(line, options["stop"])
        trainer = trainer_for(
            strategy, [record, *callbacks], max_steps=options["max_steps"], devices=size, gradient_clip_val=plan.clip
        )
        try:
            trainer.fit(task, batches, ckpt_path=options["checkpoint"])
        except IslandLost:
            return None, task.computed
        state = {name: value.clone() for name, value in weights_of(trainer).items()}
        optimizer = strategy.optimizer_state(trainer.optimizers[0])
        own = str(dht.peer_id), record.updates, record.joined_at, state, optimizer
        return Outcome(*own, followed=sum(followed)), task.computed
