"""How the processes of an island talk: the first one says a word, and all others do what it means.

torch's process groups carry it, gloo between CPUs and NCCL between GPUs. They are no default group of torch, so neither
Lightning nor torchmetrics knows of them: to both, each process trains alone.
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
"""What of torch carries tensors between the processes of an island, by the kind of device that they are on."""
MEET_SECONDS = 120.0
"""Seconds for which the processes wait for each other at the start."""
WORK_SECONDS = 600.0
"""Seconds for which the first process waits for a micro-batch of another one, whose first may be compiled."""
SILENT_SECONDS = 60.0
"""After so long without a word of the first process, the others take it for lost. It waits longer for them: gloo would
cut all of a group's connections where one word was not heard in time."""
PULSE_SECONDS = 5.0
"""From one word to the next while the first process has nothing to say."""


class Word(IntEnum):
    """What the first process says."""

    WAIT = 0
    """It is there, and does something alone: a round, a validation, a pause."""
    COMPUTE = 1
    """(step, forget, weights, *lineage): a micro-batch comes next; 1 for: drop what you have, take these weights."""
    GATHER = 2
    """(unit, turns): hand over your gradients, each number for so many samples, and what you have noted in so many
    micro-batches."""
    END = 3
    """This peer has left."""
    PLAN = 4
    """What is trained follows, in an `exchange`."""

    # Where the processes share one model (`swarm.training.island.sharded`):

    FORGET = 5
    """Drop your gradients."""
    LEND = 6
    """(model, goes_back): compute it on anything, for the first process needs your pieces of its weights; 1 for: with a
    backward pass, as if you trained."""
    LOOK = 7
    """Are your gradients finite?"""
    GIVE = 8
    """Send your gradients, which begin anew."""
    TAKE = 9
    """(adds): pieces of a gradient follow; 1 for: add them to yours, 0 for: they are those of an update."""
    STEP = 10
    """The settings of the optimizer follow, in an `exchange`: let it make a step."""
    READ = 11
    """(kind, number): send your piece of a weight or a statistic."""
    WRITE = 12
    """(kind, number): your piece of it follows."""
    RENEW = 13
    """Forget the optimizer's statistics."""
    KIND = 14
    """On what kind of device do you compute?"""


CLOSE_SECONDS = 30.0
"""For which a process that ends waits until the others have heard its last word."""
NUMBERS = 5
"""Most numbers that go with a word."""


class Channel:
    """Between this process and the others of its island.

    Args:
        launched: who this process is
        device: where it computes
        divides: the processes share one model, of which each holds a piece

    Raises:
        IslandLost: the others are not there
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
        """In the first process: whether the others wait for a word of it."""
        if self.is_first:
            threading.Thread(target=self._pulse, name="island", daemon=True).start()

    @classmethod
    def connect(cls, wanted: str = "auto", divides: bool = False) -> Channel:
        """A channel to the processes that torchrun has started with this one.

        Args:
            wanted: auto, cpu or cuda
            divides: as of the class

        Raises:
            InputError: there are no others, or too few devices
            IslandLost: the others are not there
        """
        launched = Launched.from_environment()
        if launched.size < 2:
            raise InputError("An island needs two processes or more: start it with torchrun --nproc-per-node 2.")
        return cls(launched, launched.device(wanted), divides)

    @property
    def is_first(self) -> bool:
        """Whether this process is the peer; the others only compute for it."""
        return self.rank == 0

    def _gloo(self, store: dist.Store, name: str, seconds: float) -> dist.ProcessGroup:
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), self.rank, self.size, timedelta(seconds=seconds))

    def _nccl(self, store: dist.Store) -> dist.ProcessGroup:
        torch.cuda.set_device(self.device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=WORK_SECONDS)
        return dist.ProcessGroupNCCL(dist.PrefixStore("tensors", store), self.rank, self.size, options)

    def begin_default_group(self) -> None:
        """`fully_shard` gathers weights and scatters gradients over torch's default group: it takes no other one."""
        backend, timeout = BACKENDS[self.device.type], timedelta(seconds=WORK_SECONDS)
        store = dist.PrefixStore("default", self._store)
        with self._losses_told():
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)

    # ---- words ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        """What is said, and what follows from it, comes without a word in between."""
        with self._lock, self._losses_told():
            yield

    def tell(self, word: Word, *numbers: int) -> None:
        """The first process says this while the others listen, and goes on when all have heard it."""
        with self.speaking():
            self.say(word, *numbers).wait()

    def say(self, word: Word, *numbers: int) -> dist.Work:
        """Like `tell`, but the first process does not wait; `close` does, for a few seconds."""
        with self.speaking():
            said = torch.tensor([word, *numbers, *[0] * NUMBERS][: 1 + NUMBERS])
            self._last_word = self._words.broadcast(said, 0)
            self.is_heard = word not in (Word.COMPUTE, Word.END)
            return self._last_word

    def hear(self) -> tuple[Word, list[int]]:
        """The next word of the first process that means something to the others."""
        said = torch.zeros(1 + NUMBERS, dtype=torch.int64)
        while True:
            with self._losses_told():
                self._words.broadcast(said, 0).wait()
            word, *numbers = said.tolist()
            if word != Word.WAIT:
                return Word(word), numbers

    def _pulse(self) -> None:
        """The others may be on their way to listen, and do something together with this process before: so it does not
        wait until they have heard it."""
        while not self._closing.wait(PULSE_SECONDS):
            with contextlib.suppress(IslandLost), self.speaking():  # whoever speaks next learns of it
                if self.is_heard and (self._last_word is None or self._last_word.is_completed()):
                    self.say(Word.WAIT)

    # ---- what all of them do together --------------------------------------------------------------------------------

    def exchange(self, value: Any, listen: bool = True) -> list[Any]:
        """What each process gives, by rank, as JSON can say it.

        Args:
            listen: the others listen from then on, and not only after a while
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
        """Those of the micro-batches that all processes have computed. The others listen from then on."""
        total = torch.tensor([samples])
        with self.speaking():
            self._work.allreduce(total).wait()
            self.is_heard = True
        return int(total)

    def reduce_numbers(self, numbers: torch.Tensor) -> None:
        """Few numbers, on the CPU: the first process has their sum, in place."""
        with self.speaking():
            self._work.reduce(numbers, 0).wait()

    def reduce(self, tensor: torch.Tensor) -> None:
        """Many numbers: the first process has their sum, in place."""
        with self.speaking():
            self._carrier_of(tensor).reduce(tensor, 0).wait()

    def spread(self, tensors: Sequence[torch.Tensor]) -> None:
        """The first process's values are those of all, in place."""
        with self.speaking(), torch.no_grad():
            whole = [tensor.detach().contiguous() for tensor in tensors]
            for work in [self._carrier_of(one).broadcast(one, 0) for one in whole]:
                work.wait()
            for own, came in zip(tensors, whole, strict=True):
                if came.data_ptr() != own.data_ptr() and not self.is_first:
                    own.detach().copy_(came)

    def _carrier_of(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        """NCCL takes nothing that lies on the CPU, as a model does before it is divided."""
        return self._work if tensor.device.type == "cpu" else self._tensors

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """To one process, which receives it; nothing, if it is empty."""
        if tensor.numel():
            with self.speaking():
                self._work.send([tensor.cpu().contiguous()], rank, 0).wait()

    @torch.no_grad()
    def receive(self, into: torch.Tensor, rank: int) -> None:
        """What one process sends."""
        if into.numel():
            is_here = into.device.type == "cpu" and into.is_contiguous()
            came = into if is_here else torch.empty(into.shape, dtype=into.dtype)
            with self.speaking():
                self._work.recv([came], rank, 0).wait()
            if came is not into:
                into.copy_(came)

    def hold(self) -> None:
        """Until `release`, no other thread of this process says anything."""
        self._lock.acquire()

    def release(self) -> None:
        """The thread that has called `hold` lets others speak again."""
        self._lock.release()

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """What torch gathers and scatters while a divided model computes."""
        try:
            yield
        except RuntimeError as error:
            if self.divides and (isinstance(error, dist.DistError) or "gloo" in str(error)):
                self._broken = True
                raise IslandLost from error
            raise

    # ---- the end ----------------------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """This process has left the others in the middle of something: whoever says a word next learns of it."""
        self._broken = True

    @property
    def is_lost(self) -> bool:
        """Whether another process is known to be gone, or this one has ended."""
        return self._broken

    @contextlib.contextmanager
    def _losses_told(self) -> Iterator[None]:
        """torch has no exception of its own for a process that is gone."""
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
        """Nothing more is said; whoever waits for a word of this process notices."""
        self._closing.set()
        with self._lock:
            self._broken = True
            if not self._last_word_is_out():
                # A group of gloo that is let go of waits as long as for any work. This one goes with the process.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._words))
            if self._tensors is not self._work and hasattr(self._tensors, "abort"):
                self._tensors.abort()  # else NCCL prints a warning in the end
            self._words = self._work = self._tensors = None  # which closes the connections
            if self.divides and dist.is_initialized():
                dist.destroy_process_group()

    def _last_word_is_out(self) -> bool:
        if self._last_word is None:
            return True
        with contextlib.suppress(RuntimeError):  # too late, or the others are gone
            self._last_word.wait(timedelta(seconds=CLOSE_SECONDS))
        return self._last_word.is_completed()
