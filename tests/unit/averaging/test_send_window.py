"""How many parts are on their way at once."""

import asyncio
from types import SimpleNamespace

import pytest

from swarm.averaging import send_window
from swarm.averaging.send_window import LONG_SECONDS, MAX_PARTS, QUICK_SECONDS, START_PARTS, PartsOnTheWay, SendWindow


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(send_window, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_part_waits_until_the_window_has_room(clock):
    async def main():
        parts = PartsOnTheWay(SendWindow(), streams=1)
        for _ in range(int(START_PARTS)):
            await asyncio.wait_for(parts.may_send(), 5)
        one_more = asyncio.ensure_future(parts.may_send())
        await asyncio.sleep(0)
        assert not one_more.done()
        parts.answered()
        await asyncio.wait_for(one_more, 5)

    asyncio.run(main())


def test_the_window_grows_while_answers_are_quick_and_the_sender_has_to_wait(clock):
    async def main():
        window = SendWindow()
        parts = PartsOnTheWay(window, streams=1)
        on_their_way = 0
        for _ in range(200):
            sending = asyncio.ensure_future(parts.may_send())
            await asyncio.sleep(0)
            if not sending.done():
                parts.answered()
                await sending
                on_their_way -= 1
            on_their_way += 1
            clock.now += QUICK_SECONDS / 1000
        return window.parts, on_their_way

    grown, on_their_way = asyncio.run(main())
    assert START_PARTS < grown <= MAX_PARTS
    assert on_their_way <= grown


def test_a_window_that_was_full_once_does_not_grow_while_it_is_not(clock):
    """The sender has to wait once; from then on it sends a part at a time."""

    async def main():
        window = SendWindow()
        parts = PartsOnTheWay(window, streams=1)
        for _ in range(int(START_PARTS)):
            await parts.may_send()
        one_more = asyncio.ensure_future(parts.may_send())
        await asyncio.sleep(0)
        parts.answered()
        await one_more
        for _ in range(int(START_PARTS)):
            parts.answered()
        grown = window.parts
        for _ in range(100):
            await parts.may_send()
            parts.answered()
        return grown, window.parts

    grown, later = asyncio.run(main())
    assert later == grown == START_PARTS + 1


def test_a_window_that_is_never_full_stays_as_it_is():
    window = SendWindow()
    window.answered(seconds=0.01, streams=1, was_full=False)
    assert window.parts == START_PARTS


def test_the_window_shrinks_to_one_part_where_answers_take_long():
    window = SendWindow()
    for _ in range(100):
        window.answered(seconds=2 * LONG_SECONDS, streams=1, was_full=True)
    assert window.parts == 1.0


def test_streams_that_share_a_window_let_it_grow_together():
    window = SendWindow()
    for _ in range(8):
        window.answered(seconds=QUICK_SECONDS / 2, streams=8, was_full=True)
    assert window.parts == START_PARTS + 1
