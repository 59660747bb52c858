"""Hands over the state to a peer that joins or fell behind.

All its tensors are sent as one run of bytes, in pieces that the downloading peer asks for (`pull`). So are the averages
with which a joiner makes the updates that it missed meanwhile (`average_log`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, AsyncIterator, Protocol  # noqa: UP035 (hivemind does not recognise the one of collections.abc)

import torch
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer, get_logger

from swarm.protocol.admission import OPEN, Admission
from swarm.protocol.certificates import IN_ROUNDS, Role
from swarm.protocol.messages import MAX_GROUP_SIZE
from swarm.runtime import fault_injection as faults
from swarm.runtime.async_utils import in_thread, until_caller_hangs_up
from swarm.runtime.line_use import LineUse
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts
from swarm.state_sync.average_log import AverageLog
from swarm.state_sync.download_messages import Offer, Wish, asked_for, piece_of
from swarm.state_sync.serialization import pack
from swarm.state_sync.squeeze import squeeze
from swarm.state_sync.transfer_status import TransferStatus
from swarm.state_sync.uploads import Content, Snapshot, Upload, Uploads, content_of

logger = get_logger(__name__)

SWEEP_SECONDS = 5.0
MAX_PACKING = 8
"""Averages that are packed at the same time. There is a limit because asking for them costs a stranger nothing."""


class Rounds(Protocol):
    """What the state server has to know about this peer's rounds, and tell them."""

    @property
    def step(self) -> int:
        """The step that this peer works on. The state is that of its beginning."""

    @property
    def is_averaging(self) -> bool:
        """Whether a round is under way."""

    def expect_joiner(self, peer_id: PeerID) -> None:
        """Expect a joiner in the present round: it has the state of this step now."""


def state_to_send(metadata: Any, tensors: Sequence[torch.Tensor]) -> tuple[bytes, torch.Tensor]:
    """Pack a state in the trainer process.

    Args:
        metadata: description of the state
        tensors: its tensors

    Returns:
        encoded description with the layout, and the bytes of all tensors, shape [n], uint8, in shared memory
    """
    layout, content = pack(tensors)
    content.share_memory_()  # here, so that a lack of room becomes an error in the trainer
    return MSGPackSerializer.dumps((metadata, layout)), content


class StateServer:
    """Sends the state and kept averages to other peers. Runs in the averaging process.

    Args:
        ask_for_state: gets what `state_to_send` returns in the trainer process
        rounds: rounds of this peer
        status: tells the trainer whether a peer follows
        line: limits and counts what this peer sends
        admission: decides which peers may ask
    """

    def __init__(
        self,
        ask_for_state: Callable[[], Awaitable[tuple[bytes, torch.Tensor]]],
        rounds: Rounds,
        status: TransferStatus,
        line: LineUse | None = None,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        admission: Admission = OPEN,
    ):
        self._admission = admission
        self._ask_for_state, self.rounds, self._status, self._timeouts = ask_for_state, rounds, status, timeouts
        self._line = line or LineUse()
        self.uploads = Uploads(timeouts=timeouts)
        self._state_version = 0
        self._export: Snapshot | None = None
        """The copy that was asked for last, until the trainer has made it."""
        self._export_waits = False
        """Whether the trainer has not begun with it."""
        self._one_copy = asyncio.Lock()
        self._average_log = AverageLog()
        self._packed: tuple[tuple[int, bytes], Snapshot] | None = None
        """The averages that were asked for last, with their first step and last lineage."""
        self._packing: set[asyncio.Future] = set()
        self._has_kept = asyncio.Event()
        """Set, and replaced, when an average has been added."""
        self._took_state: OrderedDict[PeerID, None] = OrderedDict()
        """Peers that have got a whole state or average, the latest last."""
        self._sweeping: asyncio.Task | None = None
        self._last_state_bytes = 0

    def state_changed(self) -> None:
        """Note that the state has changed: peers that ask from now on get a new copy."""
        self._state_version += 1
        if self._export is not None and self._export_waits:
            self._export.version = self._state_version  # the trainer will copy the state as it is then

    async def keep_average(self, step: int, before: bytes, after: bytes, vector: torch.Tensor) -> None:
        """Keep the average of an update for other peers. If there is no memory for a copy, they do without it.

        Args:
            step: the step that it ended
            before: lineage of the weights that it belongs to
            after: lineage of the weights that come out of it
            vector: shape [n], fp32; may be written again afterwards
        """
        self._packed = None
        self.uploads.sweep()
        if self.uploads.of:
            self._keep_average_log()
        try:
            await in_thread(self._average_log.add, step, before, after, vector)
        except Exception:
            logger.debug("the average could not be kept for others", exc_info=True)
        has_kept, self._has_kept = self._has_kept, asyncio.Event()
        has_kept.set()
        for peer_id, upload in [*self.uploads.of.items()]:
            if (other := upload.snapshot.average_of) is not None and self._average_log.of(other) is None:
                # Its average is no longer kept: a peer so far behind does not catch up by it.
                self.uploads.of.pop(peer_id).end()

    def _keep_average_log(self) -> None:
        self._average_log.keep()
        self._status.follow_until(self._average_log.until)

    async def rpc_download_state(
        self, requests: AsyncIterator[averaging_pb2.DownloadData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """Send this peer's state, or kept averages, piece by piece to a peer that asks for the pieces.

        A peer that has taken them and asks for the average of the present step is as far as this one. It will come to
        the round of this step.
        """
        peer_id = context.remote_id
        try:
            first = await asyncio.wait_for(anext(requests), self._timeouts.open_seconds)
            wish = Wish.from_bytes(self._admission.admit(first.metadata, peer_id, Role.TRAIN | Role.WATCH))
        except (ValueError, TimeoutError, StopAsyncIteration) as error:
            logger.debug(f"{peer_id} asked for {error!r}")
            return
        if wish.waits:
            await self._until_made(wish.average_of)
            if self._admission.is_removed(peer_id):  # it may have been removed during the wait
                return
        found = await self._upload_to(peer_id, wish)
        if not isinstance(found, Upload):
            if (
                wish.average_of == self.rounds.step
                and self._admission.may(peer_id, IN_ROUNDS)
                and peer_id in self._took_state
                and not self.rounds.is_averaging
            ):
                self.rounds.expect_joiner(peer_id)
            yield averaging_pb2.DownloadData(metadata=found.to_bytes())
            await until_caller_hangs_up()
            return
        upload, stream = found, asyncio.current_task()  # another task cancels this one to close it while it writes
        upload.streams.add(stream)
        try:
            content = await asyncio.shield(upload.snapshot.ready)
            yield averaging_pb2.DownloadData(metadata=content.offer.to_bytes())
            async for request in requests:
                index = asked_for(request.metadata)
                if index >= content.offer.num_pieces:
                    continue  # asked for together with the wish, before the peer knew the number of pieces
                if upload.is_used_up:
                    return
                piece = content.data[piece_of(index)]
                message = averaging_pb2.DownloadData(tensor_part=squeeze(piece))
                await self._line.send(message.ByteSize())
                upload.send(index, len(piece))
                self.uploads.count_sent(peer_id, upload, len(piece))
                if upload.is_complete:
                    self._note_taken(peer_id)
                yield message
                faults.at("giving state", self.rounds.step)
        except ValueError as error:
            logger.debug(f"{peer_id} asked for {error}")
        finally:
            upload.streams.discard(stream)
            self.uploads.sweep()

    def end_uploads_of_removed(self) -> None:
        """End the running uploads to peers that were removed from the run."""
        for peer_id in self._admission.removed(self.uploads.of):
            self.uploads.of.pop(peer_id).end()

    async def _until_made(self, step: int | None) -> None:
        """Wait for the average that ends this step, if this peer's round is making it; at most `making_seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeouts.making_seconds):
                while step == self.rounds.step and self.rounds.is_averaging and self._average_log.of(step) is None:
                    self._keep_average_log()
                    await self._has_kept.wait()

    async def _upload_to(self, peer_id: PeerID, wish: Wish) -> Upload | Offer:
        """The upload that a stream belongs to, one for all streams of a download. A new one ends the peer's old one.

        An `Offer` in place of it says that there is nothing, or not yet.
        """
        self._keep_average_log()
        self._sweep_later()
        uploads = self.uploads
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
        snapshot = self.snapshot() if wish.average_of is None else self._kept_average(peer_id, wish.average_of)
        if snapshot is None:
            return Offer()
        upload = uploads.of[peer_id] = Upload(snapshot, self._timeouts)
        if wish.average_of is None and (before is None or before.snapshot is not snapshot or before.sent):
            snapshot.ready.add_done_callback(lambda _: uploads.count_copy(peer_id, snapshot))
        return upload

    def snapshot(self) -> Snapshot | None:
        """A copy of the present state, one for all peers that ask for it now. None if too many copies are in use.

        The trainer makes one copy at a time. Further requests share the next one, however often the state changes
        meanwhile.
        """
        if self._export is not None and self._export.version == self._state_version:
            return self._export
        if (snapshot := self.uploads.snapshot_of(self._state_version)) is not None:
            return snapshot
        if not self.uploads.make_room():
            return None
        ready = asyncio.ensure_future(self._copy_state())
        self._export = export = Snapshot(self._state_version, ready)
        self._export_waits = True
        ready.add_done_callback(lambda _: self._exported(export))
        return export

    async def _copy_state(self) -> Content:
        async with asyncio.timeout(self._timeouts.offer_seconds), self._one_copy:  # no peer waits longer than this
            self._export_waits = False
            description, data = await self._ask_for_state()
        self._last_state_bytes = data.nbytes
        return await in_thread(content_of, description, data.numpy())

    def _exported(self, export: Snapshot) -> None:
        if self._export is export:
            self._export = None  # from now on only the uploads that send it hold it
        if export.content is None:
            self.uploads.forget(export)  # so that the next request makes a new copy

    def _kept_average(self, peer_id: PeerID, step: int) -> Snapshot | None:
        batch = self._average_log.batch(step)
        if not batch or self.uploads.has_used_up(peer_id, batch[0].num_bytes):
            return None
        key = step, batch[-1].after
        if self._packed is not None and self._packed[0] == key:
            return self._packed[1]
        tensors = [tensor for average in batch for tensor in average.tensors]
        are_copied = len(tensors) > 1  # `pack` does not copy a single one
        if len(self._packing) >= MAX_PACKING or (are_copied and not self.uploads.make_room_for_averages()):
            return None  # peers ask for one average after the other and take none of them
        layout, data = pack(tensors)
        lineages = [average.after for average in batch]
        description = MSGPackSerializer.dumps(((step, batch[0].before, lineages), layout))
        ready = asyncio.ensure_future(in_thread(content_of, description, data.numpy()))
        self._packing.add(ready)
        ready.add_done_callback(self._packing.discard)
        self._packed = key, Snapshot(None, ready, step, batch[0].num_bytes, data.nbytes if are_copied else 0)
        return self._packed[1]

    def _note_taken(self, peer_id: PeerID) -> None:
        self._took_state[peer_id] = None
        self._took_state.move_to_end(peer_id)
        while len(self._took_state) > MAX_GROUP_SIZE:
            self._took_state.popitem(last=False)

    def _sweep_later(self) -> None:
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = asyncio.ensure_future(self._sweep())

    async def _sweep(self) -> None:
        """Drop finished and idle uploads again and again, as long as there are any."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._packed = None
            self.uploads.sweep()
            if not self.uploads.of:
                return
