"""Finds out whether the peers that a round waits for are still there: a silent peer is called, then given up.

How long a round takes tells little: on a slow link or a busy machine, healthy peers take long, too. But as long as
their averaging processes live, they answer a call at once or send parts. So a killed peer is given up after about a
second, since nothing listens at its address any more. A peer that is frozen or cut off is given up after some seconds
of silence, however long other peers may take. Only an exchange that takes much longer than the earlier ones with the
same peers shows that a line has broken down.
"""

from __future__ import annotations

import asyncio
import functools
import math
import statistics
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.servicer import ServicerBase
from hivemind.proto import averaging_pb2
from hivemind.utils import get_logger

from swarm.protocol.admission import OPEN, Admission
from swarm.protocol.certificates import EVERYTHING
from swarm.protocol.messages import MAX_GROUP_SIZE
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts

logger = get_logger(__name__)

MAX_REFUSALS = 2
"""Calls in a row that have to be refused before a peer is given up."""
MAX_HEARD = 4 * MAX_GROUP_SIZE
"""Peers with a remembered sign of life, the latest ones. There is a limit because names cost a stranger nothing."""
MAX_NEVER_CALL = MAX_GROUP_SIZE
"""Peers of which it is remembered that they sent nothing in a whole round, the latest ones."""


def question(admission: Admission) -> averaging_pb2.DownloadData:
    """The request of `FailureDetector.rpc_here`: it carries only this peer's certificate."""
    return averaging_pb2.DownloadData(metadata=admission.show(b""))


class PeerMonitor:
    """Watches the peers that a meeting may wait for, each of them once, and notes the ones that are lost.

    Args:
        detector: calls the peers
        on_loss: called when a peer is lost
    """

    def __init__(self, detector: FailureDetector, on_loss: Callable[[], None]):
        self._detector, self._on_loss = detector, on_loss
        self._watches: dict[PeerID, asyncio.Future] = {}
        self.lost: set[PeerID] = set()

    def watch(self, peer: PeerID, can_be_called: bool) -> asyncio.Future:
        """Watch a peer from now on. The returned future is done when the peer is lost."""
        if peer not in self._watches:
            watch = asyncio.ensure_future(self._detector.lost(peer, can_be_called))
            watch.add_done_callback(functools.partial(self._note, peer))
            self._watches[peer] = watch
        return self._watches[peer]

    def _note(self, peer: PeerID, watch: asyncio.Future) -> None:
        if self._watches.get(peer) is watch and not watch.cancelled() and watch.exception() is None:
            self.lost.add(peer)
            self._on_loss()

    def came(self, peer: PeerID) -> None:
        """Note that a peer is there after all."""
        self.lost.discard(peer)
        if peer in self._watches and self._watches[peer].done():
            del self._watches[peer]

    def end(self) -> None:
        """Stop watching all peers. Lost peers stay in `lost` until `begin`."""
        for watch in self._watches.values():
            watch.cancel()
        self._watches = {}

    def begin(self) -> None:
        """Begin another meeting, to which every peer may come."""
        self.lost = set()


class FailureDetector(ServicerBase):
    """Calls other peers, and answers their calls. Its class name is part of the wire protocol.

    Args:
        p2p: this peer's connection to the network
        namespace: run and recipe
        admission: decides which peers may call
    """

    def __init__(self, p2p: P2P, namespace: str, timeouts: Timeouts = DEFAULT_TIMEOUTS, admission: Admission = OPEN):
        self._p2p, self._namespace, self.timeouts, self._admission = p2p, namespace, timeouts, admission
        self._answers: asyncio.Task | None = None
        self._signs: dict[PeerID, int] = {}
        self._num_heard = 0
        self._doubted: set[PeerID] = set()
        self._usual: deque[float] = deque(maxlen=9)
        self._in_time: set[PeerID] = set()
        self._never_call: dict[PeerID, None] = {}

    async def answer(self) -> None:
        """Answer calls from now on. A client-mode peer answers over connections that it has made itself."""
        if self._answers is None:
            self._answers = asyncio.ensure_future(self.add_p2p_handlers(self._p2p, namespace=self._namespace))
        await self._answers

    async def rpc_here(self, request: averaging_pb2.DownloadData, context: P2PContext) -> averaging_pb2.DownloadData:
        """Answer with an empty message: the answer itself is the sign of life."""
        self._admission.admit(request.metadata, context.remote_id, EVERYTHING)
        return averaging_pb2.DownloadData()

    def heard(self, peer: PeerID) -> None:
        """Note a sign of life: the peer has sent something."""
        self._num_heard += 1
        self._signs.pop(peer, None)
        self._signs[peer] = self._num_heard
        if len(self._signs) > MAX_HEARD:
            del self._signs[next(iter(self._signs))]
        self._doubted.discard(peer)

    def called(self, peer: PeerID) -> None:
        """Note that the peer sends to this one in a round."""
        self._never_call.pop(peer, None)

    def did_not_call(self, peer: PeerID) -> None:
        """Note that the peer has sent nothing to this one in a whole round."""
        self._never_call.pop(peer, None)
        self._never_call[peer] = None
        if len(self._never_call) > MAX_NEVER_CALL:
            del self._never_call[next(iter(self._never_call))]

    def never_calls(self, peer: PeerID) -> bool:
        """Whether the peer sent nothing to this one in their last round: the two may not reach each other."""
        return peer in self._never_call

    def doubts(self, peer: PeerID) -> bool:
        """Whether the peer is watched, and has not answered a call for a while. It may still answer."""
        return peer in self._doubted

    def exchange_took(self, seconds: float, peers: Collection[PeerID]) -> None:
        """Learn how long an exchange with these peers usually takes.

        If it was late, none of them counts as in time. A slow line may be late again and again, until that is usual.
        """
        self._in_time = set(peers) if seconds <= self.late_seconds else set()
        self._usual.append(seconds)

    @property
    def usual_seconds(self) -> float:
        """Median time of the latest exchanges in seconds; 0 before the first one."""
        return statistics.median(self._usual) if self._usual else 0.0

    def was_in_time(self, peer: PeerID) -> bool:
        """Whether the peer took part in the last exchange, and that was not late."""
        return peer in self._in_time

    @property
    def late_seconds(self) -> float:
        """Seconds after which an exchange is late; infinite before the first exchange."""
        return max(self.timeouts.late_seconds, 3 * self.usual_seconds) if self._usual else math.inf

    def gave_up(self, peer: PeerID) -> None:
        """Treat a peer as a newcomer when it comes back: its line may be slower than it was."""
        self._in_time.discard(peer)

    async def until_late(self, share: float = 1.0) -> None:
        """Wait until an exchange that begins now is late, or for a share of that time."""
        waited_seconds = 0.0  # in looks, not by the clock: while this process itself stands still, it hears no peer
        while waited_seconds < share * self.late_seconds:
            await asyncio.sleep(self.timeouts.look_seconds)
            waited_seconds += self.timeouts.look_seconds

    @property
    def patience_seconds(self) -> float:
        """Seconds of complete silence after which a called peer is given up."""
        if not self._usual:
            return self.timeouts.first_silence_seconds
        return max(self.timeouts.silence_seconds, min(2 * self.usual_seconds, self.timeouts.longest_silence_seconds))

    async def lost(self, peer: PeerID, can_be_called: bool) -> None:
        """Wait until the peer is lost.

        Args:
            peer: the peer
            can_be_called: whether it can be dialled; if not, a call that does not get through is no sign of a loss
        """
        refusals, signs = 0, self._signs.get(peer, 0)
        self._doubted.discard(peer)
        try:
            while refusals < MAX_REFUSALS:
                await asyncio.sleep(self.timeouts.look_seconds)
                if signs != (signs := self._signs.get(peer, 0)):
                    refusals = 0
                    continue
                try:
                    if not await self._answers_in_time(peer):
                        break
                    refusals = 0
                except Exception as error:  # also a peer whose answer cannot be read
                    logger.debug(f"{peer} cannot be called: {error!r}")
                    refusals += can_be_called
        finally:
            self._doubted.discard(peer)  # else the names of peers that never come back would add up
        logger.debug(f"{peer} is not there any more")

    async def _answers_in_time(self, peer: PeerID) -> bool:
        """Whether the peer answers, or sends anything, within `patience_seconds`."""
        stub = self.get_stub(self._p2p, peer, namespace=self._namespace)
        call: asyncio.Future[Any] = asyncio.ensure_future(stub.rpc_here(question(self._admission)))
        signs, silent_seconds = self._signs.get(peer, 0), 0.0
        try:
            # Counted in looks, not by the clock: while this process itself stands still, it hears no peer.
            while silent_seconds < self.patience_seconds:
                if (await asyncio.wait([call], timeout=self.timeouts.look_seconds))[0]:
                    call.result()
                    self._doubted.discard(peer)
                    return True
                if self._signs.get(peer, 0) != signs:
                    return True
                silent_seconds += self.timeouts.look_seconds
                if silent_seconds >= self.timeouts.doubt_seconds:
                    self._doubted.add(peer)
            return False
        finally:
            call.cancel()
