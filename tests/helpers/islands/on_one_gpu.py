"""An island on a machine with one GPU: of one process, over NCCL; or of several, which share the GPU, over gloo.

    torchrun --standalone --nproc-per-node 2 -m tests.helpers.islands.on_one_gpu --recipe synthetic --inside fsdp …

NCCL wants a GPU for each process, and an island wants two processes. Here neither is checked, so that an island can be
tried on one GPU. Each process prints at its end how much GPU memory it held. Options as of `swarm.peer`.
"""

import os
import sys

import torch

from recipe.training.launched import Launched
from swarm.peer import main as peer
from swarm.training.island.channel import BACKENDS


def share_one_gpu() -> None:
    """Let all processes compute on the first GPU, or on CPUs where there is none."""
    here = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    Launched.device = lambda launched, wanted: here
    peer.is_island = lambda: True
    if int(os.environ["WORLD_SIZE"]) > 1:
        BACKENDS["cuda"] = "gloo"


if __name__ == "__main__":
    share_one_gpu()
    status = peer.main()
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**20
        print(f"process {os.environ['RANK']} held at most {peak:.0f} MiB of the GPU", flush=True)
    sys.stdout.flush()
    os._exit(status)
