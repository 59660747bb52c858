"""Two connected p2pd, and a service that answers on one of them."""

import asyncio
from typing import AsyncIterator  # noqa: UP035 (hivemind does not recognise the one of collections.abc)

from hivemind.p2p import P2P, P2PContext
from hivemind.p2p.servicer import ServicerBase
from hivemind.proto.averaging_pb2 import DownloadData


class Answers(ServicerBase):
    """The service of the called node.

    Args:
        p2p: the called node
    """

    def __init__(self, p2p: P2P):
        self.p2p = p2p
        self.answered, self.flooded = asyncio.Event(), asyncio.Event()

    async def rpc_call(self, request: DownloadData, context: P2PContext) -> DownloadData:
        self.answered.set()
        return request

    async def rpc_wait(self, request: DownloadData, context: P2PContext) -> DownloadData:
        await self.flooded.wait()
        return request

    async def rpc_one(self, request: DownloadData, context: P2PContext) -> AsyncIterator[DownloadData]:
        self.answered.set()
        yield request

    async def rpc_first(
        self, requests: AsyncIterator[DownloadData], context: P2PContext
    ) -> AsyncIterator[DownloadData]:
        async for request in requests:
            await self.flooded.wait()
            yield request
            return


def between_two(happens) -> None:
    async def run():
        here = await P2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        there = await P2P.create(
            host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=await here.get_visible_maddrs(), dht_mode="server"
        )
        try:
            answers = Answers(there)
            await answers.add_p2p_handlers(there)
            await asyncio.wait_for(happens(Answers.get_stub(here, there.peer_id), answers), 30)
        finally:
            await here.shutdown()
            await there.shutdown()

    asyncio.run(run())
