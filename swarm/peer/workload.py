"""What a peer computes in a run: its samples, the model, and how many samples at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from recipe.config import Recipe
from recipe.data.peer_data import PeerData
from recipe.model import check_samples
from recipe.registry import build_data, build_task
from recipe.run_folder import RunFolder
from recipe.training.checkpoint_io import load_weights, read_checkpoint
from recipe.training.replay import Replay
from swarm.membership.run_manifest import RunManifest
from swarm.peer.checkpoints import newest_checkpoint
from swarm.peer.helping.helper import NO_MICRO_BATCH, NoData, digest_for
from swarm.peer.island.computing import agreed_samples
from swarm.peer.island.launch import agree
from swarm.peer.options import PeerOptions
from swarm.peer.own_profile import device_name
from swarm.training.batch_size_finder import MicroBatch, measure_for_recipe
from swarm.training.island.channel import Channel, Word


class OwnData:
    """What a peer trains on, in its own order, and how far it has come; a helper has none.

    Args:
        options: this peer's own settings
        manifest: what is trained
        folder: of this peer in this run, with the checkpoint of an earlier life
        identity: of this peer, which says in what order it takes samples
        joins: whether others train already: a checkpoint of this peer that cannot be read is then no obstacle

    Raises:
        InputError: the data are missing or damaged, or are not those of the run
    """

    def __init__(self, options: PeerOptions, manifest: RunManifest, folder: RunFolder, identity: str, joins: bool):
        self.data = self._open(options, manifest, identity)
        name = type(self.data).__qualname__
        self.checkpoint, earlier = newest_checkpoint(folder.checkpoints, not joins, name)
        self.resumed_step: int | None = None if earlier is None else earlier["global_step"]
        self.data.prepare_data()
        self.data.setup("fit")
        self.manifest = manifest.with_classes(self.data.digest, options.machine.data_dir)
        """The same, with what is known of the classes."""
        if options.results.evaluate_every_steps is not None:
            self.data.test_dataloader()  # says what is missing
        if earlier is not None and (position := earlier[name]) is not None:
            self.data.load_state_dict(position)  # a peer that comes back goes on with its samples

    def _open(self, options: PeerOptions, manifest: RunManifest, identity: str) -> PeerData | NoData:
        recipe, machine = manifest.recipe, options.machine
        if options.role.helps:
            return NoData(recipe, digest_for(manifest, machine.data_dir, options.role.data_digest))
        return build_data(recipe, machine.data_dir, machine.batch_size or 1, identity, options.computing.num_workers)


class Workload:
    """What one peer computes; a helper computes nothing.

    Args:
        options: this peer's own settings
        recipe: what is trained
        own: its data
        identity: of this peer
        joins: whether others train already, and have the weights
        channel: to the other processes of this peer; None if it is one process

    Raises:
        InputError: something that a person gave cannot work
    """

    def __init__(
        self,
        options: PeerOptions,
        recipe: Recipe,
        own: OwnData,
        identity: str,
        joins: bool,
        channel: Channel | None = None,
    ):
        self._options, self._recipe, self._channel = options, recipe, channel
        self.data, self.helps = own.data, options.role.helps
        self.checkpoint, self.resumed_step = own.checkpoint, own.resumed_step
        if channel is not None:
            self._deal_out(channel, identity)
        self.task = build_task(recipe)
        self.started_from = None if joins or self.resumed_step is not None else options.start_from
        """The file whose weights a new swarm starts from."""
        if self.started_from is not None:
            path = self.started_from.expanduser()
            load_weights(self.task, read_checkpoint(path), path)
        if options.machine.batch_size:
            check_samples(self.task.model, options.machine.batch_size, recipe.model)
        self.devices = [device_name(self._torch_device)]
        """On which this peer computes, one of each of its processes."""
        self.micro_batch = self._choose_micro_batch()
        if options.computing.compile and not self.helps:
            self.task.compile_model(self._torch_device)
        self.data.batch_size = self.micro_batch.samples

    @property
    def device(self) -> str:
        """Kind of device on which this peer computes; a helper has nothing that a GPU could do."""
        return "cpu" if self.helps else self._options.machine.device

    @property
    def _torch_device(self) -> torch.device:
        """That of this process."""
        if self._channel is not None:
            return self._channel.device
        return torch.device("cpu" if self.device == "cpu" or not torch.cuda.is_available() else "cuda")

    @property
    def num_gpus(self) -> int:
        """Of this machine, which this peer could use."""
        return 0 if self.device == "cpu" else torch.cuda.device_count()

    @property
    def replay(self) -> Replay:
        """Computes any micro-batch of this peer again."""
        return Replay(self.task, self.data)

    def _deal_out(self, channel: Channel, identity: str) -> None:
        """The other processes of this peer prepare themselves, and each takes samples of its own."""
        channel.tell(Word.PLAN)
        plan = {"recipe": self._recipe.to_json(), "identity": identity, "position": self.data.samples_trained}
        channel.exchange(plan, listen=False)
        self.data.deal_out(channel.rank, channel.size)

    def _choose_micro_batch(self) -> MicroBatch:
        """As somebody has said, or as many samples as this device computes in about a second."""
        if self.helps:
            return NO_MICRO_BATCH
        machine, num_processes = self._options.machine, 1 if self._channel is None else self._channel.size
        if machine.batch_size:
            found = MicroBatch(machine.batch_size, math.nan, "given")
        else:
            num_samples = self.data.num_train_samples
            found = measure_for_recipe(self.task.model, self._recipe, machine.device, num_samples, num_processes)
        if self._channel is None:
            return found
        answer = {"problem": "", "asked": {"the data": self.data.digest}, "samples": found.samples}
        answers = agree(self._channel, answer | {"device": self.devices[0]}, listen=False)
        self.devices = [answer["device"] for answer in answers]
        return replace(found, samples=agreed_samples(answers))
