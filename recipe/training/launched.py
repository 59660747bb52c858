"""The processes that torchrun starts: the rank of this one, its device, and the store where all meet."""

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

_VARIABLES = {
    "rank": "RANK",
    "size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_size": "LOCAL_WORLD_SIZE",
    "restarts": "TORCHELASTIC_RESTART_COUNT",
}


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
        """Reads RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; without them there is one process.

        Raises:
            InputError: the variables are not numbers, or contradict each other.
        """
        given = {name: os.environ[variable] for name, variable in _VARIABLES.items() if variable in os.environ}
        try:
            processes = cls(**{name: int(value) for name, value in given.items()})
            fits = 0 <= processes.rank < processes.size and processes.local_rank >= 0 and processes.local_size >= 1
            fits = fits and processes.size % processes.local_size == 0
        except ValueError:
            fits = False
        if not fits:
            said = ", ".join(f"{_VARIABLES[name]}={value}" for name, value in given.items())
            raise InputError(
                f"The variables {said} are not numbers, or contradict each other: let torchrun start the processes."
            )
        return processes

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return self.size // self.local_size

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes files on behalf of all."""
        return self.rank == 0

    def device(self, wanted: str) -> torch.device:
        """The device of this process.

        Args:
            wanted: auto, cpu or cuda.

        Raises:
            InputError: the machine has fewer GPUs than processes.
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
    """Connect to the store at the master address; returns a part of it that no earlier attempt has written to.

    It runs in a thread, because torch waits for ever if another program accepts the connection.

    Args:
        rank: rank of this process.
        size: number of processes.
        seconds: longest wait for the other processes.

    Raises:
        RuntimeError, TimeoutError: there is no answer, or another program answers.
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

    torchrun keeps one store for all attempts, so restarted workers would read each other's old addresses there. The
    restart count does not tell attempts apart, because a node whose own workers did not fail does not count. So the
    first process names the attempt with a random word. It confirms the name to each other process under a random word
    that this process has just made up. A stale name of an earlier attempt is therefore never confirmed.

    Args:
        store: the store that all processes share.
        rank: rank of this process.
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
