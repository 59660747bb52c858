"""A donor of a state without its process; streams are pairs of sockets, served as p2pd serves its own."""

import asyncio
import contextlib
import socket
from types import SimpleNamespace

import numpy as np
import torch
from hivemind.p2p import P2P
from hivemind.proto.averaging_pb2 import DownloadData
from hivemind.utils import MSGPackSerializer
from torch import nn

from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts
from swarm.state_sync.download import Download, DownloadRequest
from swarm.state_sync.download_messages import PIECE_BYTES, SLICE_BYTES, Offer, Wish, ask_for
from swarm.state_sync.pull import Pull
from swarm.state_sync.state_server import StateServer
from swarm.state_sync.state_version import StateVersion
from swarm.state_sync.training_state import SharedState
from swarm.state_sync.transfer_status import TransferStatus

STATE_BYTES = 3 * SLICE_BYTES + PIECE_BYTES + 5


def version_at(step: int) -> StateVersion:
    """Return a small state after so many updates."""
    model = nn.Linear(2, 1)
    state = SharedState(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    return StateVersion(state, step, list(model.parameters()))


class Donor:
    """A donor without its process. Its exports are numbered, as if the state changed all the time."""

    def __init__(self, timeouts: Timeouts = DEFAULT_TIMEOUTS):
        self.step, self.is_averaging = 0, False
        self.server = StateServer(self._export, self, TransferStatus(), timeouts=timeouts)
        self.exports, self.handed_over, self.lines = 0, [], []

    async def _export(self) -> tuple[bytes, torch.Tensor]:
        self.exports += 1
        content = torch.full((STATE_BYTES,), self.exports, dtype=torch.uint8)
        await asyncio.sleep(0)
        return MSGPackSerializer.dumps(("description", [])), content

    def expect_joiner(self, peer_id) -> None:
        self.handed_over.append(peer_id)

    def answers(self, requests, context):
        return self.server.rpc_download_state(requests, context)

    async def serve(self, peer: str, reader, writer) -> None:
        """Serve a stream as `swarm.network.hivemind_patches` does."""

        async def requests():
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    yield (await P2P.receive_protobuf(DownloadData, reader))[0]

        answers = self.answers(requests(), SimpleNamespace(remote_id=peer))
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            async for message in answers:
                await P2P.send_protobuf(message, writer)

    async def open_stream(self, peer: str):
        """Open a stream to this donor."""
        ours, theirs = socket.socketpair()
        line = asyncio.ensure_future(self.serve(peer, *await asyncio.open_connection(sock=theirs)))
        self.lines.append(line)
        return await asyncio.open_connection(sock=ours)

    def hang_up(self) -> None:
        """Break all lines of this donor."""
        for line in self.lines:
            line.cancel()
        self.lines.clear()


async def fetch(donor: Donor, peer: str, average_of: int | None = None, **wishes) -> Download:
    download = Download("the donor", DownloadRequest(10**9, average_of, **wishes))
    await Pull(download, lambda: donor.open_stream(peer), lambda message: None).run()
    return download


def value_of(download: Download) -> int:
    """Return the number of the export that has arrived."""
    (value,) = np.unique(download.content.numpy())
    assert len(download.content) == STATE_BYTES
    return int(value)


async def until(condition) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come about")


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


async def begin(donor: Donor, peer: str):
    """Begin a download, and stop it after the first piece."""
    reader, writer = await donor.open_stream(peer)
    for metadata in (Wish().to_bytes(), ask_for(0)):
        await P2P.send_protobuf(DownloadData(metadata=metadata), writer)
    offer, _ = await P2P.receive_protobuf(DownloadData, reader)
    assert Offer.from_bytes(offer.metadata, 10**9).num_bytes == STATE_BYTES
    await P2P.receive_protobuf(DownloadData, reader)
    return reader, writer


async def finish(stream) -> None:
    reader, writer = stream
    for index in range(1, -(-STATE_BYTES // PIECE_BYTES)):
        await P2P.send_protobuf(DownloadData(metadata=ask_for(index)), writer)
        await P2P.receive_protobuf(DownloadData, reader)
    writer.close()
