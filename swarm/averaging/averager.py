"""The averager process: one flat vector, one round at a time, and the state for peers that join or fall behind."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing as mp
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import AsyncIterator  # noqa: UP035 (hivemind does not recognise the one of collections.abc)

import torch
from hivemind import DHT
from hivemind.compression import CompressionInfo
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, get_logger

from recipe.errors import InputError
from swarm.averaging.allreduce import ExactAllReduceRunner
from swarm.averaging.compression import Codec, ErrorFeedback
from swarm.averaging.matchmaking import Matchmaking
from swarm.averaging.send_window import SendWindow
from swarm.averaging.slow_members import SlowMembers
from swarm.averaging.striped_allreduce import StripedAllReduce, count_stripes
from swarm.membership.backoff import BlameBackoff
from swarm.membership.failure_detector import FailureDetector
from swarm.network.averager_process import tell_once
from swarm.network.stream_limits import limits_of
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.messages import (
    MAX_GROUP_SIZE,
    Blame,
    Group,
    Member,
    RoundEnded,
    RoundFailed,
    ShortBatch,
    Ticket,
    first_members,
)
from swarm.protocol.round_report import RoundReport
from swarm.runtime import fault_injection as faults
from swarm.runtime.async_utils import in_thread, until_caller_hangs_up
from swarm.runtime.pipes import use_whole_pipes
from swarm.runtime.processes import die_with_parent, forget, stay_small
from swarm.runtime.sockets import use_socket_folder
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts
from swarm.state_sync.state_server import StateServer

logger = get_logger(__name__)

SLOW_BYTES_PER_SECOND, MAX_VECTORS = 250_000.0, 16.0  # 2 Mbit/s: less is too slow; a hub of more has a faster line

StateProvider = Callable[[], tuple[dict, Sequence[torch.Tensor]]]


class SwarmAverager(StateServer):
    """Runs rounds over one flat fp32 vector in a process of its own. Its class name is part of the wire protocol.

    Of Hivemind's averager it keeps the process, the RPC plumbing and the streaming; meeting (:class:`Matchmaking`),
    averaging (:class:`ExactAllReduceRunner`) and the download of state (:class:`StateServer`) are its own.

    :param vector: shape [n], fp32, shared memory: what is averaged, in place
    :param namespace: run and recipe; peers of another one cannot reach this averager
    :param get_state: called in the trainer process when a peer asks for the state; returns (small metadata, tensors)
    :param target: a group with fewer samples disperses, and its members compute on; all members must have the same
    :param codec: how gradients travel; all members must have the same
    :param shapes: of the parameters whose gradients the vector begins with
    :param of_trainer: tensors that the trainer alone uses
    """

    def __init__(
        self,
        vector: torch.Tensor,
        dht: DHT,
        namespace: str,
        get_state: StateProvider,
        target: BatchTarget = BatchTarget(0),  # noqa: B008 (it is frozen)
        codec: Codec | None = None,
        shapes: Sequence[Sequence[int]] = (),
        of_trainer: Sequence[torch.Tensor] = (),
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
    ):
        codec, self._of_trainer = codec or Codec(), of_trainer
        self._get_state, self._batch_target, self._codec = get_state, target, codec.make()
        self._feedback = ErrorFeedback(self._codec, vector.numel())
        self._low_rank = codec.low_rank(shapes, vector.numel())
        self._dead_since: float | None = None
        self._windows: dict[PeerID, SendWindow] = {}
        self._slow_members, self._shunned = SlowMembers(), BlameBackoff()
        self._matchmaker: Matchmaking | None = None
        """Made in the averager process, where there is a connection to the network."""
        self._round_task: asyncio.Task | None = None
        self._kept_waiting = frozenset[PeerID]()
        self._blamed: dict[PeerID, Blame] = {}
        self._waiting_step = mp.Value("q", -1)
        self._company_until = mp.Value("d", 0.0)
        super().__init__(
            averaged_tensors=[vector],
            dht=dht,
            prefix=namespace,
            start=True,
            client_mode=dht.client_mode,
            sender_timeout=timeouts.stream_seconds,
            reducer_timeout=2 * timeouts.stream_seconds,
            shutdown_timeout=2,
            timeouts=timeouts,
        )

    # ---- in the trainer process -----------------------------------------------------------------------------------

    @property
    def vector(self) -> torch.Tensor:
        """The averaged vector, shape [n]; belongs to the trainer except while a round is running."""
        return self._averaged_tensors[0]

    @property
    def can_listen(self) -> bool:
        """Whether a member may come without weights; PowerSGD's memory goes with them."""
        return self._low_rank is None

    @property
    def waiting_step(self) -> int:
        """The step that somebody came to finish with us already, or -1."""
        return self._waiting_step.value

    @property
    def has_company(self) -> bool:
        """Whether somebody has just knocked or taken over our state, and will come to the next group."""
        return time.monotonic() < self._company_until.value

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """As Hivemind's, which makes the trainer deaf to Ctrl-C meanwhile; here only the averager process is."""
        use_whole_pipes(self)
        self.start()
        while await_ready and not self._ready.done():
            with contextlib.suppress(TimeoutError):
                self._ready.exception(timeout=0.5)
            if not self.is_alive():
                raise InputError("The averaging process died while it started: is there enough memory? Start again.")
        if await_ready:
            self.wait_until_ready(timeout)

    def longest_round_seconds(self, timeout_seconds: float, members: Sequence[Member]) -> float:
        """After which a round is given up: what a slow line needs for what a member sends, and receives."""
        members = [member for member in members if member.awaited]
        num_bytes = self._bytes_of_member(len(members), sum(not member.client_mode for member in members))
        return max(timeout_seconds, num_bytes / SLOW_BYTES_PER_SECOND)

    def _bytes_of_member(self, num_members: int, num_reducers: int) -> float:
        """What it sends in an exchange: (N + F - 2) / F vectors, if F of N can be called."""
        ratio = self._codec.estimate_compression_ratio(CompressionInfo.from_tensor(self.vector))
        vectors = (num_members + max(1, num_reducers) - 2) / max(1, num_reducers)
        return min(max(2.0, vectors), MAX_VECTORS) * ratio * 4 * self.vector.numel()

    def run_round(
        self,
        ticket: Ticket,
        members: Sequence[Member],
        patience_seconds: float,
        timeout_seconds: float,
        compute_seconds: float = 0.0,
    ):
        """Start a round in the background.

        :param patience_seconds: how long a leader waits for those who are missing
        :param timeout_seconds: after which it is given up
        :param compute_seconds: that this peer has computed for it; a member may be slow as long as that is slower
        :returns: a future of a :class:`RoundReport`; raises Behind, Refused, RoundFailed or ShortBatch
        """
        future = MPFuture()
        members = first_members(members, self.peer_id)
        arguments = [ticket, members, patience_seconds, timeout_seconds, compute_seconds, future]
        self._outer_pipe.send(("_run_round", arguments, {}))
        return future

    def expect(self, peer_ids: Collection[PeerID]) -> None:
        """Tell a leader that is waiting whom to wait for, as peers come and go."""
        self._outer_pipe.send(("_expect", [tuple(peer_ids)[:MAX_GROUP_SIZE]], {}))

    def set_step(self, step: int, lineage: bytes | None = None) -> None:
        """Tell those who knock which step this peer works on, and on which weights."""
        self._outer_pipe.send(("_set_step", [step, lineage], {}))

    def check_alive(self) -> None:
        """:raises InputError: the averager process has been dead for some time, and nobody has started it again"""
        if self.is_alive():
            self._dead_since = None
            return
        self._dead_since = self._dead_since or time.monotonic()
        if time.monotonic() - self._dead_since > self.timeouts.dead_seconds:
            raise InputError("The averaging process has died: is there enough memory? Start this peer again.")

    def cancel_round(self) -> None:
        """Give up the round that is running, if any."""
        self._outer_pipe.send(("_cancel_round", [], {}))

    # ---- in the averager process ----------------------------------------------------------------------------------

    def run(self):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        torch.set_num_threads(1)  # stripes work side by side as it is, and the trainer needs the cores
        use_socket_folder(self.dht.sockets)
        die_with_parent()
        stay_small()
        forget(self._of_trainer)
        super().run()

    async def add_p2p_handlers(self, *args, **kwargs):
        asyncio.get_running_loop().set_exception_handler(tell_once)
        await self._meetings().detector.answer()
        await super().add_p2p_handlers(*args, **kwargs)

    def _meetings(self) -> Matchmaking:
        if self._matchmaker is None:
            detector = FailureDetector(self._p2p, self.prefix, self.timeouts)
            self._matchmaker = Matchmaking(
                self._p2p,
                type(self),
                self.prefix,
                self.schema_hash,
                self._batch_target,
                detector,
                self._shunned,
                self.timeouts,
            )
        return self._matchmaker

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """Another peer wants to finish a step with us as its leader."""
        meetings = self._meetings()
        async for reply in meetings.serve(request, context):
            self._company_until.value = meetings.grace.open_until
            yield reply
            if reply.code == averaging_pb2.ACCEPTED and meetings.waits_for(meetings.step):
                self._waiting_step.value = meetings.step
        await until_caller_hangs_up()

    async def _set_step(self, step: int, lineage: bytes | None) -> None:
        meetings = self._meetings()
        meetings.set_step(step, lineage)
        self._state_changed()
        if meetings.waits_for(step):
            self._waiting_step.value = step
        if self.client_mode:  # Hivemind lets it answer nothing, but somebody may be connected
            await meetings.detector.answer()
            await self._answer_downloads()

    async def _expect(self, peer_ids: Sequence[PeerID]) -> None:
        self._meetings().expect(peer_ids)

    async def _cancel_round(self) -> None:
        self._meetings()
        if self._round_task is not None:
            self._round_task.cancel()

    async def _run_round(
        self,
        ticket: Ticket,
        members: Sequence[Member],
        patience: float,
        timeout: float,
        compute_seconds: float,
        future: MPFuture,
    ) -> None:
        meetings = self._meetings()
        self._round_task, self._kept_waiting = asyncio.current_task(), frozenset[PeerID]()
        self._blamed = {}
        self._pending_groups_registered.clear()
        try:
            report = await asyncio.wait_for(
                self._meet_and_exchange(meetings, ticket, members, patience, timeout, compute_seconds), timeout
            )
            if len(report.group.peer_ids) > 1:  # the vector holds the average by now: this round cannot fail any more
                await self._keep_average(ticket.step, report.group.lineage, report.group.group_id)
            future.set_result(report)
        except RoundEnded as ended:
            future.set_exception(ended.blames(self._blamed))
        except TimeoutError:
            late = RoundFailed(f"it took longer than {timeout:.0f} s", self._kept_waiting)
            future.set_exception(late.blames(self._blamed))
        except asyncio.CancelledError:
            future.set_exception(RoundFailed("it was given up").blames(self._blamed))
        except Exception as error:
            logger.debug("round failed", exc_info=True)
            future.set_exception(RoundFailed(f"{type(error).__name__}: {error}").blames(self._blamed))
        finally:
            if self._round_task is asyncio.current_task():  # else the next one has begun
                self._round_task = None
            self._pending_groups_registered.set()

    async def _meet_and_exchange(
        self,
        meetings: Matchmaking,
        ticket: Ticket,
        members: Sequence[Member],
        patience: float,
        timeout: float,
        compute_seconds: float,
    ) -> RoundReport:
        started = time.perf_counter()
        if self._low_rank is not None:
            ticket = replace(ticket, warm=self._low_rank.is_warm(ticket.lineage))
        faults.at("meeting", ticket.step)
        try:
            group = await meetings.meet(ticket, members, patience, asyncio.get_running_loop().time() + timeout)
        finally:
            self._blame(dict.fromkeys(meetings.stuck, Blame.STUCK))
        limits_of(self._p2p).met(group.peer_ids)
        faults.at("met", ticket.step)
        met, group = time.perf_counter(), group.bounded(self._batch_target)
        if not self._batch_target.is_reached_by(group.samples):
            self._waiting_step.value = -1  # those who waited compute on, too
            raise ShortBatch(group)
        if len(group.peer_ids) == 1:
            return RoundReport.of(group, blamed=self._blamed, meeting_seconds=met - started, exchange_seconds=0.0)
        if group.samples == 0:
            raise RoundFailed("nobody in the group had computed anything")
        stripes = self._stripes(group)
        try:
            async with stripes:
                await self._average(stripes, group)
        except BaseException as error:
            self._kept_waiting = stripes.kept_waiting | stripes.lost
            meetings.reopen()
            self._judge(stripes, group, time.perf_counter() - met, compute_seconds)
            if self._blamed and isinstance(error, Exception):
                raise RoundFailed(str(error), frozenset(stripes.lost)) from error
            raise
        exchange_seconds = time.perf_counter() - met
        if not stripes.lost:
            meetings.detector.exchange_took(exchange_seconds, group.peer_ids)
        meetings.met(group.peer_ids)
        self._judge(stripes, group, exchange_seconds, compute_seconds)
        return RoundReport.of(
            group,
            stripes.runners,
            lost=frozenset(stripes.lost),
            blamed=self._blamed,
            meeting_seconds=met - started,
            exchange_seconds=exchange_seconds,
        )

    def _judge(self, stripes: StripedAllReduce, group: Group, exchange_seconds: float, compute_seconds: float) -> None:
        """Who has spoilt this exchange, or held it up, is blamed."""
        others = [peer_id for peer_id in group.peer_ids if peer_id != self.peer_id]
        num_reducers = sum(not ticket.client_mode for ticket in group.tickets)
        num_bytes = self._bytes_of_member(len(group.peer_ids), num_reducers)
        slow = self._slow_members.note(others, stripes.waited_seconds, exchange_seconds, compute_seconds, num_bytes)
        self._blame(dict.fromkeys(slow, Blame.TOO_SLOW) | stripes.blamed)

    def _blame(self, blamed: Mapping[PeerID, Blame]) -> None:
        """These are not met again for a while, and this is why."""
        self._blamed |= blamed
        for peer_id, what in blamed.items():
            self._shunned.blame(peer_id, what)

    def _stripes(self, group: Group) -> StripedAllReduce:
        counts = [count_stripes(group, self.vector, self._codec)] if self._low_rank is None else [1, 1]
        others = [peer_id for peer_id in group.peer_ids if peer_id != self.peer_id]
        detector = self._meetings().detector
        return StripedAllReduce(group, counts, others, detector, self._register_allreduce_group, self._make_runner)

    def _windows_to(self, group: Group) -> dict[PeerID, SendWindow]:
        """How many parts may be on their way to each member; of others nothing is remembered."""
        self._windows = {peer_id: self._windows.get(peer_id) or SendWindow() for peer_id in group.peer_ids}
        return self._windows

    def _make_runner(
        self, group: Group, tensor: torch.Tensor, feedback: ErrorFeedback, stripes: int
    ) -> ExactAllReduceRunner:
        runner = ExactAllReduceRunner(
            group=group,
            tensor=tensor,
            feedback=feedback,
            stripes=stripes,
            detector=self._meetings().detector,
            windows=self._windows_to(group),
            p2p=self._p2p,
            servicer_type=type(self),
            prefix=self.prefix,
            compression=self._codec,
            sender_timeout=self.allreduce_kwargs["sender_timeout"],
            reducer_timeout=self.allreduce_kwargs["reducer_timeout"],
        )
        self._running_groups[group.group_id].set_result(runner)
        return runner

    async def _average(self, stripes: StripedAllReduce, group: Group) -> None:
        """The vector becomes the average of the group's; with PowerSGD after two passes."""
        low_rank = self._low_rank
        if low_rank is None:
            return await stripes.average(self.vector, self._feedback)
        samples = group.samples_of(self.peer_id)
        first = await in_thread(low_rank.begin, self.vector, samples, group)
        await stripes.average(first, ErrorFeedback(self._codec, len(first)))
        second = await in_thread(low_rank.go_on, first)
        await stripes.average(second, ErrorFeedback(self._codec, len(second)))
        self.vector.copy_(await in_thread(low_rank.finish, second, samples, group))

    def _handed_over_to(self, peer_id: PeerID) -> None:
        grace = self._meetings().grace
        grace.hold(peer_id)
        self._company_until.value = grace.open_until

    def _current_step(self) -> int:
        return self._meetings().step

    def _is_averaging(self) -> bool:
        return self._round_task is not None

    def _heard_from(self, peer_id: PeerID) -> None:
        self._meetings().detector.heard(peer_id)

    async def _until_lost(self, peer_id: PeerID) -> None:
        await self._meetings().detector.lost(peer_id, can_be_called=True)

    def _took_over(self) -> None:
        for memory in (self._feedback, self._low_rank):
            if memory is not None:
                memory.reset()
