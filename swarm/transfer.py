"""The state of a swarm on its way from a peer that has it to one that joins or fell behind.

All its tensors travel as one run of bytes, in slices side by side: a single stream does not fill a long link. So do the
averages with which a newcomer makes the updates that it has missed meanwhile (:mod:`swarm.trail`).
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing as mp
import time
from collections import OrderedDict
from typing import Any, AsyncIterator  # noqa: UP035 (hivemind does not recognise the one of collections.abc)

import torch
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, get_logger

from swarm import faults
from swarm.download import NUM_SLICES, STREAM_SECONDS, Download, parse_request, slice_of
from swarm.exchange import until_caller_hangs_up
from swarm.lanes import in_thread
from swarm.packing import Layout, pack
from swarm.rounds import MAX_GROUP_SIZE, RoundFailed
from swarm.serving import Serving
from swarm.squeeze import CHUNK_BYTES, squeeze
from swarm.trail import Trail
from swarm.uploads import Snapshot, Upload, make_room
from swarm.version import POLL_SECONDS, wait_a_little

logger = get_logger(__name__)

LOOK_SECONDS = 0.5
HANGS_SECONDS = 30.0
SLOW_LINK_SECONDS = 600.0  # in which what was written has arrived


class StateTransfer(Serving):
    """The part of an averager that hands over the state, and takes over that of others.

    A subclass has ``_get_state``, which is called in the trainer process and returns (small metadata, tensors).
    """

    def __init__(self, *args, **kwargs):
        self._uploads: dict[PeerID, Upload] = {}
        self._state_version = 0
        self._export: Snapshot | None = None
        """The one that the trainer is making."""
        self._trail = Trail()
        self._took_state: OrderedDict[PeerID, None] = OrderedDict()
        self._followed_until = mp.Value("d", 0.0)
        self._looks = mp.Value("q", 0)
        self._answers_downloads: asyncio.Task | None = None
        super().__init__(*args, **kwargs)

    # ---- in the trainer process -----------------------------------------------------------------------------------

    def download_state(self, peer_id: PeerID, max_bytes: int, **wishes):
        """Download a peer's state in the background, or an average that it has kept.

        :param max_bytes: refuse to take more than this
        :param wishes: further ones, as for :class:`Download`
        :returns: a future of (metadata, layout, bytes of the tensors for :func:`unpack`); raises RoundFailed with a
            reason. The metadata of an average is (its step, the lineage before it, the lineage after it).
        """
        future = MPFuture()
        self._outer_pipe.send(("_download_state", [peer_id, max_bytes, wishes, future], {}))
        return future

    @property
    def looks(self) -> int:
        """Grows while a download is under way; if it does not, the averaging process stands still."""
        return self._looks.value

    @property
    def is_followed(self) -> bool:
        """Whether somebody takes over our state, and has to be told of the updates that are made meanwhile."""
        return time.monotonic() < self._followed_until.value

    def keep_average(self, step: int, before: bytes, after: bytes) -> None:
        """The vector holds the average of an update that this peer makes alone; after this it may be written again."""
        future, waited_seconds = MPFuture(), 0.0
        self._outer_pipe.send(("_keep_average", [step, before, after, future], {}))
        while not future.done() and self.is_alive():
            wait_a_little(future)
            waited_seconds += POLL_SECONDS  # not by the clock: this process itself may stand still
            if waited_seconds > HANGS_SECONDS:
                self.kill()  # it is stopped: what it read later would be another vector

    def get_current_state(self):
        metadata, tensors = self._get_state()
        layout, content = pack(tensors)
        return (metadata, layout), (content.share_memory_(),)  # without room for it, somebody hears of it only here

    # ---- in the averager process ----------------------------------------------------------------------------------

    def _handed_over_to(self, peer_id: PeerID) -> None:
        """It has the state of the present step now."""

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

    async def _keep_average(self, step: int, before: bytes, after: bytes, future: MPFuture | None = None) -> None:
        """For others, who do without it where there is no room for a copy: this update is made."""
        if self._uploads:
            self._keep_trail()
        try:
            with self.get_tensors() as (vector,):
                await in_thread(self._trail.add, step, before, after, vector)
        except Exception:
            logger.debug("the average could not be kept for others", exc_info=True)
        for upload in [*self._uploads.values()]:
            if (other := upload.snapshot.average_of) is not None and self._trail.of(other) is None:
                upload.end()  # who is so far behind does not catch up by it, and it takes memory
        if future is not None:
            future.set_result(None)

    async def _answer_downloads(self) -> None:
        """Who cannot be dialled answers these as well, and nothing else, over connections that it has made itself."""
        if self._answers_downloads is None:
            self._answers_downloads = asyncio.ensure_future(self._add_download_handler())
        await self._answers_downloads

    async def _add_download_handler(self) -> None:
        self._collect_rpc_handlers()
        (handler,) = (handler for handler in self._rpc_handlers if handler.method_name == "rpc_download_state")
        await self._p2p.add_protobuf_handler(
            self._get_handle_name(self.prefix, handler.method_name),
            self.rpc_download_state,
            handler.request_type,
            stream_input=handler.stream_input,
            stream_output=handler.stream_output,
        )

    def _keep_trail(self) -> None:
        self._trail.keep()
        self._followed_until.value = self._trail.until

    async def rpc_download_state(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """Another peer takes over a slice of our state, or of the average of an update that we have made since.

        Who then asks for the average that comes next is as far as we are, and will come to its round.
        """
        try:
            token, index, average_of = parse_request(request)
        except ValueError as error:
            logger.debug(f"{context.remote_id} asked for {error}")
            return
        upload = self._upload_to(context.remote_id, token, average_of)
        if upload is None:
            if index == 0 and average_of == self._current_step() and context.remote_id in self._took_state:
                self._handed_over_to(context.remote_id)
            return
        stream = asyncio.current_task()  # who is cancelled while it writes is closed by another task, later
        upload.streams.add(stream)
        try:
            description, (content,), _ = await asyncio.shield(upload.snapshot.content)
            if index == 0:
                yield averaging_pb2.DownloadData(metadata=description)
            chunks, digest = content.numpy()[slice_of(len(content), index)], hashlib.sha256()
            for begin in range(0, len(chunks), CHUNK_BYTES):
                chunk = chunks[begin : begin + CHUNK_BYTES]
                digest.update(chunk)
                yield averaging_pb2.DownloadData(tensor_part=squeeze(chunk))
                upload.moved()
                faults.at("giving state", self._current_step())
            upload.sent += 1
            if upload.sent == NUM_SLICES:
                self._note_taken(context.remote_id)
            yield averaging_pb2.DownloadData(metadata=digest.digest())  # nothing else in it: that was all
            await until_caller_hangs_up(SLOW_LINK_SECONDS)
        finally:
            upload.streams.discard(stream)
            if not upload.streams and self._uploads.get(context.remote_id) is upload:
                del self._uploads[context.remote_id]

    def _upload_to(self, peer_id: PeerID, token: bytes, average_of: int | None) -> Upload | None:
        """The same for all slices of a download; a later one of that peer ends it.

        None if there are too many, or this average is not to be had.
        """
        self._keep_trail()
        upload = self._uploads.get(peer_id)
        if upload is None or upload.token != token:
            if upload is not None:
                self._uploads.pop(peer_id).end()
            snapshot = self._snapshot() if average_of is None else self._kept_average(average_of)
            if snapshot is None:
                return None
            upload = self._uploads[peer_id] = Upload(token, snapshot)
        return upload

    def _snapshot(self) -> Snapshot | None:
        """Of the present state; made once for all who ask for it now. None if too many others are on their way."""
        if self._export is not None and self._export.version == self._state_version:
            return self._export  # however often somebody asks and hangs up, the trainer makes one at a time
        for upload in self._uploads.values():
            if upload.snapshot.version == self._state_version:
                return upload.snapshot
        if not make_room(self._uploads.values()):
            return None
        content = asyncio.ensure_future(self._get_current_state_from_host_process())
        self._export = export = Snapshot(self._state_version, content)
        content.add_done_callback(lambda _: self._exported(export))
        return export

    def _exported(self, export: Snapshot) -> None:
        if self._export is export:
            self._export = None  # those who read it keep it, and nobody else

    def _kept_average(self, step: int) -> Snapshot | None:
        if (kept := self._trail.of(step)) is None:
            return None
        layout, content = pack([kept.vector])
        ready = asyncio.get_running_loop().create_future()
        ready.set_result((self.serializer.dumps(((step, kept.before, kept.after), layout)), (content,), None))
        return Snapshot(None, ready, step)

    def _note_taken(self, peer_id: PeerID) -> None:
        self._took_state[peer_id] = None
        self._took_state.move_to_end(peer_id)
        while len(self._took_state) > MAX_GROUP_SIZE:
            self._took_state.popitem(last=False)

    async def _download_state(self, peer_id: PeerID, max_bytes: int, wishes: dict[str, Any], future: MPFuture) -> None:
        try:
            download = Download(peer_id, max_bytes, **wishes)
            future.set_result(await self._receive_state(download))
            if download.average_of is None:
                self._took_over()
        except TimeoutError:
            future.set_exception(RoundFailed(f"{peer_id} did not answer for {STREAM_SECONDS:.0f} s"))
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
            while not all_slices.done():
                self._looks.value += 1
                await asyncio.wait([all_slices, lost], timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if lost.done():
                    raise RoundFailed(f"{download.donor} fell silent")
                if not all_slices.done():
                    download.judge()
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
        try:
            content.share_memory_()  # as it would be on its way to the trainer, who would wait for it for good
        except RuntimeError as error:
            raise RoundFailed("there is no room for the state in shared memory: make /dev/shm larger") from error
        return metadata, layout, content

    async def _receive_slice(self, download: Download, index: int) -> None:
        stub = self.get_stub(self._p2p, download.donor, namespace=self.prefix)
        stream = await asyncio.wait_for(stub.rpc_download_state(download.request(index)), STREAM_SECONDS)
        try:
            async for message in stream:
                if download.take(index, message):
                    break
                self._heard_from(download.donor)
                faults.at("taking state")
            else:
                raise RoundFailed(f"{download.donor} broke off")
            await download.complete.wait()  # the donor forgets its snapshot when nobody reads it any more
        finally:
            await stream.aclose()
