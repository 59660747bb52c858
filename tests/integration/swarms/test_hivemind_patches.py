"""What Hivemind's transport survives with our repairs; each of these cases ended it or left something behind before."""

import asyncio
import itertools
import time
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
from hivemind.dht.node import _SearchState
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto.averaging_pb2 import DownloadData
from hivemind.utils import ValueWithExpiration
from hivemind.utils.multiaddr import Multiaddr

from swarm.network import hivemind_patches as repairs
from swarm.network.served_stream import MAX_MESSAGE_BYTES
from tests.helpers.two_peers import Answers, between_two

pytestmark = pytest.mark.timeout(60)
repairs.repair_hivemind()


def test_a_call_that_is_cancelled_as_its_answer_arrives_leaves_others_answered():
    async def happens(stub, answers):
        for turns in range(5):
            answers.answered.clear()
            call = asyncio.ensure_future(stub.rpc_call(DownloadData()))
            await answers.answered.wait()
            for _ in range(10):
                await asyncio.sleep(0)  # the answer goes out
            time.sleep(0.05)  # and comes in, while this process is busy
            for _ in range(turns):
                await asyncio.sleep(0)  # its bytes are here, and in one of these turns they are read
            call.cancel()
            await asyncio.wait([call])
        assert await asyncio.wait_for(stub.rpc_call(DownloadData(metadata=b"x")), 5) == DownloadData(metadata=b"x")

    between_two(happens)


def test_a_stream_that_cannot_be_opened_leaves_nothing_open():
    async def happens(stub, answers):
        async def nothing():
            return
            yield

        dead = Answers.get_stub(stub._p2p, PeerID.from_base58("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"))
        daemon = psutil.Process(stub._p2p._child.pid)
        before = psutil.Process().num_fds(), daemon.num_fds()
        for _ in range(20):
            with pytest.raises(P2PDaemonError):
                await dead.rpc_first(nothing())
        assert psutil.Process().num_fds() < before[0] + 10
        assert daemon.num_fds() < before[1] + 10

    between_two(happens)


def test_a_stream_whose_handler_has_ended_is_closed_although_its_caller_goes_on():
    async def happens(stub, answers):
        async def endless():
            for number in itertools.count():
                yield DownloadData(metadata=bytes(100))
                await asyncio.sleep(0)
                if number == 100:  # more than are kept for a handler that is busy
                    answers.flooded.set()

        before = len(asyncio.all_tasks())
        for _ in range(3):
            answers.flooded.clear()
            stream = await stub.rpc_first(endless())
            with suppress(ConnectionError, P2PDaemonError, P2PHandlerError):  # it is reset while its caller sends
                async for _ in stream:
                    pass
        deadline = time.monotonic() + 10
        while len(asyncio.all_tasks()) > before and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert len(asyncio.all_tasks()) <= before, asyncio.all_tasks()

    between_two(happens)


def test_a_message_that_is_too_long_is_not_read():
    async def one():
        yield DownloadData(metadata=bytes(MAX_MESSAGE_BYTES))

    async def happens(stub, answers):
        answers.flooded.set()
        stream = await stub.rpc_first(one())
        with pytest.raises((StopAsyncIteration, ConnectionError, P2PDaemonError, P2PHandlerError)):
            await asyncio.wait_for(stream.__anext__(), 10)
        with suppress(ConnectionError):
            await stream.aclose()

    between_two(happens)


HEADER = P2P.MESSAGE_MARKER + (2).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER)
NOT_PROTOBUF = b"\xff\xff"


@pytest.mark.parametrize("sent", [b"?", HEADER[:1] + b"\xff" * P2P.HEADER_LEN, HEADER + NOT_PROTOBUF])
def test_a_stream_that_cannot_be_read_is_one_that_failed(sent):
    """Without the repair it raised an error that no caller expects, and a joiner looked for no other leader."""

    async def send(stream_info, reader, writer):
        writer.write(sent)
        await writer.drain()
        await reader.read()

    async def happens(stub, answers):
        there = answers.p2p
        await there.add_binary_stream_handler("nonsense", send)
        stream = await stub._p2p.iterate_protobuf_handler(there.peer_id, "nonsense", DownloadData(), DownloadData)
        with pytest.raises(P2PHandlerError, match="cannot be read"):
            await anext(stream)

    between_two(happens)


def test_an_answer_that_cannot_be_read_is_a_call_that_failed():
    async def answer(request, context):
        return SimpleNamespace(SerializeToString=lambda: NOT_PROTOBUF)

    async def happens(stub, answers):
        there = answers.p2p
        await there.add_protobuf_handler("nonsense", answer, DownloadData)
        with pytest.raises(P2PHandlerError, match="cannot be read"):
            await stub._p2p.call_protobuf_handler(there.peer_id, "nonsense", DownloadData(), DownloadData)

    between_two(happens)


@pytest.mark.parametrize("end", [float("inf"), float("nan"), 1e300])
def test_an_answer_that_is_said_to_stay_for_ever_ends_no_search(end):
    def found(*subkeys: bytes, until: float) -> ValueWithExpiration:
        entries = DictionaryDHTValue()
        for subkey in subkeys:
            entries.store(subkey, b"value", time.time() + 60)
        return ValueWithExpiration(entries, until)

    async def run():
        search = _SearchState(DHTID.generate(), sufficient_expiration_time=float("inf"))
        search.add_candidate(found(b"liar", until=end), DHTID.generate())
        assert not search.finished
        search.add_candidate(found(b"anna", b"ben", until=time.time() + 60), DHTID.generate())
        assert {b"anna", b"ben"} <= {subkey for subkey, _ in search.binary_value.items()}

    asyncio.run(run())


HOP = "/libp2p/circuit/relay/0.2.0/hop"
"""The protocol by which a peer asks a relay to connect it with another peer."""


def test_strangers_traffic_is_not_relayed(monkeypatch):
    async def relays(stub) -> bool:
        try:
            _, _, writer = await stub._p2p.call_binary_stream_handler(stub._peer, HOP)
        except P2PDaemonError:
            return False
        writer.close()
        return True

    async def not_here(stub, answers):
        assert not await relays(stub)
        (address,) = await stub._p2p.get_visible_maddrs()
        target = await P2P.create([str(address)], host_maddrs=None, no_listen=True, dht_mode="client")
        try:
            arguments = psutil.Process(target._child.pid).cmdline()
            assert {"-relayService=0", f"-connHi={repairs.CONNECTIONS}"} <= {*arguments}
            await Answers(target).add_p2p_handlers(target)
            ours = Answers.get_stub(stub._p2p, target.peer_id)
            assert await asyncio.wait_for(ours.rpc_call(DownloadData(metadata=b"x")), 10), "over its own connection"
            third = await P2P.create([str(address)], host_maddrs=["/ip4/127.0.0.1/tcp/0"], dht_mode="client")
            try:
                circuit = Multiaddr(f"{address}/p2p-circuit")
                with pytest.raises(P2PDaemonError):
                    await asyncio.wait_for(third._client.connect(target.peer_id, [circuit]), 20)
            finally:
                await third.shutdown()
        finally:
            await target.shutdown()

    async def there(stub, answers):
        assert await relays(stub), "p2pd does so by default"

    between_two(not_here)
    monkeypatch.setattr(P2P, "_make_process_args", staticmethod(P2P._make_process_args.__wrapped__))
    between_two(there)
