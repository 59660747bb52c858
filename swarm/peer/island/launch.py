"""Starts a peer that torchrun runs as several processes: they connect, and check that all have the same options.

torchrun --standalone --nproc-per-node 2 -m swarm.peer --initial-peers …
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil

from recipe.command_line import without_secrets
from recipe.errors import InputError, shown
from swarm.peer.options import PeerOptions
from swarm.peer.rejoin import resumed
from swarm.training.island.lost import IslandLost

if TYPE_CHECKING:
    from swarm.training.island.channel import Channel

RESTARTS = 9
"""`--max-restarts` in the torchrun command that a peer offers for several GPUs."""


def is_island() -> bool:
    """Whether torchrun has started other processes with this one."""
    return {"RANK", "MASTER_ADDR"} <= os.environ.keys() and os.environ.get("WORLD_SIZE", "1") != "1"


def speaks() -> bool:
    """Whether this process prints messages for a person: the first one of each machine does."""
    return not is_island() or os.environ.get("LOCAL_RANK", "0") == "0"


@contextlib.contextmanager
def one_voice() -> Iterator[None]:
    """Silence all processes of a machine except the first, where all would print the same, such as the `--help`."""
    with contextlib.ExitStack() as stack:
        if not speaks():
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        yield


def check_one_process(options: PeerOptions) -> None:
    """Raises InputError: an option needs a peer of several processes"""
    if options.computing.inside == "fsdp":
        raise InputError(
            "--inside fsdp divides a model among processes: start several with torchrun --nproc-per-node 2, or leave "
            "it out."
        )


def connected(options: PeerOptions) -> Channel:
    """Connect to the other processes of this peer, and check that all were given the same.

    Raises:
        InputError: a process is missing; or something does not fit, in the first process, which prints it
        SystemExit: something does not fit, with status 2 in the other processes
    """
    import torch

    from recipe.training.launched import Launched
    from swarm.training.island.channel import Channel

    launched, device, problem = Launched.from_environment(), torch.device("cpu"), ""
    try:
        device = launched.device(options.machine.device)
        if options.role.helps:
            raise InputError("A helper computes nothing: start it without torchrun.")
        if options.leaving.pause_on_battery or options.leaving.pause_on_metered:
            raise InputError(
                "A peer of several processes does not pause: leave out --pause-on-battery and --pause-on-metered."
            )
        if options.computing.inside == "fsdp" and options.machine.batch_size is None:
            raise InputError(
                "A micro-batch is measured on a whole model, which --inside fsdp does without: give --batch-size."
            )
    except InputError as error:
        problem = str(error)
    try:
        channel = Channel(launched, device, divides=options.computing.inside == "fsdp")
    except IslandLost as error:
        raise InputError(f"{error} Start all of them with torchrun, within two minutes.") from error
    agree(channel, {"problem": problem, "asked": asked(options) | {"--device": device.type}})
    return channel


def agree(channel: Channel, answer: dict[str, Any], listen: bool = True) -> list[dict[str, Any]]:
    """Exchange the answers of all processes, check that they fit, and return them by rank.

    Args:
        answer: of this process: its "problem" in words, empty if there is none, and what is "asked" of it
        listen: as of `Channel.exchange`

    Raises:
        InputError, SystemExit: as of `connected`
    """
    answers = channel.exchange(answer, listen)
    complaint = next((found for rank, one in enumerate(answers) if (found := difference(rank, one, answers[0]))), "")
    if complaint and channel.is_first:
        raise InputError(complaint)
    if complaint:
        raise SystemExit(2)
    return answers


def difference(rank: int, answer: dict[str, Any], first: dict[str, Any]) -> str:
    """Why this process cannot work with the first one; empty if it can."""
    if answer["problem"]:
        return answer["problem"] if rank == 0 else f"Process {rank} of this island: {answer['problem']}"
    here, there = answer["asked"], first["asked"]
    option = next((name for name in sorted(here | there) if here.get(name) != there.get(name)), None)
    if option is None:
        return ""
    return (
        f"Process {rank} of this island has {option} {shown(here.get(option))} and process 0 has "
        f"{shown(there.get(option))}: start all of them with the same command."
    )


def asked(options: PeerOptions) -> dict[str, Any]:
    """The options that have to be equal in all processes."""
    recipe = {f"--{name.replace('_', '-')}": value for name, value in options.wanted_recipe.items()}
    return recipe | {
        "--inside": options.computing.inside,
        "--initial-peers": sorted(options.initial_peers or ()),
        "--recipe": options.recipe,
        "--run-id": options.run_id,
    }


def settled(options: PeerOptions) -> PeerOptions:
    """In the first process, return options with which torchrun can start this peer again as the same one.

    A peer without a name gets one that is the same at all starts by one torchrun. From the second start on, the peer
    goes on with its newest checkpoint, if it has written one since torchrun began. An older one may be of another run.
    """
    if options.resume:  # the checkpoint has the name and the run
        return options
    launcher = psutil.Process(os.getppid())
    if options.machine.public_name is None:
        name = hashlib.sha256(f"{launcher.pid} {launcher.create_time()}".encode()).hexdigest()[:6]
        options = replace(options, machine=replace(options.machine, public_name=f"peer-{name}"))
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        with contextlib.suppress(InputError):  # it was killed before its first checkpoint
            return resumed(replace(options, resume=True, start_from=None), launcher.create_time())
    return options


def offer(num_gpus: int) -> str:
    """The command that uses all GPUs of this machine, for a peer that was started with one of them."""
    module = "swarm.peer" if sys.argv[0].endswith(os.path.join("peer", "__main__.py")) else "swarm"
    command = ["torchrun", "--standalone", "--nproc-per-node", str(num_gpus), "--max-restarts", str(RESTARTS), "-m"]
    given, shown = sys.argv[1:], without_secrets(sys.argv[1:])
    how = "One peer of all" if shown == given else "One peer of all, with what you gave in place of …"
    return (
        f"This machine has {num_gpus} GPUs, and this peer computes on one of them. {how}:\n"
        f"  {shlex.join([*command, module, *shown])}"
    )
