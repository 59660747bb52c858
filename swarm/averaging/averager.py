"""The trainer's side of averaging: one flat vector, one round at a time, in a process beside the trainer."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from hivemind import DHT
from hivemind.p2p import PeerID
from hivemind.utils import MPFuture

from recipe.errors import InputError
from swarm.averaging.commands import (
    CancelDownload,
    CancelRound,
    CompareOrders,
    DownloadState,
    Expect,
    Finish,
    Followed,
    KeepAverage,
    RunRound,
    SetAdmission,
    SetStep,
    TookOver,
)
from swarm.averaging.compression.codec import Codec, bytes_to_allow_for
from swarm.averaging.rounds import AveragingOptions, RoundSignals
from swarm.averaging.service import AveragingService
from swarm.network.hivemind_internals import use_socket_folder
from swarm.protocol.messages import MAX_GROUP_SIZE, Member, Ticket, first_members
from swarm.runtime.async_utils import POLL_SECONDS, wait_a_little
from swarm.runtime.processes import die_with_parent, forget, stay_small
from swarm.runtime.worker_process import WorkerProcess
from swarm.state_sync.download import DownloadRequest
from swarm.state_sync.state_server import state_to_send
from swarm.state_sync.transfer_status import TransferStatus

SLOW_BYTES_PER_SECOND = 250_000.0
"""2 Mbit/s: rounds are not made longer for slower lines."""
LAST_READ_SECONDS = 2.0
"""Seconds for which a peer that leaves waits for members that still read its share of a round that it has finished."""

StateProvider = Callable[[], tuple[dict, Sequence[torch.Tensor]]]


class SwarmAverager:
    """Runs rounds over one flat fp32 vector, and takes over states, in a process of its own, from `start` on.

    Args:
        dht: this peer's DHT node
        options: what is averaged, with which peers, and how
        get_state: called in a thread when a peer asks for the state; returns (small metadata, tensors)
        of_trainer: tensors that the trainer alone uses; the averaging process drops them
    """

    def __init__(
        self,
        dht: DHT,
        options: AveragingOptions,
        get_state: StateProvider,
        of_trainer: Sequence[torch.Tensor] = (),
    ):
        self.vector, self.line, self.timeouts = options.vector.share_memory_(), options.line, options.timeouts
        self.peer_id, self.client_mode = dht.peer_id, dht.client_mode
        first = Codec() if options.auto else options.codec  # with `auto`, the codec of most bytes
        self._codec = first.make()
        self._has_memory = options.codec.low_rank(options.shapes, self.vector.numel()) is not None
        self._dead_since: float | None = None
        self.signals = RoundSignals()
        """What rounds tell the trainer."""
        self.transfers = TransferStatus()
        """How far transfers of states are."""
        self._process = WorkerProcess(
            dht,
            partial(AveragingService, options, dht.client_mode, dht.key, self.signals, self.transfers),
            lambda: state_to_send(*get_state()),
            partial(_prepare_process, dht.sockets, of_trainer),
        )

    # ---- rounds -----------------------------------------------------------------------------------------------------

    @property
    def can_listen(self) -> bool:
        """Whether a member may come without weights: not with PowerSGD, which needs a memory that belongs to them."""
        return not self._has_memory

    def longest_round_seconds(self, timeout_seconds: float, members: Sequence[Member]) -> float:
        """Seconds after which a round is given up: at least those that a slow line needs for a member's bytes."""
        members = [member for member in members if member.awaited]
        num_reducers = sum(not member.client_mode for member in members)
        num_bytes = bytes_to_allow_for(self.vector.numel(), self._codec, len(members), 1 / max(1, num_reducers))
        return max(timeout_seconds, num_bytes / SLOW_BYTES_PER_SECOND)

    def run_round(self, order: RunRound) -> MPFuture:
        """Start a round in the background.

        Returns:
            the order's future, of a `RoundReport`; raises a `RoundEnded` if the round gives no average
        """
        order.future.add_done_callback(lambda _: self.signals.bell.ring())
        self._process.send(replace(order, members=first_members(order.members, self.peer_id)))
        return order.future

    def expect(self, peer_ids: Collection[PeerID]) -> None:
        """Change the peers that a waiting leader waits for, as peers come and go."""
        self._process.send(Expect(tuple(peer_ids)[:MAX_GROUP_SIZE]))

    def set_step(self, step: int, lineage: bytes | None = None) -> None:
        """Note which step this peer works on, and on which weights: peers that send join requests are told."""
        self._process.send(SetStep(step, lineage))

    def followed(self, lineage: bytes) -> None:
        """Note that this peer has made an update after other peers: it may be that of a round that failed here."""
        self._process.send(Followed(lineage))

    def set_admission(self, certificate: bytes, lists: Mapping[str, bytes]) -> None:
        """Take over the certificate that this peer shows from now on, and the lists that the organiser has signed."""
        self._process.send(SetAdmission(certificate, lists))

    def compare_orders(self, peer: PeerID | None, ticket: Ticket) -> MPFuture:
        """Compare orders (see `CompareOrders`); returns a future of the organiser's newest ones, as signed."""
        future = MPFuture()
        self._process.send(CompareOrders(peer, ticket, future))
        return future

    def cancel_round(self) -> None:
        """Give up the round that is running, if any."""
        self._process.send(CancelRound())

    # ---- states -----------------------------------------------------------------------------------------------------

    def download_state(self, donors: Sequence[PeerID], request: DownloadRequest) -> MPFuture:
        """Download the state in the background, or averages that other peers have kept; one download at a time.

        Args:
            donors: peers that may have it, the best first; if one is slow, others are tried beside it
            request: what is asked for

        Returns:
            a future of a `Downloaded`; it raises `NoState` if no donor hands it over
        """
        future = MPFuture()
        self._process.send(DownloadState(tuple(donors), request, future))
        return future

    def took_over(self) -> None:
        """Forget what rounds left out: other weights have replaced those that this was about."""
        self._process.send(TookOver())

    def cancel_download(self) -> None:
        """Give up the download that is running, if any."""
        self._process.send(CancelDownload())

    def keep_average(self, step: int, before: bytes, after: bytes) -> None:
        """Keep a copy of the vector, which holds the average of an update that this peer makes alone.

        Afterwards the vector may be written again.
        """
        future, waited_seconds = MPFuture(), 0.0
        self._process.send(KeepAverage(step, before, after, future))
        while not future.done() and self.is_alive():
            wait_a_little(future)
            waited_seconds += POLL_SECONDS  # in polls, not by the clock: this process itself may stand still
            if waited_seconds > self.timeouts.hangs_seconds:
                self.kill()  # it stands still: later it would read another vector

    # ---- the process ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the averaging process, and wait until it answers others.

        Raises:
            InputError: it died on the way
        """
        self._process.start_and_wait()

    @property
    def pid(self) -> int:
        """Process id of the averaging process."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether the averaging process runs."""
        return self._process.is_alive()

    def check_alive(self) -> None:
        """Check that the averaging process lives.

        Raises:
            InputError: it has been dead for some time, and was not started again
        """
        if self.is_alive():
            self._dead_since = None
            return
        self._dead_since = self._dead_since or time.monotonic()
        if time.monotonic() - self._dead_since > self.timeouts.dead_seconds:
            raise InputError("The averaging process has died: is there enough memory? Start this peer again.")

    def kill(self) -> None:
        """Kill the averaging process, which hangs."""
        self._process.kill()

    def shutdown(self) -> None:
        """Leave; members that still read this peer's share of a finished round have a moment to read the rest."""
        if self.is_alive():
            future = MPFuture()
            with contextlib.suppress(TimeoutError, OSError):
                self._process.send(Finish(future))
                future.result(LAST_READ_SECONDS)
        self._process.stop()


def _prepare_process(sockets: str, of_trainer: Sequence[torch.Tensor]) -> None:
    """Set the averaging process up, at its start."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the trainer, which ends this process in its own time
    torch.set_num_threads(1)  # stripes work side by side anyway, and the trainer needs the cores
    use_socket_folder(sockets)
    die_with_parent()
    stay_small()
    forget(of_trainer)
