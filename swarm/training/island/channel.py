"""How the processes of an island communicate: the first one sends a command, a *word*, and all others carry it out.

torch's process groups carry the messages: gloo between CPUs, and NCCL between GPUs. They are not torch's default group,
so neither Lightning nor torchmetrics knows of them: to both, each process trains alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from recipe.errors import InputError
from recipe.training.launched import Launched, meet
from swarm.training.island.lost import IslandLost

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""torch's backend that carries tensors between the processes of an island, by the kind of their devices."""
MEET_SECONDS = 120.0
"""Seconds for which the processes wait for each other at the start."""
WORK_SECONDS = 600.0
"""Seconds for which a process waits for the others in common work, such as a first micro-batch that is compiled."""
SILENT_SECONDS = 60.0
"""Seconds without a word from the first process after which the others take it for lost. The first process waits longer
for them, since gloo cuts all connections of a group if one message is not received in time."""
PULSE_SECONDS = 5.0
"""Seconds from one word to the next while the first process has no command to give."""


class Word(IntEnum):
    """A command of the first process. Numbers that go with it are named first, in parentheses."""

    WAIT = 0
    """No command: the first process is alive, and does something alone, such as a round, a validation or a pause."""
    COMPUTE = 1
    """(step, forget, weights, *lineage): compute a micro-batch next. With `forget` 1, drop your sums first. With
    `weights` 1, take the weights that follow."""
    GATHER = 2
    """(unit, turns): hand over your gradients, as sums divided by `unit`, and your notes on so many micro-batches."""
    END = 3
    """End: this peer has left."""
    PLAN = 4
    """Receive in an `exchange` what is trained next."""

    # Where the processes share one model (`swarm.training.island.sharded`):

    FORGET = 5
    """Drop your gradients."""
    LEND = 6
    """(model, goes_back): compute this model on any input, because the first process needs your pieces of its weights.
    With `goes_back` 1, compute a backward pass, too, as in training."""
    LOOK = 7
    """Say whether your gradients are finite."""
    GIVE = 8
    """Send your gradients, and begin new sums."""
    TAKE = 9
    """(adds): receive pieces of a gradient. With `adds` 1, add them to your sums; with 0, use them for an update."""
    STEP = 10
    """Receive the optimizer's settings in an `exchange`, and let it make a step."""
    READ = 11
    """(kind, number): send your piece of a weight or a statistic."""
    WRITE = 12
    """(kind, number): receive your piece of a weight or a statistic."""
    RENEW = 13
    """Forget the optimizer's statistics."""
    KIND = 14
    """Say on what kind of device you compute."""


CLOSE_SECONDS = 30.0
"""Seconds for which a process that ends waits until the others have received its last word."""
NUMBERS = 5
"""Most numbers that go with a word."""


class Channel:
    """The connection of this process to the other processes of its island.

    Args:
        launched: the rank of this process and the number of processes
        device: the device on which this process computes
        divides: the processes share one model, of which each holds pieces

    Raises:
        IslandLost: the other processes are not there
    """

    def __init__(self, launched: Launched, device: torch.device, divides: bool = False):
        self.rank, self.size, self.device, self.divides = launched.rank, launched.size, device, divides
        try:
            self._store = store = meet(self.rank, self.size, MEET_SECONDS)
            self._words = self._gloo(store, "words", WORK_SECONDS if self.is_first else SILENT_SECONDS)
            self._work = self._gloo(store, "work", WORK_SECONDS)
            self._tensors = self._nccl(store) if BACKENDS[device.type] == "nccl" else self._work
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise IslandLost(f"The {self.size} processes of this island have not found each other.") from error
        self._lock = threading.RLock()
        self._closing, self._broken = threading.Event(), False
        self._last_word: dist.Work | None = None
        self.is_heard = False
        """In the first process: whether the others wait for its next word."""
        if self.is_first:
            threading.Thread(target=self._pulse, name="island", daemon=True).start()

    @classmethod
    def connect(cls, wanted: str = "auto", divides: bool = False) -> Channel:
        """Open a channel to the processes that torchrun has started with this one.

        Args:
            wanted: auto, cpu or cuda
            divides: as in the class

        Raises:
            InputError: there are no other processes, or too few devices
            IslandLost: the other processes do not answer
        """
        launched = Launched.from_environment()
        if launched.size < 2:
            raise InputError("An island needs two processes or more: start it with torchrun --nproc-per-node 2.")
        return cls(launched, launched.device(wanted), divides)

    @property
    def is_first(self) -> bool:
        """Whether this process is the first one, which is the peer. The others only compute for it."""
        return self.rank == 0

    def _gloo(self, store: dist.Store, name: str, seconds: float) -> dist.ProcessGroup:
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), self.rank, self.size, timedelta(seconds=seconds))

    def _nccl(self, store: dist.Store) -> dist.ProcessGroup:
        torch.cuda.set_device(self.device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=WORK_SECONDS)
        return dist.ProcessGroupNCCL(dist.PrefixStore("tensors", store), self.rank, self.size, options)

    def begin_default_group(self) -> None:
        """Make torch's default group, since `fully_shard` gathers weights and scatters gradients over that one only."""
        backend, timeout = BACKENDS[self.device.type], timedelta(seconds=WORK_SECONDS)
        store = dist.PrefixStore("default", self._store)
        with self._losses_told():
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)

    # ---- words ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        """A context in which no other thread says a word, for a word and the messages that follow it."""
        with self._lock, self._losses_told():
            yield

    def tell(self, word: Word, *numbers: int) -> None:
        """Say a word to the other processes, and wait until all have received it. Only the first process does this."""
        with self.speaking():
            self.say(word, *numbers).wait()

    def say(self, word: Word, *numbers: int) -> dist.Work:
        """Like `tell`, but without waiting; `close` waits, for `CLOSE_SECONDS` at most."""
        with self.speaking():
            said = torch.tensor([word, *numbers, *[0] * NUMBERS][: 1 + NUMBERS])
            self._last_word = self._words.broadcast(said, 0)
            self.is_heard = word not in (Word.COMPUTE, Word.END)
            return self._last_word

    def hear(self) -> tuple[Word, list[int]]:
        """Wait for the next word of the first process other than `WAIT`; return it with its numbers."""
        said = torch.zeros(1 + NUMBERS, dtype=torch.int64)
        while True:
            with self._losses_told():
                self._words.broadcast(said, 0).wait()
            word, *numbers = said.tolist()
            if word != Word.WAIT:
                return Word(word), numbers

    def _pulse(self) -> None:
        """Say `WAIT` every few seconds, so that the others know that this process is alive.

        This does not wait until they have received it: they may first do something together with this process.
        """
        while not self._closing.wait(PULSE_SECONDS):
            with contextlib.suppress(IslandLost), self.speaking():  # the next thread that speaks gets the error
                if self.is_heard and (self._last_word is None or self._last_word.is_completed()):
                    self.say(Word.WAIT)

    # ---- what all processes do together ------------------------------------------------------------------------------

    def exchange(self, value: Any, listen: bool = True) -> list[Any]:
        """Exchange a value with all processes, encoded as JSON; return the values of all, by rank.

        Args:
            listen: the other processes listen for words right after this, and not only after a while
        """
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        with self.speaking():
            sizes = torch.zeros(self.size, dtype=torch.int64)
            sizes[self.rank] = len(content)
            self._work.allreduce(sizes).wait()
            contents = torch.zeros(self.size, int(sizes.max()), dtype=torch.uint8)
            contents[self.rank, : len(content)] = content
            self._work.allreduce(contents).wait()
            self.is_heard = listen
        rows = zip(contents, sizes.tolist(), strict=True)
        return [json.loads(bytes(row[:size].tolist())) for row, size in rows]

    def add_up(self, samples: int) -> int:
        """Return the sum of the samples that all processes have computed. The others listen for words from then on."""
        total = torch.tensor([samples])
        with self.speaking():
            self._work.allreduce(total).wait()
            self.is_heard = True
        return int(total)

    def reduce_numbers(self, numbers: torch.Tensor) -> None:
        """Sum a few numbers, which are on the CPU, over all processes; the first process gets the sum, in place."""
        with self.speaking():
            self._work.reduce(numbers, 0).wait()

    def reduce(self, tensor: torch.Tensor) -> None:
        """Sum many numbers over all processes; the first process gets the sum, in place."""
        with self.speaking():
            self._carrier_of(tensor).reduce(tensor, 0).wait()

    def spread(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the first process's values to all processes, in place."""
        with self.speaking(), torch.no_grad():
            whole = [tensor.detach().contiguous() for tensor in tensors]
            for work in [self._carrier_of(one).broadcast(one, 0) for one in whole]:
                work.wait()
            for own, came in zip(tensors, whole, strict=True):
                if came.data_ptr() != own.data_ptr() and not self.is_first:
                    own.detach().copy_(came)

    def _carrier_of(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        """The group that can carry a tensor: NCCL cannot if it is on the CPU, as a model is before it is divided."""
        return self._work if tensor.device.type == "cpu" else self._tensors

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a tensor to one process, which calls `receive`. Do nothing if it is empty."""
        if tensor.numel():
            with self.speaking():
                self._work.send([tensor.cpu().contiguous()], rank, 0).wait()

    @torch.no_grad()
    def receive(self, into: torch.Tensor, rank: int) -> None:
        """Receive a tensor that one process sends. Do nothing if it is empty."""
        if into.numel():
            is_here = into.device.type == "cpu" and into.is_contiguous()
            came = into if is_here else torch.empty(into.shape, dtype=into.dtype)
            with self.speaking():
                self._work.recv([came], rank, 0).wait()
            if came is not into:
                into.copy_(came)

    def hold(self) -> None:
        """Keep other threads of this process from speaking until `release`."""
        self._lock.acquire()

    def release(self) -> None:
        """Let other threads speak again; the thread that called `hold` calls this."""
        self._lock.release()

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """A context in which torch gathers and scatters for a divided model; a lost process raises `IslandLost`."""
        try:
            yield
        except RuntimeError as error:
            if self.divides and (isinstance(error, dist.DistError) or "gloo" in str(error)):
                self._broken = True
                raise IslandLost from error
            raise

    # ---- the end ----------------------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Declare the island lost, because this process has stopped in the middle of common work."""
        self._broken = True

    @property
    def is_lost(self) -> bool:
        """Whether another process is known to be gone, or this one has ended."""
        return self._broken

    @contextlib.contextmanager
    def _losses_told(self) -> Iterator[None]:
        """A context that turns torch's errors into `IslandLost`: torch has no exception for a process that is gone."""
        try:
            if self._broken:
                raise IslandLost
            yield
        except IslandLost:
            raise
        except RuntimeError as error:
            self._broken = True
            raise IslandLost from error

    def close(self) -> None:
        """Close the connections; processes that wait for this one get an error."""
        self._closing.set()
        with self._lock:
            self._broken = True
            if not self._last_word_is_out():
                # Freeing a gloo group waits for its unfinished work. An extra reference keeps it to the process's end.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._words))
            if self._tensors is not self._work and hasattr(self._tensors, "abort"):
                self._tensors.abort()  # else NCCL prints a warning in the end
            self._words = self._work = self._tensors = None  # this closes the connections
            if self.divides and dist.is_initialized():
                dist.destroy_process_group()

    def _last_word_is_out(self) -> bool:
        if self._last_word is None:
            return True
        with contextlib.suppress(RuntimeError):  # too late, or the others are gone
            self._last_word.wait(timedelta(seconds=CLOSE_SECONDS))
        return self._last_word.is_completed()
