"""How busy callers may keep a process: known peers, strangers, and peers that were removed since."""

import asyncio

from hivemind.p2p import PeerID

from swarm.network.stream_limits import BUFFERED_BYTES, STRANGERS_BYTES, StreamLimits

MEMBERS = [PeerID(bytes([18, 32, *[number] * 32])) for number in range(4)]


def test_members_that_were_removed_share_the_limits_of_strangers():
    """A hundred peers that came with one invitation would hold 64 MiB each, even after their removal."""

    async def run() -> list[bool]:
        limits = StreamLimits()
        limits.met(MEMBERS)
        assert limits.known == tuple(MEMBERS)
        limits.forget(MEMBERS[1:])
        await limits.take_bytes(MEMBERS[0], BUFFERED_BYTES)
        await limits.take_bytes(MEMBERS[1], STRANGERS_BYTES)
        waiting = [asyncio.ensure_future(limits.take_bytes(member, 1)) for member in MEMBERS[2:]]
        await asyncio.sleep(0)
        were_waiting = [not task.done() for task in waiting]
        limits.give_bytes(MEMBERS[1], STRANGERS_BYTES)
        await asyncio.gather(*waiting)
        return were_waiting

    assert asyncio.run(run()) == [True, True]


def test_removed_members_share_the_streams_of_strangers_too():
    async def run() -> tuple[int, int]:
        limits = StreamLimits()
        limits.strangers_streams = 3
        limits.met(MEMBERS)
        as_members = sum(limits.open_stream(member) for member in MEMBERS for _ in range(2))
        limits.forget(MEMBERS)
        return as_members, sum(limits.open_stream(member) for member in MEMBERS)

    assert asyncio.run(run()) == (8, 0)
