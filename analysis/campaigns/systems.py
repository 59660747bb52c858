"""The systems that are compared: a table with one row each, and the command that a user would run on each host."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from analysis.campaigns.cells import Cell
from analysis.wan.topology import Host
from recipe.errors import InputError

RUN_ID = "run"
PORT = 31337
MAX_SMALL_UPDATES = 24
"""Most updates of a system that averages every micro-batch: they are all alike, and slow."""
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class System:
    """A row of the comparison."""

    label: str
    """Name of the system in tables and figures."""
    command: Callable[[System, Cell, Host, Host, Path, tuple[str, ...]], list[str]]
    """Makes the command of a host from (system, cell, host, first host, output folder, addresses of the first peer)."""
    options: tuple[str, ...] = ()
    """Further options, which distinguish rows with the same command."""
    joins: bool = True
    """Whether the other hosts need the first one's address, which it writes to its `status.json`."""
    overlaps: bool = False
    """Whether the system averages while it computes the next update."""
    payload_bytes: float | None = 4
    """Bytes that a gradient element takes on the network; None if that depends on more than the system."""
    every_micro_batch: bool = False
    """Whether each micro-batch is averaged and makes an update."""
    local_steps: int = 0
    """Steps of each peer between two global updates, which are larger and rarer by this factor; 0 for none."""


def swarm(system: System, cell: Cell, host: Host, _first: Host, output: Path, addresses: tuple[str, ...]) -> list[str]:
    """The command line of a volunteer; that of the first host starts the run."""
    steps, changes = cell.steps, dict(cell.changes)
    if local := system.local_steps:
        recipe, steps = cell.full_recipe(), max(1, steps // local)
        changes |= {"averaging": "local", "local_steps": local, "target_batch_size": recipe.target_batch_size * local}
        # The warm-up is rounded up: all steps of an update have one learning rate, and a warm-up of one update has no
        # effect.
        changes |= {"total_steps": max(1, recipe.total_steps // local)}
        changes |= {"warmup_steps": math.ceil(recipe.warmup_steps / local)}
        if cell.target_accuracy is not None:
            changes["validate_every_steps"] = recipe.validate_every_steps // local
    command = [sys.executable, "-m", "swarm.peer", "--public-name", host.name, "--output-dir", str(output)]
    command += ["--host-maddrs", f"/ip4/{host.address}/tcp/{PORT}", "--device", "cpu", "--max-steps", str(steps)]
    command += ["--batch-size", str(cell.batch_size), "--min-peers", str(cell.peers_at_start), *system.options]
    if addresses:
        return [*command, "--initial-peers", *addresses]
    return [*command, "--run-id", RUN_ID, "--recipe", cell.recipe, *recipe_options(cell, changes)]


def ddp(system: System, cell: Cell, host: Host, first: Host, output: Path, _addresses: tuple[str, ...]) -> list[str]:
    """The command line of a cluster's user on one node."""
    steps, changes = cell.steps, dict(cell.changes)
    if system.every_micro_batch:
        whole = cell.full_recipe().target_batch_size
        changes["target_batch_size"] = cell.batch_size * cell.peers
        steps = min(MAX_SMALL_UPDATES, max(1, steps * whole // changes["target_batch_size"]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(cell.peers), "--nproc-per-node", "1"]
    torchrun += ["--node-rank", str(host.number - 1), "--master-addr", first.address, "--master-port", "29500"]
    script = [str(_ROOT / "baseline_ddp" / "train.py"), "--strategy", "ddp" if cell.peers > 1 else "single"]
    script += ["--recipe", cell.recipe, "--batch-size", str(cell.batch_size), "--max-steps", str(steps)]
    script += ["--device", "cpu", "--output-dir", str(output), "--run-id", RUN_ID, "--name", "h1"]
    options = system.options if cell.peers > 1 else ()
    return [*torchrun, *script, *options, *recipe_options(cell, changes)]


def hivemind_optimizer(
    system: System, cell: Cell, host: Host, _first: Host, output: Path, addresses: tuple[str, ...]
) -> list[str]:
    """The command of the script with Hivemind's Optimizer, which uses nothing of our swarm."""
    command = [sys.executable, "-m", "analysis.opponents.hivemind_optimizer", "--name", host.name]
    command += ["--listen", f"/ip4/{host.address}/tcp/{PORT}", "--steps", str(cell.steps), *system.options]
    return [*command, "--initial-peers", *addresses, *_opponent_options(cell, output)]


def torchft(
    system: System, cell: Cell, host: Host, first: Host, output: Path, _addresses: tuple[str, ...]
) -> list[str]:
    """The command of the script with torchft; the first peer runs its lighthouse."""
    steps = max(1, cell.steps // system.local_steps)
    command = [sys.executable, "-m", "analysis.opponents.torchft_diloco", "--name", host.name]
    command += ["--address", host.address, "--first", first.address, "--steps", str(steps)]
    command += ["--local-steps", str(system.local_steps), *system.options]
    return [*command, *_opponent_options(cell, output)]


def _opponent_options(cell: Cell, output: Path) -> list[str]:
    """Options that the programs of `analysis/opponents` share."""
    changes = [f"{name}={value}" for name, value in recipe_changes(cell, cell.changes).items()]
    options = ["--output-dir", str(output), "--recipe", cell.recipe, "--batch-size", str(cell.batch_size)]
    return [*options, "--peers", str(cell.peers), "--change", *changes]


def recipe_changes(cell: Cell, changes: dict[str, object]) -> dict[str, object]:
    """The changes of the recipe. Validation is turned off, unless the time to an accuracy is measured."""
    return ({} if cell.target_accuracy is not None else {"validate_every_steps": 1_000_000}) | changes


def recipe_options(cell: Cell, changes: dict[str, object]) -> list[str]:
    """The changes of the recipe as options of a command line."""
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in recipe_changes(cell, changes).items()]
    return [word for pair in pairs for word in pair]


TOP_K = 260 / 4096
"""Bytes per number of the codec topk: of each 4,096 numbers the 128 largest, in 2 bytes each, and a scale in 4."""

SYSTEMS: dict[str, System] = {
    "ddp-every-micro-batch": System("DDP, an update every micro-batch", ddp, joins=False, every_micro_batch=True),
    "ddp": System("DDP, accumulated", ddp, joins=False),
    "ddp-fp16": System("DDP, accumulated, fp16 hook", ddp, ("--comm-hook", "fp16"), joins=False, payload_bytes=2),
    "ddp-powersgd": System(
        "DDP, accumulated, PowerSGD hook",
        ddp,
        ("--comm-hook", "powersgd", "--powersgd-warmup-steps", "2"),
        joins=False,
        payload_bytes=None,
    ),
    "hivemind": System("Hivemind Optimizer, defaults", hivemind_optimizer),
    "hivemind-tuned": System(
        "Hivemind Optimizer, tuned", hivemind_optimizer, ("--tuned",), overlaps=True, payload_bytes=2
    ),
    "torchft-localsgd-4": System(
        "torchft LocalSGD, 4 local steps", torchft, ("--algorithm", "localsgd"), local_steps=4
    ),
    "torchft-diloco-4": System("torchft DiLoCo, 4 local steps", torchft, local_steps=4),
    "torchft-diloco-4-overlap": System(
        "torchft DiLoCo, 4 local steps, overlapped", torchft, ("--delay", "3"), overlaps=True, local_steps=4
    ),
    "swarm": System("our swarm, synchronous", swarm),
    "swarm-fp16": System("our swarm, synchronous, fp16", swarm, ("--codec", "fp16"), payload_bytes=2),
    "swarm-int8": System("our swarm, synchronous, int8", swarm, ("--codec", "int8"), payload_bytes=1),
    "swarm-overlap": System("our swarm, overlapped", swarm, ("--averaging", "overlap"), overlaps=True),
    "swarm-overlap-fp16": System(
        "our swarm, overlapped, fp16",
        swarm,
        ("--averaging", "overlap", "--codec", "fp16"),
        overlaps=True,
        payload_bytes=2,
    ),
    "swarm-overlap-int8": System(
        "our swarm, overlapped, int8",
        swarm,
        ("--averaging", "overlap", "--codec", "int8"),
        overlaps=True,
        payload_bytes=1,
    ),
    "swarm-powersgd": System(
        "our swarm, synchronous, PowerSGD of rank 8", swarm, ("--codec", "powersgd"), payload_bytes=None
    ),
    "swarm-int4": System("our swarm, synchronous, int4", swarm, ("--codec", "int4"), payload_bytes=0.5 + 4 / 256),
    "swarm-local": System("our swarm, 4 local steps", swarm, overlaps=True, local_steps=4),
    "swarm-local-1-topk": System(
        "our swarm, 1 local step, topk", swarm, ("--codec", "topk"), overlaps=True, payload_bytes=TOP_K, local_steps=1
    ),
    "swarm-local-4-topk": System(
        "our swarm, 4 local steps, topk", swarm, ("--codec", "topk"), overlaps=True, payload_bytes=TOP_K, local_steps=4
    ),
    "swarm-auto": System("our swarm, auto", swarm, ("--averaging", "auto"), overlaps=True, payload_bytes=None),
    "swarm-local-1-int8": System(
        "our swarm, 1 local step, int8", swarm, ("--codec", "int8"), overlaps=True, payload_bytes=1, local_steps=1
    ),
    "swarm-local-4-fp16": System(
        "our swarm, 4 local steps, fp16", swarm, ("--codec", "fp16"), overlaps=True, payload_bytes=2, local_steps=4
    ),
    "swarm-local-1-fp16": System(
        "our swarm, 1 local step, fp16", swarm, ("--codec", "fp16"), overlaps=True, payload_bytes=2, local_steps=1
    ),
    "swarm-local-1-fp16-fragments-4": System(
        "our swarm, 1 local step, fp16, 4 fragments",
        swarm,
        ("--codec", "fp16", "--fragments", "4"),
        overlaps=True,
        payload_bytes=2 / 4,
        local_steps=1,
    ),
    "swarm-local-4-fp16-fragments-4": System(
        "our swarm, 4 local steps, fp16, 4 fragments",
        swarm,
        ("--codec", "fp16", "--fragments", "4"),
        overlaps=True,
        payload_bytes=2 / 4,
        local_steps=4,
    ),
}


def asked_samples(cell: Cell) -> int:
    """Samples that an update was asked to have. A swarm's update has more, since no peer stops within a micro-batch."""
    system = SYSTEMS[cell.system]
    if system.every_micro_batch:
        return cell.batch_size * cell.peers
    return cell.full_recipe().target_batch_size * max(1, system.local_steps)


def have_equal_updates(system: str, baseline: str) -> bool:
    """Whether updates of both are asked to have equally many samples, so that updates per second can be compared."""
    one, other = SYSTEMS[system], SYSTEMS[baseline]
    same_steps = max(1, one.local_steps) == max(1, other.local_steps)
    return same_steps and one.every_micro_batch == other.every_micro_batch


def samples_between_validations(cell: Cell) -> int:
    """Samples between two validations: the resolution of a time to an accuracy."""
    recipe, local = cell.full_recipe(), SYSTEMS[cell.system].local_steps or 1
    return recipe.target_batch_size * max(1, recipe.validate_every_steps // local) * local


def check_learning(cell: Cell) -> None:
    """Raises InputError if the system would learn in another way than the others, or be validated after other samples.

    A warm-up of n updates takes (n - 1) / 2 full learning rates from a run. In the swarm it has n / local_steps
    updates, rounded up. These take as many, if n is a multiple of local_steps and one more. Cells of earlier versions
    may differ, and can still be read.
    """
    system, recipe = SYSTEMS[cell.system], cell.full_recipe()
    every, local = recipe.validate_every_steps, system.local_steps
    if cell.target_accuracy is None or not local:
        return
    if every % local:
        raise InputError(
            f"{cell.system} makes an update after {local} local steps, and cannot be validated after every {every}: "
            f"set validate_every_steps to a multiple of {local}."
        )
    if system.command is swarm and recipe.warmup_steps and (recipe.warmup_steps - 1) % local:
        raise InputError(
            f"{cell.system} changes its learning rate after {local} local steps, so its warm-up cannot be that of "
            f"{recipe.warmup_steps} updates: set warmup_steps to 0, or to a multiple of {local} and one more."
        )


def system_of(cell: Cell) -> System:
    """The cell's row of the table.

    Raises:
        InputError: the system does not exist, or cannot run this cell.
    """
    if cell.system not in SYSTEMS:
        raise InputError(f"There is no system {cell.system}: choose one of {', '.join(SYSTEMS)}.")
    system = SYSTEMS[cell.system]
    if cell.kill_at_step is not None and not system.joins:
        raise InputError(f"{cell.system} ends when one of its processes does: leave out kill_at_step for it.")
    if cell.last_joins_at_step is not None and system.command is not swarm:
        raise InputError(f"{cell.system} waits for all of its processes: leave out last_joins_at_step for it.")
    return system
