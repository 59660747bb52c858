"""The processes that torchrun starts: who this one is, which device is its own, and where they meet."""

import os
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist

from recipe.errors import InputError


@dataclass(frozen=True)
class Launched:
    """This process among those of a run, as torchrun describes it in the environment."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    restarts: int = 0
    """How often torchrun has restarted the workers."""

    @classmethod
    def from_environment(cls) -> Self:
        """What RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE say; without them, one process.

        Raises:
            InputError: they contradict each other.
        """
        names = {"rank": "RANK", "size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE"}
        found = {name: int(os.environ[variable]) for name, variable in names.items() if variable in os.environ}
        processes = cls(**found, restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))
        if not processes.rank < processes.size or processes.size % processes.local_size:
            raise InputError(
                f"The variables RANK={processes.rank}, WORLD_SIZE={processes.size} and LOCAL_WORLD_SIZE="
                f"{processes.local_size} contradict each other: let torchrun start the processes."
            )
        return processes

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return self.size // self.local_size

    @property
    def is_first(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def device(self, wanted: str) -> torch.device:
        """This process's device.

        Args:
            wanted: auto, cpu or cuda.

        Raises:
            InputError: there are too few GPUs.
        """
        if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
            return torch.device("cpu")
        found = torch.cuda.device_count()
        if found < self.local_size:
            raise InputError(
                f"{self.local_size} process(es) on this machine need as many GPUs and torch finds {found}: give "
                f"--device cpu, or start {max(found, 1)} with torchrun --nproc-per-node."
            )
        return torch.device("cuda", self.local_rank)


def meet(rank: int, size: int, seconds: float) -> dist.Store:
    """The store at the master address, where no earlier attempt has written.

    In a thread: torch waits for ever where a stranger takes the connection.

    Args:
        rank: of this process.
        size: number of processes.
        seconds: for which the others are waited for.

    Raises:
        RuntimeError, TimeoutError: nobody answers, or somebody else does.
    """
    found: list[dist.Store | BaseException] = []

    def look() -> None:
        try:
            store = next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))[0]
            found.append(store_of_this_attempt(store, rank, size))
        except BaseException as error:
            found.append(error)

    meeting = threading.Thread(target=look, daemon=True)
    meeting.start()
    meeting.join(seconds + 2.0)
    if not found:
        raise TimeoutError("something else answers there")
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def store_of_this_attempt(store: dist.Store, rank: int, size: int) -> dist.Store:
    """A part of the store that no earlier attempt has written to; all processes get the same one.

    torchrun keeps one store for all attempts, so that restarted workers would read each other's old addresses there.
    The restart count does not tell attempts apart, because nodes whose own workers did not fail do not count. So the
    first process names the attempt, and answers each other process by a word that this one has just made up.

    Args:
        store: shared by all processes.
        rank: of this one.
        size: number of processes.
    """
    if rank == 0:
        attempt = uuid.uuid4().hex
        store.set("attempt", attempt)
        for other in range(1, size):
            store.set(f"welcome/{store.get(f'{attempt}/{other}').decode()}", "")
        return dist.PrefixStore(attempt, store)
    word, attempt = uuid.uuid4().hex, ""
    while not store.check([f"welcome/{word}"]):
        if (named := store.get("attempt").decode()) != attempt:
            attempt = named
            store.set(f"{attempt}/{rank}", word)
        time.sleep(_POLL_SECONDS)
    return dist.PrefixStore(attempt, store)


_POLL_SECONDS = 0.05
