"""Downloads the state of a swarm, or averages of its updates, from other peers: one download at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from hivemind.p2p import P2P, PeerID
from hivemind.proto.averaging_pb2 import DownloadData
from hivemind.utils import MPFuture, get_logger

from swarm.network.dht_bounds.decoding import loads
from swarm.protocol.admission import OPEN, Admission
from swarm.protocol.messages import RoundFailed
from swarm.runtime import fault_injection as faults
from swarm.runtime.async_utils import in_thread
from swarm.runtime.line_use import LineUse
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts
from swarm.state_sync.donor_race import DonorRace
from swarm.state_sync.download import Download, Downloaded, DownloadRequest, NoState
from swarm.state_sync.pull import OpenStream, Pull
from swarm.state_sync.transfer_status import TransferStatus

logger = get_logger(__name__)

MAX_VALUES = 2**18
"""Values in a description: enough for some 20,000 tensors, each with its shape and the name of its statistic."""

StreamTo = Callable[[PeerID], OpenStream]


class StateDownloader:
    """Downloads for the trainer. Runs in the averaging process.

    Args:
        stream_to: returns how to open a stream to a donor
        heard_from: called when a donor has sent something
        until_lost: waits until a peer is lost
        status: tells the trainer how far the download is
        line: counts what arrives
        admission: supplies the certificate of this peer
    """

    def __init__(
        self,
        stream_to: StreamTo,
        heard_from: Callable[[PeerID], None],
        until_lost: Callable[[PeerID], Awaitable[None]],
        status: TransferStatus,
        line: LineUse | None = None,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        admission: Admission = OPEN,
    ):
        self._admission = admission
        self._stream_to, self._heard_from, self._until_lost = stream_to, heard_from, until_lost
        self._status, self._line, self._timeouts = status, line or LineUse(), timeouts
        self._running: asyncio.Task | None = None
        self.broken: Download | None = None
        """The last download that failed and has useful pieces. It is dropped after `kept_seconds`."""
        self._dropping: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        """Cancel the running download, if there is one."""
        if self._running is not None:
            self._running.cancel()

    async def download(self, donors: Sequence[PeerID], request: DownloadRequest, future: MPFuture) -> None:
        """Download what is asked for, in place of the download that is under way.

        Args:
            donors: peers that may have it, the best first; if one is slow, others are tried beside it
            request: what is asked for
            future: becomes a `Downloaded`, or raises a `NoState`
        """
        self.cancel()
        self._running = asyncio.current_task()
        self._status.begin_download()
        try:
            downloads = [self._begin(donor, request) for donor in donors]
            race = DonorRace(downloads, self._pull, self._until_lost, self._timeouts)
            try:
                download = await race.run(self._status.look_at)
            except BaseException:
                self._keep_broken(race)
                raise
            future.set_result(await self._unpacked(download))
        except asyncio.CancelledError:
            future.set_exception(NoState({}, "it was given up"))
        except RoundFailed as error:
            future.set_exception(error)
        except Exception as error:
            logger.debug("state download failed", exc_info=True)
            future.set_exception(NoState({}, f"it could not be downloaded: {type(error).__name__}: {error}"))
        finally:
            if self._running is asyncio.current_task():
                self._running = None

    def _begin(self, donor: PeerID, request: DownloadRequest) -> Download:
        """A new download, or the broken one of this donor with what has arrived."""
        broken = self.broken
        if broken is None or (broken.donor, broken.request.average_of) != (donor, request.average_of):
            return Download(donor, request, self._timeouts)
        self._drop_broken()
        broken.request = replace(broken.request, is_awaited=request.is_awaited)
        broken.begin_again()
        return broken

    def _keep_broken(self, race: DonorRace) -> None:
        if race.broken:
            self._drop_broken()
            self.broken, loop = race.broken[-1], asyncio.get_running_loop()
            self._dropping = loop.call_later(self._timeouts.kept_seconds, self._drop_broken)

    def _drop_broken(self) -> None:
        if self._dropping is not None:
            self._dropping.cancel()
        self.broken = self._dropping = None

    def _pull(self, download: Download) -> Pull:
        donor = download.donor

        def on_message(message: DownloadData) -> None:
            self._line.receive(message.ByteSize())
            self._heard_from(donor)
            faults.at("taking state")

        return Pull(download, self._stream_to(donor), on_message, self._admission.show)

    async def _unpacked(self, download: Download) -> Downloaded:
        donor = download.donor
        try:
            description, layout = await in_thread(loads, download.offer.description, MAX_VALUES)
        except Exception as error:
            raise NoState({donor: f"it did not send its state: {error!r}"}) from error
        try:  # here, since a failure on the way to the trainer would leave it waiting for ever
            content = await in_thread(download.content.share_memory_)
        except RuntimeError as error:
            raise NoState({}, "there is no room for the state in shared memory: make /dev/shm larger") from error
        return Downloaded(donor, description, layout, content)


def streams_of(p2p: P2P, handle_name: str) -> StreamTo:
    """Return a function that gives, for a peer, a way to open a stream to its handler of this name."""

    def stream_to(peer_id: PeerID) -> OpenStream:
        async def open_stream() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            _, reader, writer = await p2p.call_binary_stream_handler(peer_id, handle_name)
            return reader, writer

        return open_stream

    return stream_to
