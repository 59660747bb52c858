"""What a peer computes in a run: its samples, the model, and how many samples at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from recipe.config import Recipe
from recipe.data.peer_data import PeerData
from recipe.model import check_samples
from recipe.registry import build_data, build_task
from recipe.run_folder import RunFolder
from recipe.training.checkpoint_io import load_weights, read_checkpoint
from recipe.training.replay import Replay
from recipe.training.task import ClassificationTask
from swarm.membership.run_manifest import RunManifest
from swarm.peer.checkpoints import newest_checkpoint
from swarm.peer.helping.helper import NO_MICRO_BATCH, NoData, digest_for
from swarm.peer.island.computing import agreed_samples
from swarm.peer.island.launch import agree
from swarm.peer.options import PeerOptions
from swarm.peer.own_profile import device_name
from swarm.training.island.channel import Channel, Word
from swarm.training.micro_batch.finder import MicroBatch, measure_for_recipe


@dataclass(frozen=True)
class OwnData:
    """The data that a peer trains on, in its own order, and how far it has come; a helper has no data."""

    data: PeerData | NoData
    manifest: RunManifest
    """What is trained, with the digest of the data."""
    checkpoint: Path | None
    """Newest readable checkpoint of an earlier life of this peer in this run; None if there is none."""
    resumed_step: int | None
    """Step of that checkpoint."""


def prepare_data(options: PeerOptions, manifest: RunManifest, folder: RunFolder, identity: str, joins: bool) -> OwnData:
    """Download and check the data that a peer trains on, and go on where its newest checkpoint was.

    Args:
        options: this peer's own settings
        manifest: what is trained
        folder: of this peer in this run, with the checkpoints of an earlier life
        identity: peer id of this peer, which determines the order of its samples
        joins: other peers train already: an unreadable checkpoint of this peer is then no error

    Raises:
        InputError: the data are missing or damaged, or are not those of the run
    """
    data = _data_of(options, manifest, identity)
    name = type(data).__qualname__
    checkpoint, earlier = newest_checkpoint(folder.checkpoints, not joins, name)
    data.prepare_data()
    data.setup("fit")
    manifest = manifest.with_classes(data.digest, options.machine.data_dir)
    if options.results.evaluate_every_steps is not None:
        data.test_dataloader()  # raises InputError if the test images are missing
    if earlier is not None and (position := earlier[name]) is not None:
        data.load_state_dict(position)  # a peer that comes back goes on with its samples
    return OwnData(data, manifest, checkpoint, None if earlier is None else earlier["global_step"])


def _data_of(options: PeerOptions, manifest: RunManifest, identity: str) -> PeerData | NoData:
    recipe, machine = manifest.recipe, options.machine
    if options.role.helps:
        return NoData(recipe, digest_for(manifest, machine.data_dir, options.role.data_digest))
    return build_data(recipe, machine.data_dir, machine.batch_size or 1, identity, options.computing.num_workers)


@dataclass(frozen=True)
class Workload:
    """What one peer computes; a helper computes nothing."""

    own: OwnData
    started_from: Path | None
    """The file with the weights that a new swarm starts from; None for the recipe's own."""
    task: ClassificationTask
    helps: bool
    device: str
    """Device on which this peer computes, as `--device` names it; `cpu` for a helper, which does not need a GPU."""
    devices: Sequence[str]
    """Names of the devices on which this peer computes, one for each of its processes."""
    micro_batch: MicroBatch

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of this machine that this peer could use."""
        return 0 if self.device == "cpu" else torch.cuda.device_count()

    @property
    def replay(self) -> Replay:
        """Computes any micro-batch of this peer again."""
        return Replay(self.task, self.own.data)


def prepare_workload(
    options: PeerOptions,
    recipe: Recipe,
    own: OwnData,
    identity: str,
    joins: bool,
    channel: Channel | None = None,
) -> Workload:
    """Build the model, have the other processes of this peer do the same, and measure how many samples fit the device.

    Args:
        options: this peer's own settings
        recipe: what is trained
        own: its data
        identity: peer id of this peer
        joins: other peers train already, and have the weights
        channel: to the other processes of this peer; None if it is one process

    Raises:
        InputError: something that a person gave cannot work
    """
    data, machine, helps = own.data, options.machine, options.role.helps
    if channel is not None:
        _deal_out(channel, recipe, data, identity)
    task = build_task(recipe)
    started_from = None if joins or own.resumed_step is not None else options.start_from
    if started_from is not None:
        path = started_from.expanduser()
        load_weights(task, read_checkpoint(path), path)
    if machine.batch_size:
        check_samples(task.model, machine.batch_size, recipe.model)
    kind = "cpu" if helps else machine.device
    device = _torch_device(kind, channel)
    devices = [device_name(device)]
    micro_batch = _choose_micro_batch(options, recipe, task, data, 1 if channel is None else channel.size)
    if channel is not None:
        answer = {"problem": "", "asked": {"the data": data.digest}, "samples": micro_batch.samples}
        answers = agree(channel, answer | {"device": devices[0]}, listen=False)
        devices = [answer["device"] for answer in answers]
        micro_batch = replace(micro_batch, samples=agreed_samples(answers))
    if options.computing.compile and not helps:
        task.compile_model(device)
    data.batch_size = micro_batch.samples
    return Workload(
        own=own,
        started_from=started_from,
        task=task,
        helps=helps,
        device=kind,
        devices=devices,
        micro_batch=micro_batch,
    )


def _torch_device(kind: str, channel: Channel | None) -> torch.device:
    """The device of this process."""
    if channel is not None:
        return channel.device
    return torch.device("cpu" if kind == "cpu" or not torch.cuda.is_available() else "cuda")


def _deal_out(channel: Channel, recipe: Recipe, data: PeerData, identity: str) -> None:
    """Have the other processes of this peer prepare themselves; each of them takes samples of its own."""
    channel.tell(Word.PLAN)
    plan = {"recipe": recipe.to_json(), "identity": identity, "position": data.samples_trained}
    channel.exchange(plan, listen=False)
    data.deal_out(channel.rank, channel.size)


def _choose_micro_batch(
    options: PeerOptions, recipe: Recipe, task: ClassificationTask, data: PeerData | NoData, num_processes: int
) -> MicroBatch:
    """The micro-batch that a person gave, or as many samples as this device computes in about a second."""
    if options.role.helps:
        return NO_MICRO_BATCH
    if options.machine.batch_size:
        return MicroBatch(options.machine.batch_size, math.nan, "given")
    return measure_for_recipe(task.model, recipe, options.machine.device, data.num_train_samples, num_processes)
