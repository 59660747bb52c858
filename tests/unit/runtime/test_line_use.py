"""What a peer takes of its owner's line."""

import asyncio
import time

from swarm.runtime.line_use import LineUse


def test_what_goes_out_waits_for_its_turn_and_is_counted():
    async def main():
        line, began = LineUse(max_upload_mbps=8.0), time.monotonic()
        await asyncio.gather(*(line.send(100_000) for _ in range(6)))
        assert time.monotonic() - began > 0.49, "five times 0.1 s go before the last"
        line.receive(1000)
        assert line.num_bytes == 601_000

    asyncio.run(main())


def test_who_gives_all_of_its_line_does_not_wait():
    async def main():
        line = LineUse()
        waits = asyncio.ensure_future(line.send(10**12))
        await asyncio.sleep(0)
        assert waits.done()

    asyncio.run(main())
