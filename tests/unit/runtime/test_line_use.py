"""`LineUse`: the part of its owner's line that a peer uses."""

import asyncio
import math
import time

import pytest

from recipe.errors import InputError
from swarm.runtime.line_use import LineUse
from tests.helpers.virtual_time import run_in_virtual_time

PIECE = 100_000
"""Bytes of a piece: 0.1 s at 8 Mbit/s."""


def test_bytes_that_are_sent_wait_for_their_turn_and_are_counted():
    async def main():
        line, began = LineUse(max_upload_mbps=8.0), time.monotonic()
        await asyncio.gather(*(line.send(PIECE) for _ in range(6)))
        assert time.monotonic() - began > 0.49, "five times 0.1 s go before the last"
        line.receive(1000)
        assert line.num_bytes == 6 * PIECE + 1000

    asyncio.run(main())


def test_a_sender_that_is_woken_late_gives_no_less_of_its_line(monkeypatch):
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(seconds + 0.05))

    async def main():
        line, began = LineUse(max_upload_mbps=8.0), time.monotonic()
        for _ in range(11):
            await line.send(PIECE)
        assert 1.0 < time.monotonic() - began < 1.1, "ten times 0.1 s go before the last, and it alone is late"

    run_in_virtual_time(main, monkeypatch)


def test_a_sender_that_gives_up_while_it_waits_takes_no_time_of_others_and_is_not_counted():
    async def main():
        line = LineUse(max_upload_mbps=0.8)  # a second for each piece
        await line.send(PIECE)
        waiting = [asyncio.ensure_future(line.send(PIECE)) for _ in range(30)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.wait_for(line.send(PIECE), 15)
        assert line.num_bytes == 2 * PIECE

    asyncio.run(main())


def test_a_sender_without_a_limit_does_not_wait():
    async def main():
        line = LineUse()
        sent = asyncio.ensure_future(line.send(10**12))
        await asyncio.sleep(0)
        assert sent.done()
        sent.result()

    asyncio.run(main())


@pytest.mark.parametrize("mbps", [0.0, -1.0, math.nan])
def test_a_line_that_lets_nothing_through_is_refused(mbps):
    with pytest.raises(InputError, match="more than 0"):
        LineUse(mbps)
