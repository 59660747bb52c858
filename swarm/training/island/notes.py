"""What the processes of an island have noted of their micro-batches, put together by the first one.

All of them compute one micro-batch a turn, on weights of the same lineage, and take turns in the peer's order of
samples. So what they have noted since gradients were gathered are tables with as many rows.
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
    """A lineage, as a word can say it."""
    return tuple(int.from_bytes(half, "big", signed=True) for half in (lineage[:HALF], lineage[HALF:]))


def lineage_from(numbers: Sequence[int]) -> bytes:
    """What `numbers_for` has said."""
    return b"".join(number.to_bytes(HALF, "big", signed=True) for number in numbers)


def agree_on_kind(channel: Channel, replay: Replay) -> str:
    """The kind of device of all processes, as `Replay.kind`; where they have several, one that no other peer has."""
    if not replay.kind:  # of the model, so all say the same
        return ""
    kinds = set(channel.exchange(replay.kind))
    return replay.kind if len(kinds) == 1 else f"several {replay.identity}"[:MAX_KIND_BYTES]


def table_of(noted: Sequence[Noted], turns: int, channel: Channel) -> torch.Tensor:
    """Shape [processes, turns, 2 + places], fp64, on the CPU: positions, samples and numbers of this process."""
    table = torch.zeros(channel.size, turns, 2 + NUM_PLACES, dtype=torch.float64)
    for row, one in zip(table[channel.rank], noted, strict=True):
        row[0], row[1], row[2:] = one.first_position, one.samples, one.numbers.cpu()
    return table


def gathered(noted: Sequence[Noted], channel: Channel) -> list[Noted]:
    """What all processes have noted in as many turns as the first one, in the order of their samples."""
    table = table_of(noted, len(noted), channel)
    channel.reduce_numbers(table)
    found = [
        Noted(int(row[0]), int(row[1]), row[2:].float().to(one.numbers.device), one.lineage)
        for rows in table
        for row, one in zip(rows, noted, strict=True)
    ]
    return sorted(found, key=lambda one: one.first_position)
