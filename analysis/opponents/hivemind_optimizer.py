"""Trains a recipe with Hivemind's own Optimizer, as its quick start does, or tuned.

    python -m analysis.opponents.hivemind_optimizer --name h1 --listen /ip4/10.77.0.1/tcp/31337 --peers 2
    python -m analysis.opponents.hivemind_optimizer --name h2 --listen /ip4/10.77.0.2/tcp/31337 --peers 2 \\
        --initial-peers ADDRESS       # which the first one prints
    ... --tuned            # short matchmaking, known group size, delayed averaging in fp16, rare state averaging

The defaults are those of `hivemind.Optimizer` 1.1.12. All peers wait for each other before they begin to train.
"""

from __future__ import annotations

import argparse
import inspect
import time
from functools import partial
from pathlib import Path
from typing import Any

import hivemind
import torch
from hivemind.compression import Float16Compression
from hivemind.optim.grad_averager import GradientAverager
from hivemind.utils import get_dht_time
from torch import nn

from analysis.opponents.training import RUN_ID, Device, Run, run_and_exit, validate
from recipe.config import Recipe
from recipe.data.peer_data import PeerData
from recipe.optimizer import build_optimizer, build_scheduler
from recipe.run_folder import write_json
from recipe.training.loggers import JsonlLogger

_POLL_SECONDS = 0.2
_RECORD_SECONDS = 600.0
_FAREWELL_SECONDS = 60.0
"""Longest time that a peer which has made its steps waits for the others; one of them may have died."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="name of this peer's run folder")
    parser.add_argument("--listen", default="/ip4/127.0.0.1/tcp/0", help="multiaddress to listen on")
    parser.add_argument("--initial-peers", nargs="*", default=[], help="addresses of running peers")
    parser.add_argument("--peers", type=int, required=True, help="begin to train when this many peers have joined")
    parser.add_argument("--steps", type=int, required=True, help="leave after this many global updates")
    parser.add_argument("--batch-size", type=int, default=32, help="micro-batch in samples")
    parser.add_argument("--recipe", default="synthetic", help="a preset")
    parser.add_argument("--change", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of the recipe")
    parser.add_argument("--output-dir", type=Path, default=Path("runs"))
    parser.add_argument(
        "--tuned", action="store_true", help="use the best settings we know instead of Hivemind's defaults"
    )
    return parser.parse_args(arguments)


def tuned_settings(num_peers: int) -> dict[str, Any]:
    """The settings that brought the stock Optimizer closest to the limits of the network.

    With a known group size, matchmaking ends when all peers are there. Delayed averaging hides it behind computation.
    """
    group = {"target_group_size": num_peers, "request_timeout": 1.0}
    return {
        "matchmaking_time": 3.0,
        "next_chunk_timeout": 20.0,
        "delay_grad_averaging": True,
        "delay_optimizer_step": True,
        "grad_compression": Float16Compression(),
        "state_averaging_compression": Float16Compression(),
        "average_state_every": 8,
        "grad_averager_factory": partial(GradientAverager, **group),
        "averager_opts": group,
    }


def collaborative(module: nn.Module, recipe: Recipe, dht: hivemind.DHT, options: argparse.Namespace):
    """A `hivemind.Optimizer` around the recipe's optimizer and schedule; averaged gradients are clipped as the recipe
    says."""
    own = build_optimizer(module, recipe)
    accepted = inspect.signature(type(own)).parameters
    settings = {name: value for name, value in own.defaults.items() if name in accepted}

    def build(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer = type(own)(groups, **settings)
        if recipe.clip_norm:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            optimizer.register_step_pre_hook(lambda *_: _clip(parameters, recipe.clip_norm))
        return optimizer

    common = {
        "dht": dht,
        "run_id": RUN_ID,
        "target_batch_size": recipe.target_batch_size,
        "batch_size_per_step": options.batch_size,
        "params": [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in own.param_groups],
        "optimizer": build,
        "scheduler": lambda optimizer: build_scheduler(optimizer, recipe),
    }
    return hivemind.Optimizer(**common, **(tuned_settings(options.peers) if options.tuned else {}))


def _clip(parameters: list[nn.Parameter], clip_norm: float) -> None:
    nn.utils.clip_grad_norm_(parameters, clip_norm)


class Roll:
    """A record in the DHT of the peers that have reached each stage.

    Args:
        dht: this peer's DHT.
        name: this peer's name.
        num_peers: number of all peers.
    """

    def __init__(self, dht: hivemind.DHT, name: str, num_peers: int) -> None:
        self.dht, self.name, self.num_peers = dht, name, num_peers

    def is_complete(self, stage: str) -> bool:
        """Records that this peer has reached a stage; returns whether all have."""
        expiration = get_dht_time() + _RECORD_SECONDS
        self.dht.store(stage, subkey=self.name, value=True, expiration_time=expiration)
        found = self.dht.get(stage, latest=True)
        return found is not None and len(found.value) >= self.num_peers


def train(module: nn.Module, data: PeerData, optimizer, steps: int, logger: JsonlLogger, roll: Roll) -> None:
    """Trains until all peers have made `steps` updates, and logs the samples that this peer gave to each of them.

    A peer that stopped earlier would leave the others waiting for an average. Validates as often as the recipe says;
    that time belongs to no update.
    """
    while not roll.is_complete("ready"):  # peers that start out of phase stay out of phase
        time.sleep(_POLL_SECONDS)
    device = Device(data.recipe.label_smoothing)
    since, samples, epoch = time.perf_counter(), 0, optimizer.local_epoch
    module.train()
    for inputs, labels in data.train_dataloader():
        loss = device.backward(module, inputs, labels)
        optimizer.step(batch_size=len(labels))
        optimizer.zero_grad()
        samples += len(labels)
        if optimizer.local_epoch > epoch:
            now, before, epoch = time.perf_counter(), epoch, optimizer.local_epoch
            if before < steps:
                values = {"swarm/own_samples": samples, "perf/step_seconds": now - since, "train/loss": loss}
                logger.log_metrics(values, step=epoch)
                if epoch // data.recipe.validate_every_steps > before // data.recipe.validate_every_steps:
                    logger.log_metrics(validate(module, data), step=epoch)
                since, samples = time.perf_counter(), 0
        if epoch >= steps and (roll.is_complete("done") or time.perf_counter() - since > _FAREWELL_SECONDS):
            return


def main() -> None:
    """Trains one peer, and shuts it down in the order that Hivemind needs."""
    options = parse()
    dht = hivemind.DHT(
        initial_peers=options.initial_peers, host_maddrs=[options.listen], startup_timeout=60, start=True
    )
    addresses = [str(address) for address in dht.get_visible_maddrs()]
    print("--initial-peers", *addresses, flush=True)
    run = Run.of(options)  # after the fork of the DHT's process, which needs none of torch's threads
    write_json(run.folder.status, {"addresses": addresses})
    optimizer = collaborative(run.module, run.recipe, dht, options)
    roll = Roll(dht, options.name, options.peers)
    try:
        train(run.module, run.data, optimizer, options.steps, JsonlLogger(run.folder.metrics), roll)
        run.end(optimizer.local_epoch, options.peers)
    finally:
        optimizer.shutdown()
        dht.shutdown()


if __name__ == "__main__":
    run_and_exit(main)
