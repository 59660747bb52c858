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
from swarm.averaging.compression.codec import Codec, bytes_of_member
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
"""2 Mbit/s: less is too slow."""
LAST_READ_SECONDS = 2.0
"""For which others may read, from a peer that leaves, its share of a round that it has already."""

StateProvider = Callable[[], tuple[dict, Sequence[torch.Tensor]]]


class SwarmAverager:
    """Runs rounds over one flat fp32 vector, and takes over states, in a process of its own, from `start` on.

    Args:
        dht: this peer's
        options: what is averaged, with whom, and how
        get_state: called in a thread when a peer asks for the state; returns (small metadata, tensors)
        of_trainer: tensors that the trainer alone uses
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
        first = Codec() if options.auto else options.codec  # of those that may come, the one with most bytes
        self._codec = first.make()
        self._has_memory = options.codec.low_rank(options.shapes, self.vector.numel()) is not None
        self._dead_since: float | None = None
        self.signals = RoundSignals()
        """What rounds tell the trainer."""
        self.transfers = TransferStatus()
        """How far it is with states that are handed over."""
        self._process = WorkerProcess(
            dht,
            partial(AveragingService, options, dht.client_mode, dht.key, self.signals, self.transfers),
            lambda: state_to_send(*get_state()),
            partial(_prepare_process, dht.sockets, of_trainer),
        )

    # ---- rounds -----------------------------------------------------------------------------------------------------

    @property
    def can_listen(self) -> bool:
        """Whether a member may come without weights; PowerSGD's memory goes with them."""
        return not self._has_memory

    def longest_round_seconds(self, timeout_seconds: float, members: Sequence[Member]) -> float:
        """After which a round is given up: what a slow line needs for what a member sends, and receives."""
        members = [member for member in members if member.awaited]
        num_reducers = sum(not member.client_mode for member in members)
        num_bytes = bytes_of_member(self.vector, self._codec, len(members), 1 / max(1, num_reducers))
        return max(timeout_seconds, num_bytes / SLOW_BYTES_PER_SECOND)

    def run_round(self, order: RunRound) -> MPFuture:
        """Start a round in the background.

        Returns:
            the future of the order: of a `RoundReport`; raises another RoundEnded
        """
        order.future.add_done_callback(lambda _: self.signals.bell.ring())
        self._process.send(replace(order, members=first_members(order.members, self.peer_id)))
        return order.future

    def expect(self, peer_ids: Collection[PeerID]) -> None:
        """Tell a leader that is waiting whom to wait for, as peers come and go."""
        self._process.send(Expect(tuple(peer_ids)[:MAX_GROUP_SIZE]))

    def set_step(self, step: int, lineage: bytes | None = None) -> None:
        """Tell those who knock which step this peer works on, and on which weights."""
        self._process.send(SetStep(step, lineage))

    def followed(self, lineage: bytes) -> None:
        """This peer has made an update after others: it may be that of a round that failed here."""
        self._process.send(Followed(lineage))

    def set_admission(self, certificate: bytes, lists: Mapping[str, bytes]) -> None:
        """This peer shows another certificate from now on, or the organiser has signed newer lists."""
        self._process.send(SetAdmission(certificate, lists))

    def compare_orders(self, peer: PeerID | None, ticket: Ticket) -> MPFuture:
        """A future of the organiser's newest orders, as they were signed; arguments as of `CompareOrders`."""
        future = MPFuture()
        self._process.send(CompareOrders(peer, ticket, future))
        return future

    def cancel_round(self) -> None:
        """Give up the round that is running, if any."""
        self._process.send(CancelRound())

    # ---- states -----------------------------------------------------------------------------------------------------

    def download_state(self, donors: Sequence[PeerID], request: DownloadRequest) -> MPFuture:
        """Download the state in the background, or averages that others have kept; one download at a time.

        Args:
            donors: who may have it, the best first; where one is slow, others are tried beside it
            request: what is asked for

        Returns:
            a future of a `Downloaded`; raises `NoState`
        """
        future = MPFuture()
        self._process.send(DownloadState(tuple(donors), request, future))
        return future

    def took_over(self) -> None:
        """What was downloaded is in place of this peer's weights: what rounds of the old ones left out is forgotten."""
        self._process.send(TookOver())

    def cancel_download(self) -> None:
        """Nobody waits for it any more."""
        self._process.send(CancelDownload())

    def keep_average(self, step: int, before: bytes, after: bytes) -> None:
        """The vector holds the average of an update that this peer makes alone; after this it may be written again."""
        future, waited_seconds = MPFuture(), 0.0
        self._process.send(KeepAverage(step, before, after, future))
        while not future.done() and self.is_alive():
            wait_a_little(future)
            waited_seconds += POLL_SECONDS  # not by the clock: this process itself may stand still
            if waited_seconds > self.timeouts.hangs_seconds:
                self.kill()  # it is stopped: what it read later would be another vector

    # ---- the process ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the averaging process, and wait until it answers others.

        Raises:
            InputError: it died on the way
        """
        self._process.start_and_wait()

    @property
    def pid(self) -> int:
        """Of the averaging process."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether the averaging process runs."""
        return self._process.is_alive()

    def check_alive(self) -> None:
        """Raises InputError: the averaging process has been dead for some time, and nobody has started it again"""
        if self.is_alive():
            self._dead_since = None
            return
        self._dead_since = self._dead_since or time.monotonic()
        if time.monotonic() - self._dead_since > self.timeouts.dead_seconds:
            raise InputError("The averaging process has died: is there enough memory? Start this peer again.")

    def kill(self) -> None:
        """End the averaging process, which hangs."""
        self._process.kill()

    def shutdown(self) -> None:
        """Leave; whoever reads may go on for a moment: it needs our share of a round that we have."""
        if self.is_alive():
            future = MPFuture()
            with contextlib.suppress(TimeoutError, OSError):
                self._process.send(Finish(future))
                future.result(LAST_READ_SECONDS)
        self._process.stop()


def _prepare_process(sockets: str, of_trainer: Sequence[torch.Tensor]) -> None:
    """At the start of the averaging process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the trainer, which ends this process in its own time
    torch.set_num_threads(1)  # stripes work side by side as it is, and the trainer needs the cores
    use_socket_folder(sockets)
    die_with_parent()
    stay_small()
    forget(of_trainer)
