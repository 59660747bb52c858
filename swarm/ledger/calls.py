"""Calls a peer that may have a ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from hivemind.p2p import P2P, PeerID
from hivemind.proto.averaging_pb2 import DownloadData

from swarm.network.peer_service import PeerService

ANSWER_SECONDS = 10.0
"""Longest wait for the next message."""

Call = Callable[[DownloadData], AsyncGenerator[DownloadData, None]]
"""Opens a stream to a peer that may have a ledger."""


def caller_of(p2p: P2P, peer: PeerID, run: str) -> Call:
    """Return a function that calls this peer. A peer that cannot be dialled is called over a connection that it made.

    Args:
        p2p: of this process
        peer: to call
        run: start of the run's keys in the DHT
    """

    async def call(request: DownloadData) -> AsyncGenerator[DownloadData, None]:
        stub = PeerService.get_stub(p2p, peer, namespace=run)
        stream = await asyncio.wait_for(stub.rpc_download_ledger(request), ANSWER_SECONDS)
        try:
            async for message in stream:
                yield message
        finally:
            await stream.aclose()

    return call
