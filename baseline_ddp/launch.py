"""The command that each node of a cluster has to run, as `--print-launch` prints it."""

import shlex

from baseline_ddp.options import LaunchOptions
from recipe.errors import InputError

RENDEZVOUS_SECONDS = 120
"""Longest time that torchrun on a node waits for the other nodes; its own default is ten minutes."""

SCRIPT = "baseline_ddp/train.py"
_FLAGS = {"print-launch"}
_VALUES = {"nnodes", "nproc-per-node", "master-addr", "master-port", "max-restarts"}


def launch_lines(launch: LaunchOptions, arguments: list[str]) -> list[str]:
    """One command per node, node 0 first; all run from the repository root.

    Args:
        launch: the size of the cluster and the address of its first node.
        arguments: the command line; the options of `launch` are removed from it.

    Raises:
        InputError: there are several nodes, but no address at which they can meet.
    """
    rest = [SCRIPT, *_without_launch_options(arguments)]
    if launch.nnodes == 1:
        command = ["torchrun", "--standalone", "--nproc-per-node", str(launch.nproc_per_node)]
        return [shlex.join([*command, *_restarts(launch), *rest])]
    if not launch.master_addr:
        raise InputError("Several nodes have to know where to meet: give --master-addr, the address of the first node.")
    return [shlex.join([*_node_command(launch, rank), *_restarts(launch), *rest]) for rank in range(launch.nnodes)]


def _node_command(launch: LaunchOptions, rank: int) -> list[str]:
    options = {
        "--nnodes": launch.nnodes,
        "--node-rank": rank,
        "--nproc-per-node": launch.nproc_per_node,
        "--master-addr": launch.master_addr,
        "--master-port": launch.master_port,
        "--rdzv-conf": f"timeout={RENDEZVOUS_SECONDS}",
    }
    return ["torchrun", *(str(part) for option in options.items() for part in option)]


def _restarts(launch: LaunchOptions) -> list[str]:
    return ["--max-restarts", str(launch.max_restarts)] if launch.max_restarts else []


def _without_launch_options(arguments: list[str]) -> list[str]:
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
            continue
        name, _, value = argument.partition("=")
        name = name.removeprefix("--").replace("_", "-") if name.startswith("--") else ""
        if name in _VALUES:
            skip = not value
        elif name not in _FLAGS:
            kept.append(argument)
    return kept
