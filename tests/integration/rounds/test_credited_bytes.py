"""A member is credited with the bytes that it sends: with more, a slow line would pass for a fast one."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from swarm.averaging import rounds
from swarm.averaging.compression.codec import Codec
from swarm.averaging.lines.line_meter import LineMeter
from swarm.averaging.slow_members import SlowMembers
from tests.helpers.averaging_rounds import contribution, network, nothing, options_for, order_for, rounds_on

ROWS, COLUMNS = 200, 1500
"""A matrix of 1.2 MB, for which PowerSGD of rank 4 sends 27 kB."""


async def one_round(folder: Path, codec: Codec) -> list[int]:
    """Three peers average. Returns how many bytes each of them has sent."""
    async with AsyncExitStack() as stack:
        members, peers = [], []
        for name in "abc":
            p2p = await network(folder / name, *members)
            stack.push_async_callback(p2p.shutdown)
            members.append(p2p)
            vector, _ = contribution(name, ROWS * COLUMNS, 0)
            options = options_for(vector, codec=codec, shapes=[(ROWS, COLUMNS)])
            options.vector.copy_(vector)
            peers.append(await rounds_on(p2p, options))
        orders = [order_for(members) for _ in peers]
        await asyncio.gather(*(peer.run(order, nothing) for peer, order in zip(peers, orders, strict=True)))
        return [order.future.result(timeout=0).bytes_sent for order in orders]


@pytest.mark.parametrize("codec", [Codec(), Codec("fp16"), Codec("powersgd", 4)], ids=str)
def test_a_member_is_credited_with_what_it_sends(codec, tmp_path, monkeypatch):
    credited, equal = [], []

    class NotingMembers(SlowMembers):
        def note(self, members, waited_seconds, exchange_seconds, compute_seconds, num_bytes):
            credited.extend(num_bytes.values())
            return super().note(members, waited_seconds, exchange_seconds, compute_seconds, num_bytes)

    class NotingMeter(LineMeter):
        def end(self, num_bytes, seconds, num_members, equal_bytes, is_whole=True):
            equal.append(equal_bytes)
            super().end(num_bytes, seconds, num_members, equal_bytes, is_whole)

    monkeypatch.setattr(rounds, "SlowMembers", NotingMembers)
    monkeypatch.setattr(rounds, "LineMeter", NotingMeter)
    sent = asyncio.run(asyncio.wait_for(one_round(tmp_path, codec), 60))
    for num_bytes in sent:
        assert credited == pytest.approx([num_bytes] * 9, rel=0.1), "each of three members credits all three"
        assert equal == pytest.approx([num_bytes] * 3, rel=0.1), "their shares are equal"
