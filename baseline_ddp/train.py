"""Train a recipe on one machine or on a cluster.

    python baseline_ddp/train.py                                              # one process
    torchrun --standalone --nproc-per-node 2 baseline_ddp/train.py            # two processes, DDP
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 baseline_ddp/train.py --strategy fsdp --recipe synthetic
    python baseline_ddp/train.py --print-launch --nnodes 4 --nproc-per-node 2 --master-addr 10.0.0.1  # a line per node
    python baseline_ddp/train.py --run-id RUN --resume                        # go on with a run that was interrupted
    python baseline_ddp/train.py --test runs/RUN/ddp-2/checkpoints/best.ckpt  # the official test split alone

`--help` explains every option.

Ctrl-C stops all processes after the same update, with a snapshot. One process, DDP and FSDP (torch's `fully_shard`)
have run on CPUs with gloo, on one node and on two. One process has run on a GPU with NCCL. 16-mixed, SyncBatchNorm and
several GPUs have not been tried.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # run as a file, Python puts this folder on the path instead of the repository's root
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from recipe.interrupts import end_silently

    end_silently()

from baseline_ddp.launch import launch_lines
from baseline_ddp.options import parse_options
from recipe.errors import InputError
from recipe.interrupts import raise_again, status_of


def main(arguments: list[str] | None = None) -> int:
    """Trains or tests; returns the exit status: 0, 2 for input that cannot work, 1 if the run fails later."""
    try:
        options = parse_options(arguments)
        if options.launch.print_launch:
            print(*launch_lines(options.launch, sys.argv[1:] if arguments is None else arguments), sep="\n")
            return 0
        recipe = options.build_recipe()
    except InputError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the other processes would print the same
            _tell(error)
        return 2
    if os.environ.get("RANK", "0") == "0":
        print("Starting; importing torch takes 5 s or more …", flush=True)

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings about lost connections come with stack traces
    # These import torch, after everything that can be refused without it.
    from baseline_ddp.evaluate import test_checkpoint
    from baseline_ddp.processes import RunFailed
    from baseline_ddp.session import run

    raise_again()
    try:
        return test_checkpoint(options) if options.test else run(options, recipe)
    except InputError as error:
        _tell(error)
        return 2
    except RunFailed as error:
        _tell(error)
        return 1


def _tell(error: Exception) -> None:
    print(f"error: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(status_of(main))
    except KeyboardInterrupt:  # raised only before the training begins; later, Ctrl-C stops it with a snapshot
        sys.exit(130)
