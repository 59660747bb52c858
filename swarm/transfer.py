"""The state of a swarm on its way from a peer that has it to one that joins or fell behind.

All its tensors travel as one run of bytes, in slices side by side: a single stream does not fill a long link.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, AsyncIterator  # noqa: UP035 (hivemind does not recognise the one of collections.abc)

import torch
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import MPFuture, get_logger

from swarm import faults
from swarm.exchange import until_caller_hangs_up
from swarm.rounds import RoundFailed
from swarm.serving import Serving

logger = get_logger(__name__)

STREAM_SECONDS = 10.0  # longest silence within a stream before the other side counts as gone
SLOWEST_BYTES_PER_SECOND = 50_000.0  # a donor that sends less in the mean is given up: another one may send more
SLOW_LINK_SECONDS = 600.0  # in which what was written has arrived
NUM_SLICES = 8
CHUNK_BYTES = 2**16
TOKEN_BYTES = 16
MAX_SNAPSHOTS = 8  # copies of the state that are kept for those who download it
MAX_DIMENSIONS = 8
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}

Layout = Sequence[tuple[str, Sequence[int]]]


def pack(tensors: Sequence[torch.Tensor]) -> tuple[Layout, torch.Tensor]:
    """:returns: (dtype and shape of each tensor, the bytes of all of them, shape [n], uint8)"""
    layout = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors]
    return layout, torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])


def unpack(layout: Layout, content: torch.Tensor) -> list[torch.Tensor]:
    """Undo :func:`pack`.

    :raises RoundFailed: whatever is wrong with the layout; the sender is not trusted
    """
    try:
        dtypes, shapes = [DTYPES[name] for name, _ in layout], [list(shape) for _, shape in layout]
    except Exception as error:
        raise RoundFailed(f"the state's layout is malformed: {error!r}") from error
    if any(len(s) > MAX_DIMENSIONS or any(type(n) is not int or not 0 <= n <= len(content) for n in s) for s in shapes):
        raise RoundFailed("the state's layout is out of bounds")
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in zip(dtypes, shapes, strict=True)]
    if sum(sizes) != len(content):
        raise RoundFailed("the state has another size than its layout")
    parts = zip(content.split(sizes), dtypes, shapes, strict=True)
    return [part.clone().view(dtype).reshape(shape) for part, dtype, shape in parts]  # the copy is aligned


@dataclass
class Snapshot:
    """The state as it was when somebody asked for it; all who do so until it changes share it.

    :param version: of the state
    :param content: a future of (description, (bytes,), None)
    """

    version: int
    content: asyncio.Future


@dataclass
class Upload:
    """A state on its way out.

    :param token: names the download
    :param snapshot: what is sent
    :param sent: slices that are there
    :param streams: tasks that send its slices
    """

    token: bytes
    snapshot: Snapshot
    sent: int = 0
    streams: set[asyncio.Task] = field(default_factory=set)


class Download:
    """A state that is on its way in: what has arrived of it.

    :param donor: who sends it
    :param max_bytes: refuse to take more than this
    """

    def __init__(self, donor: PeerID, max_bytes: int):
        self.donor, self.max_bytes = donor, max_bytes
        self.token = os.urandom(TOKEN_BYTES)
        self.description = b""
        self.slices = [bytearray() for _ in range(NUM_SLICES)]
        self.missing = NUM_SLICES
        self.received_bytes = 0
        self.complete = asyncio.Event()

    def take(self, index: int, message: averaging_pb2.DownloadData) -> None:
        """Of a slice."""
        self.received_bytes += message.ByteSize()
        if self.received_bytes > self.max_bytes:
            raise RoundFailed(f"{self.donor} sent more than the {self.max_bytes} bytes that this model can need")
        self.description += message.metadata
        self.slices[index] += message.tensor_part.buffer

    def end_slice(self) -> None:
        """One of them is there."""
        self.missing -= 1
        if not self.missing:
            self.complete.set()


class StateTransfer(Serving):
    """The part of an averager that hands over the state, and takes over that of others.

    A subclass has ``_get_state``, which is called in the trainer process and returns (small metadata, tensors).
    """

    def __init__(self, *args, **kwargs):
        self._uploads: dict[PeerID, Upload] = {}
        self._state_version = 0
        super().__init__(*args, **kwargs)

    # ---- in the trainer process -----------------------------------------------------------------------------------

    def download_state(self, peer_id: PeerID, max_bytes: int):
        """Download a peer's state in the background.

        :param max_bytes: refuse to take more than this
        :returns: a future of (metadata, layout, bytes of the tensors for :func:`unpack`); raises RoundFailed with a
            reason
        """
        future = MPFuture()
        self._outer_pipe.send(("_download_state", [peer_id, max_bytes, future], {}))
        return future

    def get_current_state(self):
        metadata, tensors = self._get_state()
        layout, content = pack(tensors)
        return (metadata, layout), (content,)

    # ---- in the averager process ----------------------------------------------------------------------------------

    def _handed_over_to(self, peer_id: PeerID) -> None:
        """It has our state now."""

    def _took_over(self) -> None:
        """This peer's own state is gone."""

    def _state_changed(self) -> None:
        self._state_version += 1

    def _current_step(self) -> int:
        """The step of the state."""
        return 0

    def _heard_from(self, peer_id: PeerID) -> None:
        """It has sent something."""

    async def _until_lost(self, peer_id: PeerID) -> None:
        """Wait until this peer is not there any more."""
        await asyncio.Event().wait()

    async def _declare_for_download_periodically(self) -> None:
        """Hivemind announces donors in the DHT; here every member of the swarm is one, found by its progress record."""

    async def rpc_download_state(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """Another peer takes over a slice of our state, and will come to the next round."""
        token, index = request.metadata[:-1], request.metadata[-1] if request.metadata else NUM_SLICES
        if len(token) != TOKEN_BYTES or index >= NUM_SLICES:
            logger.debug(f"{context.remote_id} asked for no slice of the state")
            return
        upload = self._upload_to(context.remote_id, token)
        if upload is None:
            return
        upload.streams.add(asyncio.current_task())
        try:
            description, (content,), _ = await asyncio.shield(upload.snapshot.content)
            if index == 0:
                yield averaging_pb2.DownloadData(metadata=description)
            first, last = (len(content) * i // NUM_SLICES for i in (index, index + 1))
            for begin in range(first, last, CHUNK_BYTES):
                chunk = content[begin : min(begin + CHUNK_BYTES, last)].numpy().tobytes()
                yield averaging_pb2.DownloadData(tensor_part=runtime_pb2.Tensor(buffer=chunk))
                faults.at("giving state", self._current_step())
            upload.sent += 1
            if upload.sent == NUM_SLICES:
                self._handed_over_to(context.remote_id)
            yield averaging_pb2.DownloadData()  # nothing in it: that was all
            await until_caller_hangs_up(SLOW_LINK_SECONDS)
        finally:
            upload.streams.discard(asyncio.current_task())
            if not upload.streams and self._uploads.get(context.remote_id) is upload:
                del self._uploads[context.remote_id]

    def _upload_to(self, peer_id: PeerID, token: bytes) -> Upload | None:
        """The same for all slices of a download; a later one of that peer ends it. None if there are too many."""
        upload = self._uploads.get(peer_id)
        if upload is None or upload.token != token:
            for stream in self._uploads.pop(peer_id).streams if upload else ():
                stream.cancel()
            if (snapshot := self._snapshot()) is None:
                return None
            upload = self._uploads[peer_id] = Upload(token, snapshot)
        return upload

    def _snapshot(self) -> Snapshot | None:
        """Of the present state; made once for all who ask for it now. None if too many others are on their way."""
        snapshots = {upload.snapshot.version: upload.snapshot for upload in self._uploads.values()}
        if self._state_version in snapshots:
            return snapshots[self._state_version]
        if len(snapshots) >= MAX_SNAPSHOTS:
            return None
        return Snapshot(self._state_version, asyncio.ensure_future(self._get_current_state_from_host_process()))

    async def _download_state(self, peer_id: PeerID, max_bytes: int, future: MPFuture) -> None:
        try:
            future.set_result(await self._receive_state(Download(peer_id, max_bytes)))
            self._took_over()
        except TimeoutError:
            future.set_exception(RoundFailed(f"{peer_id} sent nothing for {STREAM_SECONDS:.0f} s"))
        except RoundFailed as error:
            future.set_exception(error)
        except Exception as error:
            logger.debug("state download failed", exc_info=True)
            future.set_exception(RoundFailed(f"{peer_id} could not send its state: {type(error).__name__}: {error}"))

    async def _receive_state(self, download: Download) -> tuple[Any, Layout, torch.Tensor]:
        slices = [asyncio.ensure_future(self._receive_slice(download, index)) for index in range(NUM_SLICES)]
        lost = asyncio.ensure_future(self._until_lost(download.donor))
        all_slices = asyncio.gather(*slices)
        try:
            slow_at = time.monotonic() + STREAM_SECONDS + download.max_bytes / SLOWEST_BYTES_PER_SECOND
            while not all_slices.done():
                if time.monotonic() > slow_at:
                    raise RoundFailed(f"{download.donor} sends too slowly")
                before = download.received_bytes
                await asyncio.wait([all_slices, lost], timeout=STREAM_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if lost.done():
                    raise RoundFailed(f"{download.donor} fell silent")
                if download.received_bytes == before and not all_slices.done():
                    raise TimeoutError
            await all_slices
        finally:
            for task in (*slices, lost):
                task.cancel()
            await asyncio.gather(*slices, all_slices, return_exceptions=True)  # they hang up
        try:
            metadata, layout = self.serializer.loads(download.description)
            content = torch.frombuffer(bytearray().join(download.slices), dtype=torch.uint8)
        except Exception as error:
            raise RoundFailed(f"{download.donor} did not send its state: {error!r}") from error
        return metadata, layout, content

    async def _receive_slice(self, download: Download, index: int) -> None:
        stub = self.get_stub(self._p2p, download.donor, namespace=self.prefix)
        request = averaging_pb2.DownloadData(metadata=download.token + bytes([index]))
        stream = await asyncio.wait_for(stub.rpc_download_state(request), STREAM_SECONDS)
        try:
            async for message in stream:
                if not message.ByteSize():
                    break
                download.take(index, message)
                self._heard_from(download.donor)
                faults.at("taking state")
            else:
                raise RoundFailed(f"{download.donor} broke off")
            download.end_slice()
            await download.complete.wait()  # the donor forgets its snapshot when nobody reads it any more
        finally:
            await stream.aclose()
