"""The memory and traffic that a donor gives to peers that download."""

import asyncio
from itertools import repeat

import numpy as np
import pytest
import torch

from swarm.runtime.timeouts import DEFAULT_TIMEOUTS
from swarm.state_sync import average_log as average_log
from swarm.state_sync import uploads
from swarm.state_sync.average_log import AverageLog
from swarm.state_sync.download_messages import MAX_BUSY_SECONDS, PIECE_BYTES
from swarm.state_sync.serialization import pack, unpack
from swarm.state_sync.uploads import (
    MAX_SNAPSHOTS,
    MAX_STATE_UPLOADS,
    Snapshot,
    Upload,
    Uploads,
    content_of,
)


def upload(version: int | None, num_bytes: int = 8) -> Upload:
    ready = asyncio.get_running_loop().create_future()
    ready.set_result(content_of(b"", np.zeros(num_bytes, np.uint8)))
    return Upload(Snapshot(version, ready, average_bytes=0 if version is not None else num_bytes))


def test_an_upload_that_has_stalled_makes_room_for_others():
    async def run():
        held = Uploads()
        for version in range(MAX_SNAPSHOTS - 1):
            held.of[version] = upload(version)
        assert held.make_room()
        held.of[99] = upload(99)
        assert not held.make_room()
        stream = asyncio.ensure_future(asyncio.Event().wait())
        held.of[3].streams.add(stream)
        held.of[3].moved_at -= 2 * DEFAULT_TIMEOUTS.stalled_seconds
        assert held.make_room()
        await asyncio.wait([stream])
        assert 3 not in held.of
        averages = Uploads()
        averages.of = {number: upload(None) for number in range(2 * MAX_SNAPSHOTS)}
        assert averages.make_room(), "averages are kept anyway"
        averages.of[0].moved_at -= 2 * DEFAULT_TIMEOUTS.kept_seconds
        averages.sweep()
        assert 0 not in averages.of

    asyncio.run(run())


def test_large_states_are_held_twice_at_most(monkeypatch):
    monkeypatch.setattr(uploads, "MAX_HELD_BYTES", 1000)

    def has_room(*held: Upload) -> bool:
        all_of_them = Uploads()
        all_of_them.of = dict(enumerate(held))
        return all_of_them.make_room()

    async def run():
        assert has_room(upload(1, 5000))
        assert not has_room(upload(1, 600), upload(2, 600))
        assert has_room(upload(1, 400), upload(2, 400))
        same = upload(1, 900)
        assert has_room(same, Upload(same.snapshot)), "shared, so it counts once"
        being_made = Upload(Snapshot(3, asyncio.get_running_loop().create_future()))
        assert has_room(being_made)
        assert has_room(upload(1, 400), being_made)
        assert not has_room(upload(1, 600), being_made), "it will be as large"

    asyncio.run(run())


def test_other_joiners_wait_as_long_as_the_first_needs_for_the_rest():
    async def run():
        busy = Uploads()
        for number in range(MAX_STATE_UPLOADS):
            one = busy.of[number] = upload(1, 100 * PIECE_BYTES)
            one.began -= 10.0
            for index in range(20 * (number + 1)):
                one.send(index, PIECE_BYTES)
        assert busy.busy_seconds("another", 100 * PIECE_BYTES) == pytest.approx(10 * 60 / 40, rel=0.1)
        assert busy.busy_seconds(0, 100 * PIECE_BYTES) == 0.0, "its own download ends with that"
        busy.of[0].began -= 10_000.0
        assert busy.busy_seconds("another", 100 * PIECE_BYTES) == 0.0, (
            "a peer that hardly takes anything is in no other's way"
        )

    asyncio.run(run())


def test_no_peer_gets_the_state_without_end():
    """A peer gets the state four times in an hour, and the averages that follow."""

    async def run():
        now, size = 0.0, 2**28
        quota = Uploads(clock=lambda: now)
        one, average = upload(1, size), upload(None, size)
        for _ in range(4):
            assert quota.busy_seconds("anna", size) == 0.0
            quota.count_copy("anna", one.snapshot)
            quota.count_sent("anna", one, size)
        assert quota.busy_seconds("anna", size) == MAX_BUSY_SECONDS
        assert quota.busy_seconds("ben", size) == 0.0
        assert not quota.has_used_up("anna", size)
        for _ in range(60):
            quota.count_sent("anna", average, size)
        assert quota.has_used_up("anna", size)
        now = 900.0
        assert quota.busy_seconds("anna", size) == 0.0, "one has become free again"
        small = upload(1, 1000)
        for _ in range(200):
            quota.count_sent("cleo", small, 1000)
        assert quota.busy_seconds("cleo", 1000) == 0.0, "a small model costs little"

    asyncio.run(run())


@pytest.mark.parametrize(("max_bytes", "kept"), [(10**6, 64), (8000, 10), (1, 6)])
def test_a_trail_is_bounded_in_bytes(monkeypatch, max_bytes, kept):
    monkeypatch.setattr(average_log, "MAX_HELD_BYTES", max_bytes)
    averages = AverageLog()
    averages.keep()
    for step in range(90):
        averages.add(step, b"", b"", torch.full((200,), 1 / 3))  # 800 bytes, since fp16 would lose some of it
    assert [step for step in range(90) if averages.of(step)] == list(range(90 - kept, 90))
    averages.until = 0.0
    averages.add(90, b"", b"", torch.zeros(200))
    assert [step for step in range(91) if averages.of(step)] == [90]


def test_averages_that_follow_each_other_travel_together(monkeypatch):
    monkeypatch.setattr(average_log, "MAX_BATCH_BYTES", 2500)
    averages, third = AverageLog(), torch.full((200,), 1 / 3)
    averages.keep()
    for step in range(6):
        averages.add(step, bytes([step]), bytes([step + 1]), third)
    averages.add(6, b"another history", b"", third)
    assert [average.step for average in averages.batch(1)] == [1, 2, 3], "800 bytes each"
    assert [average.step for average in averages.batch(4)] == [4, 5], "the next one belongs to other weights"
    assert averages.batch(7) == []
    monkeypatch.setattr(average_log, "MAX_BATCH_BYTES", 1)
    assert [average.step for average in averages.batch(1)] == [1], "one in any case"


@pytest.mark.parametrize("others", [0, 1, 40, 1000])
def test_an_average_that_is_zero_nearly_everywhere_takes_few_bytes_and_loses_no_bit(others):
    vector = torch.zeros(1000)
    places = torch.randperm(1000, generator=torch.Generator().manual_seed(others))[:others]
    vector[places] = torch.linspace(-1, 1, others) / 3 if others else torch.empty(0)
    if others > 1:
        vector[places[0]] = -0.0
    average = average_log.shrunk(vector)
    assert sum(tensor.nbytes for tensor in average) == (8 * others if others < 1000 else 4000)
    layout, content = pack(average)
    (received,) = average_log.averages_in(unpack(layout, content), repeat(1000))
    assert torch.equal(average_log.whole(received, 1000).view(torch.int32), vector.view(torch.int32))


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.ones(9)],
        [torch.ones(10, dtype=torch.int64)],
        [torch.full((10,), torch.nan)],
        [torch.tensor([1, 2], dtype=torch.int32)],
        [torch.tensor([1, 2], dtype=torch.int32), torch.ones(3)],
        [torch.tensor([2, 1], dtype=torch.int32), torch.ones(2)],
        [torch.tensor([1, 1], dtype=torch.int32), torch.ones(2)],
        [torch.tensor([-1, 1], dtype=torch.int32), torch.ones(2)],
        [torch.tensor([1, 10], dtype=torch.int32), torch.ones(2)],
        [torch.tensor([[1, 2]], dtype=torch.int32), torch.ones(1, 2)],
        [torch.tensor([1, 2], dtype=torch.int32), torch.tensor([1.0, torch.inf])],
    ],
)
def test_tensors_that_are_no_average_of_ten_numbers_are_refused(tensors):
    with pytest.raises(ValueError, match=r"number|shape|places"):
        list(average_log.averages_in(tensors, repeat(10)))
