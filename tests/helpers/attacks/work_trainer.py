"""A peer's trainer without a swarm: it computes micro-batches, lists them, and recomputes those of other peers."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import torch
from hivemind.p2p import PeerID

from recipe.config import Recipe
from recipe.presets import preset
from recipe.registry import build_data, build_task
from recipe.training.replay import Replay
from swarm.protocol.work import Assignment, Line, WorkList, name_of
from swarm.training.audit.earlier_weights import EarlierWeights
from swarm.training.audit.work_log import CheckedLog
from swarm.training.gradient_buffer import GradientVector, averaged_tensors
from swarm.training.throughput import Throughput

VIT = replace(preset("digits"), drop_path=0.3, embed_dim=32, depth=3, num_heads=2, augmentation="light")
BATCH_NORM = replace(
    preset("digits"),
    **{"model": "resnet10t", "image_size": 16, "patch_size": None, "embed_dim": None, "depth": None},
    **{"num_heads": None, "initialisation": "timm"},
)
TEXTS = replace(preset("docstrings"), embed_dim=32, depth=2, num_heads=2)
RECIPES = {"drop path": VIT, "batch norm": BATCH_NORM, "dropout, texts": TEXTS}
X, Y = (PeerID(bytes([18, 32, *[number] * 32])) for number in (1, 2))
LINEAGE = bytes(range(16))


class Trainer:
    """A peer's trainer, without a swarm.

    Args:
        at: position in the data at which it begins
    """

    def __init__(self, recipe: Recipe, peer: PeerID, at: int = 0, micro_batch: int = 8):
        self.data = build_data(recipe, batch_size=micro_batch, identity=peer.to_base58())
        self.data.load_state_dict({"position": at})
        self.data.trainer = SimpleNamespace(training=True, global_rank=0, world_size=1)
        self.task = build_task(recipe).train()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():  # as if it had been trained: a head of zeros hides all other layers
            for param in self.task.parameters():
                param.add_(torch.randn(param.shape, generator=generator), alpha=0.05)
        self.optimizer = self.task.configure_optimizers()["optimizer"]
        self.vector = GradientVector(*averaged_tensors(self.task, self.optimizer))
        self.replay = Replay(self.task, self.data)
        self.version = SimpleNamespace(lineage=LINEAGE)
        self.earlier = EarlierWeights(self.vector.params, threading.Lock())
        self.log = CheckedLog(self.replay, self.loss, self.vector, self.version, self.replay.kind, self.earlier)
        self.batches = iter(self.data.train_dataloader())
        self.throughput = Throughput()

    def loss(self, batch) -> torch.Tensor:
        return self.task.training_step(batch, 0)

    def compute(self, times: int = 1) -> None:
        """Compute so many micro-batches."""
        for _ in range(times):
            batch = self.data.on_before_batch_transfer(next(self.batches), 0)
            samples = len(batch[1])
            self.replay.begin()
            loss = self.loss(batch)
            self.vector.receive(samples)
            self.log.begin_backward()
            loss.backward()
            self.vector.collect()
            self.throughput.work.noted += self.log.note(samples)
            self.throughput.note(samples, loss)

    def listed(self) -> WorkList:
        """Return the list of its work as other peers read it."""
        own = self.log.own(self.throughput.work, 1)
        return WorkList.from_bytes(own.listed, name_of(own.listed), self.throughput.work.samples)

    def finds(self, peer: PeerID, line: Line, is_before: bool = False) -> bool | None:
        """Whether another peer's work holds, by recomputing a line of its list; None if that decides nothing."""
        self.log.check(Assignment(peer, line, is_before))
        return self.log.own(self.throughput.work, 1).verdict.holds

    def update(self, lineage: bytes) -> None:
        """Make an update as all peers do; gradients of micro-batches go on adding up, as with overlap."""
        with self.log.updating():
            generator = torch.Generator().manual_seed(5)
            with torch.no_grad():
                for param in self.vector.params:
                    param.add_(torch.randn(param.shape, generator=generator), alpha=0.05)
            self.version.lineage = lineage
