"""The order in which a peer visits its training samples: endless, its own, and reproducible."""

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import Sampler


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from the parts' text through SHA-256. Python's `hash` would differ from process to process."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class PeerSampler(Sampler[int]):
    """Endless indices 0..dataset_size-1: pass after pass, each pass a new permutation.

    The order depends only on (seed, identity, pass number). So peers with different identities draw different samples
    at the same time, and a peer that restarts goes on where it was.

    Args:
        dataset_size: number of samples.
        seed: the recipe's seed.
        identity: a text that is unique to this peer, for example its public key.
    """

    def __init__(self, dataset_size: int, seed: int, identity: str) -> None:
        self.dataset_size = dataset_size
        self.seed = seed
        self.identity = identity
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            pass_number, offset = divmod(self.position, self.dataset_size)
            for index in self.permutation(pass_number)[offset:]:
                self.position += 1
                yield index

    def permutation(self, pass_number: int) -> list[int]:
        """The order of one pass over the data."""
        generator = torch.Generator().manual_seed(stable_seed(self.seed, self.identity, pass_number))
        return torch.randperm(self.dataset_size, generator=generator).tolist()

    def state_dict(self) -> dict[str, int]:
        """The number of samples drawn since the beginning."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the number of samples in the state; takes effect at the next `iter()`."""
        self.position = state["position"]


class PeerBatches(Sampler[list[tuple[int, int]]]):
    """Endless micro-batches of equal size. Each entry is (position, index).

    The position counts the samples that this peer has drawn. It seeds a sample's augmentation, which therefore depends
    neither on the micro-batch size nor on the number of loader processes. If a peer has several training processes,
    they take the micro-batches of its one order in turn. After each turn, together they have seen what one process
    would have seen alone.

    Args:
        sampler: the peer's order.
        batch_size: samples per micro-batch.
        rank: number of this training process among those of the peer, from 0.
        num_processes: number of the peer's training processes.
    """

    def __init__(self, sampler: PeerSampler, batch_size: int, rank: int = 0, num_processes: int = 1) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.rank = rank
        self.num_processes = num_processes

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        indices = iter(self.sampler)
        while True:
            for turn in range(self.num_processes):
                first = self.sampler.position
                batch = [(first + i, next(indices)) for i in range(self.batch_size)]
                if turn == self.rank:
                    yield batch


PADDING = -1
"""Stands for no sample, both as an index and as a label, which metrics skip."""


class ShardBatches(Sampler[list[int]]):
    """One process's share of an ordered pass: every `num_processes`-th index, beginning at `rank`.

    All processes get equally many indices, because under FSDP every forward pass involves all processes. If the data
    set does not divide, the last index of some processes is `PADDING`.
    """

    def __init__(self, dataset_size: int, batch_size: int, rank: int, num_processes: int) -> None:
        self.dataset_size, self.batch_size = dataset_size, batch_size
        self.rank, self.num_processes = rank, num_processes

    def __len__(self) -> int:
        return -(-self._samples_per_process // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        own = list(range(self.rank, self.dataset_size, self.num_processes))
        own += [PADDING] * (self._samples_per_process - len(own))
        for first in range(0, len(own), self.batch_size):
            yield own[first : first + self.batch_size]

    @property
    def _samples_per_process(self) -> int:
        return -(-self.dataset_size // self.num_processes)


def sample_randomness(key: int, positions: np.ndarray) -> np.ndarray:
    """One random 64-bit word per position, shape and order kept, computed without a loop.

    This is SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"), used as a
    counter-based generator: the word for position n is the n-th output, from 0, of a generator that starts from `key`.
    """
    with np.errstate(over="ignore"):
        z = np.uint64(key) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
