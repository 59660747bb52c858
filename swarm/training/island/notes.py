"""The notes of an island's processes on their micro-batches, which the first process puts together.

In each turn every process computes one micro-batch, on weights of the same lineage; their samples alternate in the
peer's order of samples. So the notes that the processes have made since gradients were last gathered are tables with
the same number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recipe.training.replay import Replay
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.protocol.work import MAX_KIND_BYTES, NUM_PLACES
from swarm.training.island.channel import Channel
from swarm.training.throughput import Noted

HALF = LINEAGE_BYTES // 2


def numbers_for(lineage: bytes) -> tuple[int, int]:
    """A lineage as two numbers, which can go with a word."""
    return tuple(int.from_bytes(half, "big", signed=True) for half in (lineage[:HALF], lineage[HALF:]))


def lineage_from(numbers: Sequence[int]) -> bytes:
    """The lineage from which `numbers_for` made these numbers."""
    return b"".join(number.to_bytes(HALF, "big", signed=True) for number in numbers)


def agree_on_kind(channel: Channel, replay: Replay) -> str:
    """The kind of device of all processes, as in `Replay.kind`; if kinds differ, a name that no other peer has."""
    if not replay.kind:  # follows from the model, so it is empty in all processes
        return ""
    kinds = set(channel.exchange(replay.kind))
    return replay.kind if len(kinds) == 1 else f"several {replay.identity}"[:MAX_KIND_BYTES]


def table_of(noted: Sequence[Noted], turns: int, channel: Channel) -> torch.Tensor:
    """A table of this process's positions, samples and numbers: shape [processes, turns, 2 + places], fp64, on the CPU.

    The rows of the other processes are 0, so the sum of all processes' tables has all notes.
    """
    table = torch.zeros(channel.size, turns, 2 + NUM_PLACES, dtype=torch.float64)
    for row, one in zip(table[channel.rank], noted, strict=True):
        row[0], row[1], row[2:] = one.first_position, one.samples, one.numbers.cpu()
    return table


def gathered(noted: Sequence[Noted], channel: Channel) -> list[Noted]:
    """The notes of all processes in as many turns as the first one has noted, in the order of their samples."""
    table = table_of(noted, len(noted), channel)
    channel.reduce_numbers(table)
    found = [
        Noted(int(row[0]), int(row[1]), row[2:].float().to(one.numbers.device), one.lineage)
        for rows in table
        for row, one in zip(rows, noted, strict=True)
    ]
    return sorted(found, key=lambda one: one.first_position)
