"""How busy callers may keep a process: known peers, strangers, and peers that were removed since."""

import asyncio
import socket
from contextlib import AsyncExitStack, closing
from functools import partial
from types import SimpleNamespace

import pytest
from hivemind.p2p import P2P, PeerID
from hivemind.proto.averaging_pb2 import DownloadData

from swarm.network import stream_limits
from swarm.network.served_stream import MAX_MESSAGE_BYTES, ServedStream
from swarm.network.stream_limits import (
    BUFFERED_BYTES,
    SMALL_BYTES,
    SMALL_MESSAGES_BYTES,
    STRANGERS_BYTES,
    STREAMS,
    StreamLimits,
)

MEMBERS = [PeerID(bytes([18, 32, *[number] * 32])) for number in range(4)]
ANNA, BEN, CLEO, NEWCOMER = MEMBERS


def end() -> None:
    """What ends a stream that nothing has to end."""


def test_members_that_were_removed_share_the_limits_of_strangers():
    """A hundred peers that came with one invitation would hold 64 MiB each, even after their removal."""

    async def run() -> list[bool]:
        limits = StreamLimits()
        limits.met(MEMBERS)
        assert limits.known == tuple(MEMBERS)
        limits.forget(MEMBERS[1:])
        await limits.take_bytes(MEMBERS[0], BUFFERED_BYTES)
        await limits.take_bytes(MEMBERS[1], STRANGERS_BYTES)
        waiting = [asyncio.ensure_future(limits.take_bytes(member, 2 * SMALL_BYTES)) for member in MEMBERS[2:]]
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
        as_members = sum(limits.open_stream(member, end) for member in MEMBERS for _ in range(2))
        limits.forget(MEMBERS)
        return as_members, sum(limits.open_stream(member, end) for member in MEMBERS)

    assert asyncio.run(run()) == (8, 0)


def test_strangers_that_hold_all_streams_give_some_up_for_one_that_has_fewer():
    """Two dozen names held the streams of all strangers: each asked for a piece of the state every minute."""
    limits, ended = StreamLimits(), []
    limits.strangers_streams = 2 * STREAMS
    limits.met([CLEO])
    for peer in (ANNA, BEN, CLEO):
        assert all(limits.open_stream(peer, partial(ended.append, (peer, number))) for number in range(STREAMS))
    got = [limits.open_stream(NEWCOMER, end) for _ in range(STREAMS)]
    fair = 2 * STREAMS // 3
    assert got == [True] * fair + [False] * (STREAMS - fair)
    assert sorted(ended) == sorted((peer, number) for peer in (ANNA, BEN) for number in range(fair, STREAMS))
    assert not limits.open_stream(ANNA, end), "it takes none back"
    limits.close_stream(NEWCOMER, end)
    assert limits.open_stream(ANNA, end), "but one that is free"


class Caller:
    """A stranger's end of a stream that one process serves, as `hivemind_patches` does.

    Args:
        limits: those of the process
        peer: the stranger
        handler: answers the stream
    """

    def __init__(self, limits: StreamLimits, peer: PeerID, handler):
        self._limits, self._peer, self._handler = limits, peer, handler

    async def __aenter__(self):
        ours, theirs = socket.socketpair()
        self.served = asyncio.ensure_future(self._serve(*await asyncio.open_connection(sock=theirs)))
        self.reader, self._writer = await asyncio.open_connection(sock=ours)
        return self

    async def __aexit__(self, *_) -> None:
        self._writer.close()
        self.served.cancel()
        await asyncio.gather(self.served, return_exceptions=True)

    async def _serve(self, reader, writer) -> int:
        """Serve the stream. Return how many bytes its caller has not taken when it ends."""
        with closing(writer):
            context = SimpleNamespace(remote_id=self._peer, handle_name="rpc")
            await ServedStream(self._limits, context, reader, writer, DownloadData).serve(self._handler, True)
            return writer.transport.get_write_buffer_size()

    async def ask(self, metadata: bytes = b"x") -> None:
        await P2P.send_protobuf(DownloadData(metadata=metadata), self._writer)

    async def announce(self, num_bytes: int) -> None:
        """Send the header of a message of this size, and no byte of it."""
        self._writer.write(P2P.MESSAGE_MARKER + num_bytes.to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER))
        await self._writer.drain()

    async def answer(self) -> DownloadData:
        answer, error = await P2P.receive_protobuf(DownloadData, self.reader)
        assert error is None, error
        return answer


def test_a_stream_that_makes_room_ends_at_once_although_its_caller_reads_nothing():
    async def without_end(requests, context):
        while True:
            yield DownloadData(metadata=bytes(2**16))

    async def run() -> None:
        limits = StreamLimits()
        limits.strangers_streams = 2
        async with Caller(limits, ANNA, without_end) as first, Caller(limits, ANNA, without_end) as second:
            await first.answer()
            await second.answer()
            async with Caller(limits, BEN, without_end) as other:
                await other.answer()
                assert await second.served == 0, "none are kept for a caller that may never read them"
                assert not first.served.done()
                async with Caller(limits, CLEO, without_end) as one_more:
                    await one_more.served, "each of two strangers has one stream"

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_stream_that_makes_room_ends_at_once_although_its_request_waits_for_room():
    class NoRoom(StreamLimits):
        """Limits that let no request be read."""

        asks = 0

        async def take_bytes(self, peer, num_bytes) -> None:
            self.asks += 1
            if self.asks == 2:
                both_ask.set()
            await asyncio.Event().wait()

    async def waiting(requests, context):
        async for request in requests:
            yield request

    async def run() -> None:
        limits = NoRoom()
        limits.strangers_streams = 2
        async with Caller(limits, ANNA, waiting) as first, Caller(limits, ANNA, waiting) as second:
            await first.ask()
            await second.ask()
            await both_ask.wait()
            async with Caller(limits, BEN, waiting):
                done, _ = await asyncio.wait([first.served, second.served], timeout=5, return_when="FIRST_COMPLETED")
                assert len(done) == 1

    both_ask = asyncio.Event()
    asyncio.run(asyncio.wait_for(run(), 30))


def test_the_stranger_that_has_most_bytes_gives_up_its_streams_for_one_that_will_have_fewer(monkeypatch):
    monkeypatch.setattr(stream_limits, "ROOM_SECONDS", 0.0)
    most = STRANGERS_BYTES - 3000

    async def run() -> None:
        limits, ended = StreamLimits(), []
        for peer, num_bytes in ((BEN, 2000), (ANNA, most), (CLEO, 1000)):
            await limits.take_bytes(peer, num_bytes)
            assert all(limits.open_stream(peer, partial(ended.append, (peer, number))) for number in range(2))
        as_many = asyncio.ensure_future(limits.take_bytes(NEWCOMER, most))
        await asyncio.sleep(0)
        assert not ended, "it would have as many"
        as_many.cancel()
        fewer = asyncio.ensure_future(limits.take_bytes(NEWCOMER, 1500))
        await asyncio.sleep(0)
        assert ended == [(ANNA, 1), (ANNA, 0)]
        assert not fewer.done(), "these bytes are in memory until its streams have ended"
        limits.give_bytes(ANNA, most)
        await fewer

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize("strangers", [[ANNA, BEN], [ANNA, BEN, BEN]], ids=["all room", "and a queue for it"])
def test_strangers_that_announce_large_messages_and_send_none_keep_no_other_stranger_waiting(strangers, monkeypatch):
    """Two headers of nine bytes kept newcomers from the state for three minutes."""
    monkeypatch.setattr(stream_limits, "ROOM_SECONDS", 0.05)

    class Noting(StreamLimits):
        """Limits that note which strangers ask for room."""

        def __init__(self):
            super().__init__()
            self.askers, self.all_ask = [], asyncio.Event()

        async def take_bytes(self, peer, num_bytes) -> None:
            self.askers.append(peer)
            if len(self.askers) == len(strangers):
                self.all_ask.set()
            await super().take_bytes(peer, num_bytes)

    async def repeat(requests, context):
        async for request in requests:
            yield request

    async def run() -> None:
        limits = Noting()
        async with AsyncExitStack() as callers:
            for peer in strangers:
                await (await callers.enter_async_context(Caller(limits, peer, repeat))).announce(MAX_MESSAGE_BYTES)
            await limits.all_ask.wait()
            newcomer = await callers.enter_async_context(Caller(limits, NEWCOMER, repeat))
            await newcomer.ask(large := bytes(2 * SMALL_BYTES))
            assert (await asyncio.wait_for(newcomer.answer(), 5)).metadata == large

    asyncio.run(asyncio.wait_for(run(), 30))


def test_small_messages_do_not_wait_for_the_room_of_large_ones():
    """A newcomer asks for each piece of a state with one."""

    async def run() -> None:
        limits = StreamLimits()
        for peer in (ANNA, BEN):
            await limits.take_bytes(peer, STRANGERS_BYTES // 2)
        for _ in range(SMALL_MESSAGES_BYTES // SMALL_BYTES):
            await limits.take_bytes(NEWCOMER, SMALL_BYTES)
        another = asyncio.ensure_future(limits.take_bytes(CLEO, SMALL_BYTES))
        await asyncio.sleep(0)
        assert not another.done(), "there is a limit for these as well"
        limits.give_bytes(NEWCOMER, SMALL_BYTES)
        await another

    asyncio.run(asyncio.wait_for(run(), 30))
