"""Trains a recipe with torchft's DiLoCo or LocalSGD, as its documents say, or tuned.

    python -m analysis.opponents.torchft_diloco --name h1 --address 10.77.0.1 --first 10.77.0.1 --peers 2 --steps 10
    python -m analysis.opponents.torchft_diloco --name h2 --address 10.77.0.2 --first 10.77.0.1 --peers 2 --steps 10
    ... --local-steps 4 --delay 3    # what the first of four steps has changed is averaged during the other three

The first peer runs the lighthouse, which all others need. In one step, a peer takes its share of the recipe's target
batch. So with four local steps, an update takes four target batches. torchft quantises on GPUs only, so here all is
float32.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.distributed import Store, TCPStore

from analysis.opponents.training import Device, Run, run_and_exit, validate
from recipe.data.peer_data import PeerData
from recipe.errors import InputError
from recipe.optimizer import build_optimizer, build_scheduler
from recipe.run_folder import RunFolder, write_json
from recipe.training.loggers import JsonlLogger

_LIGHTHOUSE_PORT, _STORE_PORT = 29510, 29511
_TIMEOUT = timedelta(minutes=10)
"""Longest time of an average over a slow line, and of a peer's wait for one."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="name of this peer's run folder")
    parser.add_argument("--address", required=True, help="IP address of this peer")
    parser.add_argument("--first", required=True, help="IP address of the first peer")
    parser.add_argument("--peers", type=int, required=True, help="number of peers in each update")
    parser.add_argument("--steps", type=int, required=True, help="leave after this many averages")
    parser.add_argument("--algorithm", choices=("diloco", "localsgd"), default="diloco")
    parser.add_argument("--local-steps", type=int, default=4, help="local steps between two averages")
    parser.add_argument("--delay", type=int, default=0, help="local steps that go on while an average is made")
    parser.add_argument("--batch-size", type=int, default=32, help="micro-batch in samples")
    parser.add_argument("--recipe", default="synthetic", help="a preset")
    parser.add_argument("--change", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of the recipe")
    parser.add_argument("--output-dir", type=Path, default=Path("runs"))
    return parser.parse_args(arguments)


def local_training(module: nn.Module, optimizer: torch.optim.Optimizer, manager, options: argparse.Namespace):
    """torchft's context that makes the averages; it follows the steps of the optimizer."""
    from torchft.local_sgd import DiLoCo, LocalSGD

    if options.algorithm == "localsgd":
        return LocalSGD(manager, module, optimizer, options.local_steps)
    # The outer optimizer is that of our swarm's local steps: it applies the mean of all peers, without momentum.
    outer = torch.optim.SGD(module.parameters(), lr=1.0)
    return DiLoCo(
        manager,
        [module],
        optimizer,
        outer,
        options.local_steps,
        use_bucketization=True,  # else each tensor is averaged separately, with its own round trips
        fragment_sync_delay=options.delay,
        fragment_update_alpha=0.5 if options.delay else 0.0,  # keeps half of what was learnt meanwhile
    )


@contextlib.contextmanager
def managed(
    module: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace, folder: RunFolder
) -> Iterator:
    """Yields torchft's manager once all peers are there. The first peer ends last, since it runs the lighthouse."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    is_first = options.address == options.first
    lighthouse = None
    if is_first:
        lighthouse = LighthouseServer(f"[::]:{_LIGHTHOUSE_PORT}", options.peers)
        write_json(folder.status, {"addresses": [f"http://{options.address}:{_LIGHTHOUSE_PORT}"]})
    # torchft needs a store for each peer. At the first peer's store, all peers also wait for each other.
    port = _STORE_PORT if is_first else 0  # any free port
    store = TCPStore(options.address, port, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
    common = store if is_first else TCPStore(options.first, _STORE_PORT, is_master=False, timeout=_TIMEOUT)

    def load(state: dict) -> None:
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["own"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "own": optimizer.state_dict()},
        min_replica_size=options.peers,
        use_async_quorum=False,
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=options.address,
        store_port=store.port,
        lighthouse_addr=f"http://{options.first}:{_LIGHTHOUSE_PORT}",
        replica_id=options.name,
        hostname=options.address,
        init_sync=False,  # all peers have equal weights, from the seed
    )
    try:
        meet(common, "ready", options.peers)
        yield manager
        meet(common, "done", options.peers)
        if is_first:
            meet(common, "gone", options.peers)
        else:
            _reach(common, "gone")
    finally:
        manager.shutdown(wait=False)
        if lighthouse is not None:
            lighthouse.shutdown()


def meet(store: Store, stage: str, peers: int) -> None:
    """Returns when so many peers have reached the stage, this one among them."""
    _reach(store, stage)
    store.wait([f"{stage}/{number}" for number in range(1, peers + 1)], _TIMEOUT)


def _reach(store: Store, stage: str) -> None:
    store.set(f"{stage}/{store.add(stage, 1)}", "")


def train(
    module: nn.Module,
    data: PeerData,
    optimizer: torch.optim.Optimizer,
    manager,
    options: argparse.Namespace,
    logger: JsonlLogger,
) -> None:
    """Trains, and logs the samples that this peer gave to each update. Validation belongs to no update."""
    recipe, device = data.recipe, Device(data.recipe.label_smoothing)
    batches, schedule = iter(data.train_dataloader()), build_scheduler(optimizer, recipe)
    share = recipe.target_batch_size / options.peers
    num_micro_batches = max(1, round(share / options.batch_size))
    module.train()
    with local_training(module, optimizer, manager, options):
        since, samples, loss = time.perf_counter(), 0, 0.0
        while manager.current_step() < options.steps:
            updates = manager.current_step()
            optimizer.zero_grad()
            for _ in range(num_micro_batches):
                inputs, labels = next(batches)
                loss = device.backward(module, inputs, labels, 1 / num_micro_batches)
                samples += len(labels)
            if recipe.clip_norm:
                nn.utils.clip_grad_norm_(module.parameters(), recipe.clip_norm)
            optimizer.step()  # torchft's hooks average here
            schedule.step()
            if (step := manager.current_step()) == updates:
                continue
            now = time.perf_counter()
            logger.log_metrics(
                {"swarm/own_samples": samples, "perf/step_seconds": now - since, "train/loss": loss}, step=step
            )
            every = max(1, recipe.validate_every_steps // options.local_steps)
            if step // every > updates // every:
                logger.log_metrics(validate(module, data), step=step)
            since, samples = time.perf_counter(), 0


def main() -> None:
    """Trains one peer."""
    options = parse()
    try:
        import torchft  # noqa: F401
    except ImportError:
        raise InputError('torchft is not installed: pip install -e ".[opponents]".') from None
    if not 0 <= options.delay < options.local_steps:
        raise InputError("--delay has to be less than --local-steps: an average comes before the next one.")
    run = Run.of(options)
    optimizer = build_optimizer(run.module, run.recipe)
    with managed(run.module, optimizer, options, run.folder) as manager:
        train(run.module, run.data, optimizer, manager, options, JsonlLogger(run.folder.metrics))
        steps = manager.current_step()
    run.end(steps, options.peers)


if __name__ == "__main__":
    run_and_exit(main)
