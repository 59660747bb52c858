"""What a peer computes in a run: its samples, the model, and how many samples at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

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


class Workload:
    """Of one peer; a helper's is empty.

    Args:
        options: this peer's own settings
        manifest: what is trained
        folder: of this peer in this run, with the checkpoint of an earlier life
        identity: of this peer, which says in what order it takes samples
        joins: whether others train already: a checkpoint of this peer that cannot be read is then no obstacle
        channel: to the other processes of this peer; None if it is one process

    Raises:
        InputError: something that a person gave cannot work
    """

    def __init__(
        self,
        options: PeerOptions,
        manifest: RunManifest,
        folder: RunFolder,
        identity: str,
        joins: bool,
        channel: Channel | None = None,
    ):
        self._options, self._recipe, self._channel = options, manifest.recipe, channel
        self.helps = options.role.helps
        self.data = self._open_data(manifest, identity)
        data_name = type(self.data).__qualname__
        self.checkpoint, earlier = newest_checkpoint(folder.checkpoints, not joins, data_name)
        self.resumed_step: int | None = None if earlier is None else earlier["global_step"]
        self.data.prepare_data()
        self.data.setup("fit")
        if options.results.evaluate_every_steps is not None:
            self.data.test_dataloader()  # says what is missing
        if earlier is not None and (position := earlier[data_name]) is not None:
            self.data.load_state_dict(position)  # a peer that comes back goes on with its samples
        if channel is not None:
            self._deal_out(channel, identity)
        self.task = build_task(self._recipe)
        self.started_from = None if joins or earlier is not None else options.start_from
        """The file whose weights a new swarm starts from."""
        if self.started_from is not None:
            path = self.started_from.expanduser()
            load_weights(self.task, read_checkpoint(path), path)
        if options.machine.batch_size:
            check_samples(self.task.model, options.machine.batch_size, self._recipe.model)
        self.devices = [device_name(self._torch_device)]
        """On which this peer computes, one of each of its processes."""
        self.micro_batch = self._choose_micro_batch()
        if options.machine.compile and not self.helps:
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
        """That this peer could use on this machine."""
        return 0 if self.device == "cpu" else torch.cuda.device_count()

    @property
    def replay(self) -> Replay:
        """Makes any micro-batch of it again."""
        return Replay(self.task, self.data)

    def _open_data(self, manifest: RunManifest, identity: str) -> PeerData | NoData:
        """What this peer trains on, in its own order."""
        machine = self._options.machine
        if self.helps:
            return NoData(self._recipe, digest_for(manifest, machine.data_dir, self._options.role.data_digest))
        return build_data(self._recipe, machine.data_dir, machine.batch_size or 1, identity, machine.num_workers)

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
