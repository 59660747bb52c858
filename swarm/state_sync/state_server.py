"""The state of a swarm on its way from a peer that has it to one that joins or fell behind.

All its tensors travel as one run of bytes, in pieces that the one who downloads asks for (``pull``). So do the
averages with which a newcomer makes the updates that it has missed meanwhile (``average_log``).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing as mp
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, AsyncIterator  # noqa: UP035 (hivemind does not recognise the one of collections.abc)

import torch
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, get_logger

from swarm.network.averager_process import AveragerProcess
from swarm.protocol.messages import MAX_GROUP_SIZE, RoundFailed
from swarm.runtime import fault_injection as faults
from swarm.runtime.async_utils import POLL_SECONDS, in_thread, until_caller_hangs_up, wait_a_little
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts
from swarm.state_sync.average_log import AverageLog
from swarm.state_sync.donor_race import DonorRace
from swarm.state_sync.download import Arrived, Download, NoState
from swarm.state_sync.download_messages import Offer, Wish, asked_for, piece_of
from swarm.state_sync.pull import Pull
from swarm.state_sync.serialization import Layout, pack
from swarm.state_sync.squeeze import squeeze
from swarm.state_sync.uploads import Content, Snapshot, Upload, Uploads, content_of

logger = get_logger(__name__)

SWEEP_SECONDS = 5.0


class StateServer(AveragerProcess):
    """The part of an averager that hands over the state, and takes over that of others.

    A subclass has ``_get_state``, which is called in the trainer process and returns (small metadata, tensors).
    """

    def __init__(self, *args, timeouts: Timeouts = DEFAULT_TIMEOUTS, **kwargs):
        self.timeouts = timeouts
        self._set_up_transfer()
        super().__init__(*args, **kwargs)

    def _set_up_transfer(self) -> None:
        self._uploads = Uploads(timeouts=self.timeouts)
        self._state_version = 0
        self._export: Snapshot | None = None
        """The one that the trainer is making."""
        self._average_log = AverageLog()
        self._has_kept = asyncio.Event()
        """Set, and replaced, when an average has been added."""
        self._took_state: OrderedDict[PeerID, None] = OrderedDict()
        self._followed_until = mp.Value("d", 0.0)
        self._looks = mp.Value("q", 0)
        self._arrived = mp.Array("d", [0.0] * len(Arrived._fields))
        self._answers_downloads: asyncio.Task | None = None
        self._downloading: asyncio.Task | None = None
        self._sweeping: asyncio.Task | None = None
        self._broken: Download | None = None
        """The last download that has failed with pieces that are of use."""
        self._last_state_bytes = 0

    # ---- in the trainer process -----------------------------------------------------------------------------------

    def download_state(self, donors: Sequence[PeerID], max_bytes: int, **wishes):
        """Download the state in the background, or averages that others have kept; one download at a time.

        :param donors: who may have it, the best first; where one is slow, others are tried beside it
        :param max_bytes: refuse to take more than this
        :param wishes: further ones, as for :class:`Download`
        :returns: a future of (donor, metadata, layout, bytes of the tensors for :func:`unpack`); raises
            :class:`NoState`. The metadata of averages is (the first one's step, the lineage before it, the lineages
            after each of them).
        """
        future = MPFuture()
        self._outer_pipe.send(("_download_state", [tuple(donors), max_bytes, wishes, future], {}))
        return future

    def cancel_download(self) -> None:
        """Nobody waits for it any more."""
        self._outer_pipe.send(("_cancel_download", [], {}))

    @property
    def looks(self) -> int:
        """Grows while a download is under way; if it does not, the averaging process stands still."""
        return self._looks.value

    @property
    def arrived(self) -> Arrived:
        """How far the download is that is under way."""
        donor, num_bytes, total_bytes, seconds_left = self._arrived[:]
        return Arrived(int(donor), int(num_bytes), int(total_bytes), seconds_left)

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
            if waited_seconds > self.timeouts.hangs_seconds:
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

    def _is_averaging(self) -> bool:
        """Whether a round is under way."""
        return False

    def _heard_from(self, peer_id: PeerID) -> None:
        """It has sent something."""

    async def _until_lost(self, peer_id: PeerID) -> None:
        """Wait until this peer is not there any more."""
        await asyncio.Event().wait()

    async def _declare_for_download_periodically(self) -> None:
        """Hivemind announces donors in the DHT; here every member of the swarm is one, found by its progress record."""

    async def _keep_average(self, step: int, before: bytes, after: bytes, future: MPFuture | None = None) -> None:
        """For others, who do without it where there is no room for a copy: this update is made."""
        self._uploads.sweep()
        if self._uploads.of:
            self._keep_average_log()
        try:
            with self.get_tensors() as (vector,):
                await in_thread(self._average_log.add, step, before, after, vector)
        except Exception:
            logger.debug("the average could not be kept for others", exc_info=True)
        has_kept, self._has_kept = self._has_kept, asyncio.Event()
        has_kept.set()
        for upload in [*self._uploads.of.values()]:
            if (other := upload.snapshot.average_of) is not None and self._average_log.of(other) is None:
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

    def _keep_average_log(self) -> None:
        self._average_log.keep()
        self._followed_until.value = self._average_log.until

    # ---- handing over -----------------------------------------------------------------------------------------------

    async def rpc_download_state(
        self, requests: AsyncIterator[averaging_pb2.DownloadData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """Another peer takes over our state, or the average of an update that we have made since, piece by piece.

        Who then asks for the average that comes next is as far as we are, and will come to its round.
        """
        peer_id = context.remote_id
        try:
            wish = Wish.from_bytes((await asyncio.wait_for(anext(requests), self.timeouts.open_seconds)).metadata)
        except (ValueError, TimeoutError, StopAsyncIteration) as error:
            logger.debug(f"{peer_id} asked for {error!r}")
            return
        if wish.waits:
            await self._until_made(wish.average_of)
        found = await self._upload_to(peer_id, wish)
        if not isinstance(found, Upload):
            if wish.average_of == self._current_step() and peer_id in self._took_state and not self._is_averaging():
                self._handed_over_to(peer_id)
            yield averaging_pb2.DownloadData(metadata=found.to_bytes())
            await until_caller_hangs_up()
            return
        upload, stream = found, asyncio.current_task()  # who is cancelled while it writes is closed by another task
        upload.streams.add(stream)
        try:
            content = await asyncio.shield(upload.snapshot.ready)
            yield averaging_pb2.DownloadData(metadata=content.offer.to_bytes())
            async for request in requests:
                index = asked_for(request.metadata)
                if index >= content.offer.num_pieces:
                    continue  # asked for before anybody could know
                if upload.is_used_up:
                    return
                piece = content.data[piece_of(index)]
                upload.send(index, len(piece))
                self._uploads.count(peer_id, upload, len(piece))
                if upload.is_complete:
                    self._note_taken(peer_id)
                yield averaging_pb2.DownloadData(tensor_part=squeeze(piece))
                faults.at("giving state", self._current_step())
        except ValueError as error:
            logger.debug(f"{peer_id} asked for {error}")
        finally:
            upload.streams.discard(stream)
            self._uploads.sweep()

    async def _until_made(self, step: int | None) -> None:
        """Wait for the average that ends this step, if this peer's round is making it; not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeouts.making_seconds):
                while step == self._current_step() and self._is_averaging() and self._average_log.of(step) is None:
                    self._keep_average_log()
                    await self._has_kept.wait()

    async def _upload_to(self, peer_id: PeerID, wish: Wish) -> Upload | Offer:
        """The same for all streams of a download; one that begins ends that peer's earlier one.

        An offer says that there is nothing, or not yet.
        """
        self._keep_average_log()
        self._sweep_later()
        uploads = self._uploads
        before = uploads.of.get(peer_id)
        if wish.snapshot:
            content = before.snapshot.content if before is not None else None
            return before if content is not None and content.offer.snapshot == wish.snapshot else Offer()
        if wish.average_of is None:
            seconds = uploads.busy_seconds(peer_id, self._last_state_bytes)
            if seconds > 0:
                return Offer(busy_seconds=seconds)
        if before is not None:
            uploads.of.pop(peer_id).end()
        uploads.sweep()
        if len(uploads.of) >= 4 * MAX_GROUP_SIZE:
            return Offer()
        snapshot = self._snapshot() if wish.average_of is None else self._kept_average(peer_id, wish.average_of)
        if snapshot is None:
            return Offer()
        upload = uploads.of[peer_id] = Upload(snapshot, self.timeouts)
        return upload

    def _snapshot(self) -> Snapshot | None:
        """Of the present state; made once for all who ask for it now. None if too many others are on their way."""
        if self._export is not None and self._export.version == self._state_version:
            return self._export  # however often somebody asks and hangs up, the trainer makes one at a time
        if (snapshot := self._uploads.snapshot_of(self._state_version)) is not None:
            return snapshot
        if not self._uploads.make_room():
            return None
        ready = asyncio.ensure_future(self._copy_state())
        self._export = export = Snapshot(self._state_version, ready)
        ready.add_done_callback(lambda _: self._exported(export))
        return export

    async def _copy_state(self) -> Content:
        description, (data,), _ = await self._get_current_state_from_host_process()
        self._last_state_bytes = data.nbytes
        return await in_thread(content_of, description, data.numpy())

    def _exported(self, export: Snapshot) -> None:
        if self._export is export:
            self._export = None  # those who read it keep it, and nobody else

    def _kept_average(self, peer_id: PeerID, step: int) -> Snapshot | None:
        batch = self._average_log.batch(step)
        if not batch or self._uploads.has_used_up(peer_id, batch[0].vector.nbytes):
            return None
        layout, data = pack([average.vector for average in batch])
        lineages = [average.after for average in batch]
        description = self.serializer.dumps(((step, batch[0].before, lineages), layout))
        return Snapshot(None, asyncio.ensure_future(in_thread(content_of, description, data.numpy())), step)

    def _note_taken(self, peer_id: PeerID) -> None:
        self._took_state[peer_id] = None
        self._took_state.move_to_end(peer_id)
        while len(self._took_state) > MAX_GROUP_SIZE:
            self._took_state.popitem(last=False)

    def _sweep_later(self) -> None:
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = asyncio.ensure_future(self._sweep())

    async def _sweep(self) -> None:
        """As long as there is something to be forgotten."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._uploads.sweep()
            if not self._uploads.of:
                return

    # ---- taking over ------------------------------------------------------------------------------------------------

    async def _cancel_download(self) -> None:
        if self._downloading is not None:
            self._downloading.cancel()

    async def _download_state(
        self, donors: Sequence[PeerID], max_bytes: int, wishes: dict[str, Any], future: MPFuture
    ) -> None:
        await self._cancel_download()
        self._downloading = asyncio.current_task()
        self._arrived[:] = [0.0, 0.0, 0.0, math.inf]
        try:
            downloads = [self._begin_download(donor, max_bytes, wishes) for donor in donors]
            race = DonorRace(downloads, self._pull, self._until_lost, self.timeouts)
            try:
                download = await race.run(self._look_at)
            except BaseException:
                self._keep_broken(race)
                raise
            future.set_result(await self._unpacked(download))
            if download.average_of is None:
                self._took_over()
        except asyncio.CancelledError:
            future.set_exception(NoState({}, "it was given up"))
        except RoundFailed as error:
            future.set_exception(error)
        except Exception as error:
            logger.debug("state download failed", exc_info=True)
            future.set_exception(NoState({}, f"it could not be downloaded: {type(error).__name__}: {error}"))
        finally:
            if self._downloading is asyncio.current_task():
                self._downloading = None

    def _begin_download(self, donor: PeerID, max_bytes: int, wishes: dict[str, Any]) -> Download:
        """Anew, or with what has arrived from this donor before its line broke down."""
        broken = self._broken
        if broken is None or (broken.donor, broken.average_of) != (donor, wishes.get("average_of")):
            return Download(donor, max_bytes, timeouts=self.timeouts, **wishes)
        self._broken = None
        broken.is_awaited = wishes.get("is_awaited", False)
        broken.begin_again()
        return broken

    def _keep_broken(self, race: DonorRace) -> None:
        if race.broken:
            self._broken = kept = race.broken[-1]
            asyncio.get_running_loop().call_later(self.timeouts.kept_seconds, self._drop_broken, kept)

    def _drop_broken(self, kept: Download) -> None:
        if self._broken is kept:
            self._broken = None

    def _look_at(self, place: int, download: Download) -> None:
        """The trainer process sees how far it is."""
        self._looks.value += 1
        if download.offer is not None:
            self._arrived[:] = [place, download.num_bytes, download.offer.num_bytes, download.seconds_left]

    def _pull(self, download: Download) -> Pull:
        donor, name = download.donor, self._get_handle_name(self.prefix, "rpc_download_state")

        async def open_stream() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            _, reader, writer = await self._p2p.call_binary_stream_handler(donor, name)
            return reader, writer

        def on_message() -> None:
            self._heard_from(donor)
            faults.at("taking state")

        return Pull(download, open_stream, on_message)

    async def _unpacked(self, download: Download) -> tuple[PeerID, Any, Layout, torch.Tensor]:
        donor = download.donor
        try:
            metadata, layout = self.serializer.loads(download.offer.description)
        except Exception as error:
            raise NoState({donor: f"it did not send its state: {error!r}"}) from error
        try:  # as it would be on its way to the trainer, who would wait for it for good
            content = await in_thread(download.content.share_memory_)
        except RuntimeError as error:
            raise NoState({}, "there is no room for the state in shared memory: make /dev/shm larger") from error
        return donor, metadata, layout, content
