"""How much memory a donor gives to those who download."""

import asyncio
import time

import pytest
import torch

from swarm import trail, uploads
from swarm.trail import Trail
from swarm.uploads import MAX_SNAPSHOTS, STALLED_SECONDS, Snapshot, Upload, make_room


def upload(version: int | None, num_bytes: int = 8) -> Upload:
    content = asyncio.get_running_loop().create_future()
    content.set_result((b"", (torch.zeros(num_bytes, dtype=torch.uint8),), None))
    return Upload(b"", Snapshot(version, content))


def test_who_takes_nothing_any_more_makes_room_for_others():
    async def run():
        held = [upload(version) for version in range(MAX_SNAPSHOTS)]
        for one in held:
            one.streams.add(asyncio.ensure_future(asyncio.Event().wait()))
        assert make_room(held[1:])
        assert not make_room(held)
        held[3].moved_at = time.monotonic() - 2 * STALLED_SECONDS
        assert make_room(held)
        await asyncio.sleep(0)
        assert [stream.done() for one in held for stream in one.streams] == [one is held[3] for one in held]
        held[3].moved()
        assert not make_room(held)
        assert make_room([upload(None) for _ in range(2 * MAX_SNAPSHOTS)]), "averages are kept anyway"

    asyncio.run(run())


def test_large_states_are_held_twice_at_most(monkeypatch):
    monkeypatch.setattr(uploads, "MAX_HELD_BYTES", 1000)

    async def run():
        assert make_room([upload(1, 5000)])
        assert not make_room([upload(1, 600), upload(2, 600)])
        assert make_room([upload(1, 400), upload(2, 400)])
        same = upload(1, 900)
        assert make_room([same, Upload(b"", same.snapshot)]), "shared, so it counts once"
        being_made = Upload(b"", Snapshot(3, asyncio.get_running_loop().create_future()))
        assert make_room([being_made])
        assert make_room([upload(1, 400), being_made])
        assert not make_room([upload(1, 600), being_made]), "it will be as large"

    asyncio.run(run())


@pytest.mark.parametrize(("max_bytes", "kept"), [(10**6, 16), (4000, 5), (1, 2)])
def test_a_trail_is_bounded_in_bytes(monkeypatch, max_bytes, kept):
    monkeypatch.setattr(trail, "MAX_HELD_BYTES", max_bytes)
    averages = Trail()
    averages.keep()
    for step in range(40):
        averages.add(step, b"", b"", torch.full((200,), 1 / 3))  # 800 bytes, since fp16 would lose some of it
    assert [step for step in range(40) if averages.of(step)] == list(range(40 - kept, 40))
    averages.until = 0.0
    averages.add(40, b"", b"", torch.zeros(200))
    assert [step for step in range(41) if averages.of(step)] == [40]
