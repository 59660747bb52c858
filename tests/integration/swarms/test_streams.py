"""No stranger takes a peer's files or memory away by streams that send nothing or never end."""

import asyncio
import contextlib
import itertools
import resource
import time

import psutil
import pytest
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError
from hivemind.proto import averaging_pb2, p2pd_pb2
from hivemind.proto.averaging_pb2 import DownloadData

from swarm.averaging.meeting.matchmaking_messages import to_knock
from swarm.averaging.rounds import schema_hash
from swarm.network import served_stream, stream_limits
from swarm.network.dht_bounds.calls import CALLS
from swarm.network.peer_service import PeerService
from swarm.network.signed_records import peer_of
from swarm.network.stream_limits import BUFFERED_BYTES, SMALL_BYTES, STRANGERS_BYTES, STREAMS, StreamLimits
from swarm.protocol.messages import Ticket
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.runtime.processes import allow_many_files
from tests.helpers.averaging_rounds import averager_for, contribution, introduce, meet_everyone, run_round, say_goodbye
from tests.helpers.owners import subkey_of
from tests.helpers.swarm_peers import Peers, running_dht
from tests.helpers.two_peers import Answers, between_two

pytestmark = pytest.mark.timeout(120)
ANNA, BEN, *MANY = (peer_of(subkey_of(f"{number}")) for number in range(200))
FILES = 1024
SILENT_STREAMS, HEAVY_STREAMS, HEAVY_BYTES = 2000, 200, 7_900_000
MOST_BYTES = 120e6
"""Memory that an attack may take. Without limits it took 1,500 MB."""


# ---- the limits ------------------------------------------------------------------------------------------------------


def test_streams_of_one_peer_and_of_all_strangers_are_counted():
    def end() -> None:
        """What ends a stream: nothing has to."""

    limits = StreamLimits()
    assert [limits.open_stream(ANNA, end) for _ in range(STREAMS + 1)] == [True] * STREAMS + [False]
    limits.close_stream(ANNA, end)
    assert limits.open_stream(ANNA, end)
    limits = StreamLimits()
    limits.strangers_streams = len(MANY)
    assert all(limits.open_stream(peer, end) for peer in MANY)
    assert not limits.open_stream(BEN, end)
    limits.met([BEN])
    assert [limits.open_stream(BEN, end) for _ in range(STREAMS + 1)] == [True] * STREAMS + [False]


def test_bytes_wait_for_room():
    async def run():
        limits = StreamLimits()
        await limits.take_bytes(ANNA, STRANGERS_BYTES)
        second = asyncio.ensure_future(limits.take_bytes(BEN, 2 * SMALL_BYTES))
        await asyncio.sleep(0)
        assert not second.done(), "strangers share what there is"
        limits.met([BEN])
        await second
        await limits.take_bytes(BEN, BUFFERED_BYTES - 2 * SMALL_BYTES)
        third = asyncio.ensure_future(limits.take_bytes(BEN, 1))
        await asyncio.sleep(0)
        assert not third.done()
        limits.give_bytes(BEN, 1)
        await third

    asyncio.run(run())


def test_more_files_may_be_open():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        allow_many_files(512)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (512, before[1])
        allow_many_files(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (512, before[1]), "never fewer"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# ---- a stream --------------------------------------------------------------------------------------------------------


async def opened(stub, name: str = "rpc_first") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a stream to the other side, on which nothing has been sent yet."""
    handle = Answers._get_handle_name(None, name)
    _, reader, writer = await stub._p2p.call_binary_stream_handler(stub._peer, handle)
    return reader, writer


def header(num_bytes: int) -> bytes:
    return P2P.MESSAGE_MARKER + num_bytes.to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER)


@pytest.mark.parametrize("said", [b"", P2P.MESSAGE_MARKER, header(10) + b"x", header(10)])
def test_a_request_that_does_not_come_ends_its_stream(said, monkeypatch):
    monkeypatch.setattr(served_stream, "REQUEST_SECONDS", 0.3)

    async def happens(stub, answers):
        for name in ("rpc_first", "rpc_one"):
            reader, writer = await opened(stub, name)
            if said:
                writer.write(said)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()

    between_two(happens)


def test_a_request_that_does_not_end_ends_its_stream(monkeypatch):
    monkeypatch.setattr(served_stream, "REQUEST_SECONDS", 0.3)

    async def happens(stub, answers):
        for more in (b"", header(1) + b"x", header(2**20)):
            reader, writer = await opened(stub, "rpc_one")
            writer.write(header(0) + more)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()
        assert not answers.answered.is_set()

    between_two(happens)


def test_a_request_of_one_message_is_small_and_is_answered():
    async def happens(stub, answers):
        stream = await stub.rpc_one(DownloadData(metadata=b"x"))
        assert [answer.metadata async for answer in stream] == [b"x"]
        stream = await stub.rpc_one(DownloadData(metadata=bytes(stream_limits.MAX_REQUEST_BYTES)))
        with contextlib.suppress(ConnectionError, P2PDaemonError, P2PHandlerError):
            assert [answer async for answer in stream] == []

    between_two(happens)


def test_a_peer_with_too_many_streams_is_told_so_and_gets_others_later():
    async def happens(stub, answers):
        streams = [await opened(stub) for _ in range(STREAMS + 1)]
        # One of them is refused: the last to arrive, which need not be the last that was opened.
        replies = [asyncio.ensure_future(P2P.receive_protobuf(DownloadData, reader)) for reader, _ in streams]
        (refused,), waiting = await asyncio.wait(replies, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        _, error = refused.result()
        assert isinstance(error, p2pd_pb2.RPCError)
        assert "too many streams" in error.message
        for reply in waiting:
            reply.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for _, writer in streams:
            writer.close()
        answers.flooded.set()

        async def one():
            yield DownloadData(metadata=b"x")

        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(P2PHandlerError):  # p2pd has not reported yet that they are closed
                async for answer in await stub.rpc_first(one()):
                    assert answer.metadata == b"x"
                    return
            await asyncio.sleep(0.05)
        raise AssertionError("no stream is served any more")

    between_two(happens)


def test_a_peer_with_too_many_calls_is_told_so():
    async def happens(stub, answers):
        calls = {asyncio.ensure_future(stub.rpc_wait(DownloadData())) for _ in range(CALLS + 5)}
        refused = set()
        while len(refused) < 5:  # so all have come before one is answered and makes room
            done, _ = await asyncio.wait(calls - refused, timeout=20, return_when=asyncio.FIRST_COMPLETED)
            assert done
            refused |= done
        assert all("too many calls" in str(call.exception()) for call in refused)
        answers.flooded.set()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(outcome, DownloadData) for outcome in outcomes) == CALLS
        assert await asyncio.wait_for(stub.rpc_wait(DownloadData()), 10) == DownloadData()

    between_two(happens)


# ---- an averager -----------------------------------------------------------------------------------------------------


def member(name, initial_peers, line, step_vectors):
    """Run a peer whose processes may open 1,024 files. It makes a round whenever it is told to."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    with running_dht(initial_peers, line) as dht:
        averager = averager_for(step_vectors[0][0], dht, "none")
        members = meet_everyone(line, dht)
        process, reports = psutil.Process(averager.pid), []
        before = process.memory_info().rss
        for step, (vector, samples) in enumerate(step_vectors):
            line.put(("ready", str(dht.peer_id)))
            line.get()
            grown = process.memory_info().rss - before
            reports.append((len(run_round(averager, members, vector, samples, step).group.peer_ids), grown))
        assert averager.is_alive()
        say_goodbye(line, averager)
        return reports


def attacker(name, initial_peers, line):
    """Open streams to the peer that the test names, and keep them."""
    with running_dht(initial_peers, line, client_mode=True) as dht:
        line.put("ready")
        asyncio.run(_attack(dht, line))


async def _attack(dht, line) -> None:
    p2p, kept = await dht.replicate_p2p(), []

    async def stream(rpc: str):
        handle = PeerService.handle_name("run", rpc)
        _, reader, writer = await p2p.call_binary_stream_handler(victim, handle)
        kept.append((reader, writer))
        return writer

    async def say(rpc: str) -> None:
        with contextlib.suppress(ConnectionError, P2PDaemonError):
            writer = await stream(rpc)
            writer.write(header(HEAVY_BYTES))
            for _ in range(HEAVY_BYTES // 100_000 - 1):
                writer.write(bytes(100_000))
                await writer.drain()

    victim = line.get()
    for _ in range(SILENT_STREAMS):
        with contextlib.suppress(P2PDaemonError, OSError):
            await stream("rpc_join_group")
    line.put(len(kept))
    await asyncio.to_thread(line.get)
    rpcs = itertools.cycle(("rpc_join_group", "rpc_aggregate_part"))
    heavy = [asyncio.ensure_future(say(next(rpcs))) for _ in range(HEAVY_STREAMS)]
    await asyncio.wait(heavy, timeout=4)
    line.put("full")
    await asyncio.to_thread(line.get)
    for task in heavy:
        task.cancel()
    await asyncio.gather(*heavy, return_exceptions=True)
    await p2p.shutdown()


def test_silent_and_heavy_streams_of_an_outsider_stop_no_round():
    rounds = {name: [contribution(name, 1000, step) for step in range(2)] for name in ("a", "b")}
    with Peers(timeout_seconds=100) as peers:
        for name, vectors in rounds.items():
            peers.start(name, member, vectors)
        introduce(peers)
        ids = {name: peers.message(name)[1] for name in rounds}
        outsider = peers.start("outsider", attacker)
        assert peers.message("outsider") == "ready"
        from hivemind.p2p import PeerID

        outsider.tell(PeerID.from_base58(ids["a"]))
        assert peers.message("outsider") > 500
        for name in rounds:
            peers.peers[name].tell("silent streams are open")
        assert {peers.message(name)[0] for name in rounds} == {"ready"}
        outsider.tell("go on")
        assert peers.message("outsider") == "full"
        for name in rounds:
            peers.peers[name].tell("heavy streams are open")
        assert {peers.message(name) for name in rounds} == {"done"}
        for peer in peers.peers.values():
            peer.tell("go on")
        results = peers.results()
    for name in rounds:
        assert [size for size, _ in results[name]] == [2, 2]
        assert results[name][1][1] < MOST_BYTES


def knocking_twice(name, initial_peers, line):
    """Send join requests to this peer's own averager, as another peer would."""
    vector, _ = contribution("a", 1000, 0)
    with running_dht(initial_peers, line) as dht, running_dht((), line, client_mode=False) as other:
        averager = averager_for(vector, dht, "none")
        asyncio.run(_knock(dht, other, averager))
        averager.shutdown()


def test_a_second_join_request_ends_the_first():
    with Peers(timeout_seconds=60) as peers:
        peers.start("a", knocking_twice)
        peers.results()


async def _knock(dht, other, averager) -> None:
    p2p = await other.replicate_p2p()
    (address,) = await asyncio.to_thread(lambda: _addresses(dht))
    await p2p._client.connect(dht.peer_id, [address])
    stub = PeerService.get_stub(p2p, dht.peer_id, namespace="run")
    ticket = Ticket(1, 1, False, 0.0, bytes(LINEAGE_BYTES))
    request = averaging_pb2.JoinRequest(
        schema_hash=schema_hash(averager.vector), gather=to_knock(ticket.to_bytes()), client_mode=False
    )
    streams = []
    for _ in range(3):
        streams.append(await stub.rpc_join_group(request))
        assert (await asyncio.wait_for(streams[-1].__anext__(), 10)).code == averaging_pb2.ACCEPTED
    for stream in streams[:2]:
        assert (await asyncio.wait_for(stream.__anext__(), 5)).code == averaging_pb2.CANCELLED
    last = asyncio.ensure_future(streams[2].__anext__())
    assert not (await asyncio.wait([last], timeout=0.3))[0], "that one waits"
    last.cancel()
    await asyncio.gather(last, return_exceptions=True)
    await p2p.shutdown()


def _addresses(dht):
    from hivemind.utils.multiaddr import Multiaddr

    from swarm.network.dht_options import visible_addresses

    return [Multiaddr(address.rpartition("/p2p/")[0]) for address in visible_addresses(dht)]
