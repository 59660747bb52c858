"""A peer that claims to be ahead has to answer a call before it is believed.

A name costs a stranger nothing, and neither does a record of step 1,000,000. Asking its author for the state of that
step would keep this peer from training for seconds. A call in the background does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from hivemind import DHT
from hivemind.dht.node import DHTNode
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.proto import averaging_pb2
from hivemind.utils import get_logger

from swarm.membership.backoff import Backoff
from swarm.membership.failure_detector import FailureDetector
from swarm.membership.progress_record import JOINING, WAITING, PeerProgress
from swarm.protocol.admission import OPEN, Admission
from swarm.protocol.messages import MAX_GROUP_SIZE
from swarm.runtime.once import Once
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts

logger = get_logger(__name__)

MAX_CALLS = 8
"""Calls that run at the same time."""
MAX_THERE = 4 * MAX_GROUP_SIZE
"""Peers that are remembered as being there, the latest ones. There is a limit because names cost a stranger nothing."""


class Call:
    """Calls a peer's averaging process; True if it answers. Runs in the DHT process (`DHT.run_coroutine`).

    Args:
        namespace: run and recipe
        peer: the peer to call
        seconds: time limit of the call
        shown: the certificate that goes with the call; bytes, since a protobuf message cannot cross a pipe
    """

    def __init__(self, namespace: str, peer: PeerID, seconds: float, shown: bytes):
        self.namespace, self.peer, self.seconds, self.shown = namespace, peer, seconds, shown

    async def __call__(self, _dht: DHT, node: DHTNode) -> bool:
        stub = FailureDetector.get_stub(node.protocol.p2p, self.peer, namespace=self.namespace)
        try:
            await asyncio.wait_for(stub.rpc_here(averaging_pb2.DownloadData(metadata=self.shown)), self.seconds)
        except (TimeoutError, P2PDaemonError, P2PHandlerError, OSError):
            return False
        return True


class LivenessProbe:
    """Calls the peers that claim to be ahead, and tells which of them have not answered.

    Args:
        dht: a running DHT
        namespace: run and recipe
        on_answer: called from any thread when a call has ended, with or without an answer
        admission: supplies the certificate of this peer
    """

    def __init__(
        self,
        dht: DHT,
        namespace: str,
        on_answer: Callable[[], None],
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        admission: Admission = OPEN,
    ):
        self._dht, self._namespace, self._on_answer, self._timeouts = dht, namespace, on_answer, timeouts
        self._admission = admission
        self._there: dict[PeerID, None] = {}
        self._calls: dict[PeerID, Future] = {}
        self._silent = Backoff()
        self._complaints = Once()

    def met(self, peers: Iterable[PeerID]) -> None:
        """Note that these peers are there: they were in a group with this peer, or have answered it."""
        for peer in peers:
            self._there.pop(peer, None)
            self._there[peer] = None
        while len(self._there) > MAX_THERE:
            self._there.pop(next(iter(self._there)), None)

    def doubted(self, own: PeerProgress, others: dict[PeerID, PeerProgress], has_trained: bool) -> set[PeerID]:
        """Return the peers that claim to be ahead and have not answered yet.

        A peer that has not begun to train doubts none: following a false claim costs it nothing.
        """
        if own.phase in (JOINING, WAITING) and not has_trained:
            return set()
        return {peer for peer, record in others.items() if record.step > own.step and peer not in self._there}

    def silent(self, own: PeerProgress, others: dict[PeerID, PeerProgress], has_trained: bool) -> set[PeerID]:
        """Return the doubted peers that were called in vain a short time ago."""
        return {peer for peer in self.doubted(own, others, has_trained) if peer in self._silent}

    def check(self, own: PeerProgress, others: dict[PeerID, PeerProgress], has_trained: bool) -> None:
        """Call the doubted peers, at most `MAX_CALLS` at a time, and note the calls that have ended."""
        for peer in self.doubted(own, others, has_trained):
            if len(self._calls) < MAX_CALLS and peer not in self._calls and peer not in self._silent:
                self._calls[peer] = self._dht.run_coroutine(
                    Call(self._namespace, peer, self._timeouts.call_seconds, self._admission.show(b"")),
                    return_future=True,
                )
                self._calls[peer].add_done_callback(lambda _: self._on_answer())
        for peer, call in [*self._calls.items()]:
            if call.done():
                del self._calls[peer]
                if not call.cancelled() and call.exception() is None and call.result():
                    self.met([peer])
                else:
                    self._silent.add(peer)
                    self._complain_once(peer, others)

    def _complain_once(self, peer: PeerID, others: dict[PeerID, PeerProgress]) -> None:
        if peer in others and self._complaints.first(peer):
            name, step = others[peer].name, others[peer].step
            logger.warning(f"Ignoring {name}, which claims to be at step {step} and does not answer")
