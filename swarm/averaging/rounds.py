"""The rounds of one peer, one at a time: it meets other peers, averages a flat vector with them, and judges them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import multiprocessing as mp
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import AsyncIterator, NoReturn  # noqa: UP035 (hivemind does not recognise the one of collections.abc)

import torch
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_logger
from hivemind.utils.crypto import RSAPrivateKey

from swarm.averaging.allreduce import AllReduce
from swarm.averaging.audit.audits import Audits
from swarm.averaging.audit.evidence_call import ask_for, show_evidence
from swarm.averaging.audit.judge import Judge
from swarm.averaging.commands import RunRound
from swarm.averaging.compression.codec import Codec, bytes_of_member
from swarm.averaging.compression.error_feedback import ErrorFeedback
from swarm.averaging.compression.fragments import Fragments
from swarm.averaging.lines.division import fractions_of, shares_of
from swarm.averaging.lines.line_meter import LineMeter
from swarm.averaging.meeting.matchmaking import Matchmaking
from swarm.averaging.robust_mean import Combination
from swarm.averaging.running_groups import RunningGroups
from swarm.averaging.send_window import SendWindow
from swarm.averaging.shares import count_stripes
from swarm.averaging.slow_members import USUAL_MBPS, SlowMembers
from swarm.averaging.striped_allreduce import StripedAllReduce
from swarm.averaging.unsettled import Unsettled
from swarm.membership.backoff import BlameBackoff
from swarm.membership.failure_detector import FailureDetector
from swarm.network.peer_service import PeerService
from swarm.network.stream_limits import limits_of
from swarm.protocol.admission import OPEN, Admission
from swarm.protocol.auto_mode import Mode
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.messages import Blame, Group, RoundEnded, RoundFailed, ShortBatch, Ticket, WentBack
from swarm.protocol.round_report import RoundReport
from swarm.protocol.signed_lists import ORDERS
from swarm.protocol.work import Assignment, largest_micro_batch, places_in_vector
from swarm.runtime import fault_injection as faults
from swarm.runtime.async_utils import in_thread, until_caller_hangs_up
from swarm.runtime.bell import Bell
from swarm.runtime.line_use import LineUse
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts

logger = get_logger(__name__)


class RoundSignals:
    """What the trainer has to know at any time: numbers in shared memory, made before the averaging process starts."""

    def __init__(self) -> None:
        self.bell = Bell()
        """Rung when a peer has come to finish a step with this one, or a round has ended."""
        # The averaging process alone writes them: a lock would stay taken for good if it were killed within it.
        self._waiting_step = mp.Value("q", -1, lock=False)
        self._company_until = mp.Value("d", 0.0, lock=False)

    @property
    def waiting_step(self) -> int:
        """The step that a peer has already come to finish with this one, or -1."""
        return self._waiting_step.value

    @waiting_step.setter
    def waiting_step(self, step: int) -> None:
        self._waiting_step.value = step
        self.bell.ring()

    @property
    def has_company(self) -> bool:
        """Whether a peer will come to the next group, since it has just sent a join request or taken over the state."""
        return time.monotonic() < self._company_until.value

    def expect_company(self, until_seconds: float) -> None:
        """Note that a peer will come to the next group, until this time on the monotonic clock."""
        self._company_until.value = until_seconds


@dataclass
class Trouble:
    """What goes wrong in a round.

    Args:
        blamed: peers that have spoilt it or held it up, and what they did
        kept_waiting: members with parts that were missing when time was over
        group_id: name of the group, once it has begun to average
    """

    blamed: dict[PeerID, Blame] = field(default_factory=dict)
    kept_waiting: frozenset[PeerID] = frozenset()
    group_id: bytes = b""

    def told_by(self, error: RoundEnded) -> RoundEnded:
        """The error that tells the trainer of the round's end, with all this added."""
        error.group_id = self.group_id
        return error.blames(self.blamed)


@dataclass(frozen=True)
class AveragingOptions:
    """What the trainer and its averaging process agree on.

    Args:
        namespace: run and recipe; peers of another one cannot reach this peer
        vector: shape [n], fp32, shared memory: what is averaged, in place; belongs to the trainer except during a round
        fragments: how many numbers of the vector a round averages, from its beginning on; equal on all members
        target: the recipe's target, which counts until the organiser orders another one; each round brings its own
        codec: how gradients travel; all members must have the same
        rule: how reducers combine gradients; all members must have the same
        auto: whether a round's tickets name its codec and local steps; `codec` and `rule` are the first ones
        shapes: shapes of the parameters; the vector begins with their gradients
        line: what rounds and states may take of this peer's line
        timeouts: how long this peer waits for other peers
        admission: tells which peers may take part; the averaging process has its own copy
        ledger: file that is handed out to any peer that asks; None if this peer keeps none
        slowest_line_mbps: a member that sends as fast as this is never left out for being slow
    """

    namespace: str
    vector: torch.Tensor
    fragments: Fragments
    target: BatchTarget = field(default_factory=lambda: BatchTarget(0))
    codec: Codec = field(default_factory=Codec)
    rule: Combination = field(default_factory=Combination)
    auto: bool = False
    shapes: Sequence[Sequence[int]] = ()
    line: LineUse = field(default_factory=LineUse)
    timeouts: Timeouts = DEFAULT_TIMEOUTS
    admission: Admission = OPEN
    ledger: Path | None = None
    slowest_line_mbps: float = USUAL_MBPS

    @property
    def checks_averages(self) -> bool:
        """Whether averages are checked: only if they are clipped. Else a reducer could claim to have given anything."""
        return self.rule.clips

    def averaged_at(self, step: int) -> torch.Tensor:
        """The numbers of the vector that the update after this step averages: a view."""
        return self.vector[: self.fragments.size_at(step)]


class Rounds:
    """Runs one peer's rounds, one at a time; lives in its averaging process.

    Args:
        p2p: this peer's connection to the network
        key: this peer's private key, which signs what it sends where averages are checked
        options: what it averages, with which peers, and how
        signals: tell the trainer what it has to know of rounds
    """

    def __init__(self, p2p: P2P, key: RSAPrivateKey, options: AveragingOptions, signals: RoundSignals):
        self._p2p, self._options, self._signals = p2p, options, signals
        self._vector, self._target = options.averaged_at(0), options.target
        self._codec, self._rule, self._codec_name = options.codec.make(), options.rule, options.codec.name
        self._feedbacks = [ErrorFeedback(self._codec, size, options.codec.decay) for size in options.fragments.sizes]
        self._feedback, self._unsettled = self._feedbacks[0], Unsettled()
        self._low_rank = options.codec.low_rank(options.shapes, options.vector.numel())
        self._windows: dict[PeerID, SendWindow] = {}
        self._line_meter = LineMeter(options.line.most_kbps)
        self._slow_members, self._shunned = SlowMembers(options.slowest_line_mbps), BlameBackoff()
        self.detector = FailureDetector(p2p, options.namespace, options.timeouts, options.admission)
        self._matchmaking = Matchmaking(
            p2p,
            options.namespace,
            schema_hash(options.vector),
            options.target,
            self.detector,
            self._shunned,
            options.timeouts,
            options.admission,
        )
        options.admission.welcome = limits_of(p2p).met
        self._audits: Audits | None = None
        if options.checks_averages:
            judge = Judge(
                options.fragments.size_at,
                self._codec,
                options.rule,
                self._target_at,
                self._orders_at,
                options.auto,
                options.fragments.rest,
                options.namespace,
            )
            ask = partial(ask_for, p2p, options.namespace, options.line)
            largest = largest_micro_batch(options.target.samples)
            sizes = [math.prod(shape) for shape in options.shapes]
            self._audits = Audits(
                *(p2p.peer_id, key, judge, ask, self._shunned),
                largest=largest,
                places_of=partial(places_in_vector, sizes),
            )
        self.groups = RunningGroups()
        self._running: asyncio.Task | None = None
        self._is_keeping = False
        """Whether the vector holds the average of this round, which is being kept for other peers."""

    # ---- what other peers want to know ------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The step that this peer works on."""
        return self._matchmaking.lobby.step

    @property
    def is_averaging(self) -> bool:
        """Whether a round is under way."""
        return self._running is not None

    def _target_at(self, step: int) -> BatchTarget:
        """The target of the update after this step; the organiser may have changed it."""
        return BatchTarget(self._options.admission.lists.orders.target_batch_size(step, self._options.target.samples))

    def _orders_at(self, step: int) -> bytes:
        """The name, as in tickets, of the organiser's orders that count for the update after this step."""
        return self._options.admission.lists.orders.digest(step)

    def expect_joiner(self, peer_id: PeerID) -> None:
        """Hold the next group open for a joiner that now has the state of the present step."""
        grace = self._matchmaking.lobby.grace
        grace.hold(peer_id)
        self._signals.expect_company(grace.open_until)

    def took_over(self) -> None:
        """Forget what rounds have left out: this peer has other weights now, which it took over or went back to."""
        self._unsettled.forget()
        for memory in (*self._feedbacks, self._low_rank):
            if memory is not None:
                memory.reset()

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """Answer a peer that wants to finish a step with this one as its leader."""
        lobby = self._matchmaking.lobby
        async for reply in lobby.serve(request, context):
            self._signals.expect_company(lobby.grace.open_until)
            yield reply
            if reply.code == averaging_pb2.PROTOCOL_VIOLATION and not self._options.admission.is_open:
                return  # this frees the stream for a peer that may come
            if reply.code == averaging_pb2.ACCEPTED and self._matchmaking.waits_for(lobby.step):
                self._signals.waiting_step = lobby.step
        await until_caller_hangs_up()

    def rpc_show_evidence(
        self, requests: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Answer a member that checks an average, or a proof."""
        return show_evidence(self._audits, self._options.admission, self._options.line, requests, context)

    # ---- what the trainer wants -------------------------------------------------------------------------------------

    def followed(self, lineage: bytes) -> None:
        """Note that this peer has made an update after other peers, which gave weights of this lineage."""
        self._unsettled.holds(lineage)

    def set_step(self, step: int, lineage: bytes | None) -> None:
        """Note that this peer works on this step, with weights of this lineage."""
        self._unsettled.holds(lineage)
        self._matchmaking.lobby.set_step(step, lineage)
        if self._matchmaking.waits_for(step):
            self._signals.waiting_step = step

    def expect(self, peer_ids: Collection[PeerID]) -> None:
        """Change the peers that a leader waits for, as peers come and go."""
        self._matchmaking.expect(peer_ids)

    def turn_away_removed(self) -> None:
        """Turn away members that were removed from the run: they come to no further round; the one that runs goes on.

        From now on they share what strangers have of this peer's streams and memory. Else a member that let many
        others in, and was removed with all of them, would keep far more.
        """
        self._matchmaking.lobby.turn_away_removed()
        limits = limits_of(self._p2p)
        limits.forget(self._options.admission.removed(limits.known))

    def orders_changed(self) -> None:
        """Note that the organiser has ordered something: peers that meet have to follow the same orders."""
        self._matchmaking.lobby.orders_changed()

    async def compare_orders(self, peer: PeerID | None, ticket: Ticket) -> bytes:
        """All orders of the organiser, after a comparison with those of `peer`, if one is given."""
        if peer is not None:
            await self._matchmaking.knocker.compare_orders(peer, ticket)
        return self._options.admission.lists.signed(ORDERS)

    def cancel(self) -> None:
        """Give up the round that is running, if any; a round that already has its average does not fail by that."""
        if self._running is not None and not self._is_keeping:
            self._running.cancel()

    async def run(self, order: RunRound, keep: Callable[[Ticket, Group], Awaitable[None]]) -> None:
        """Run a round to its end, and set its future to the outcome.

        Args:
            keep: called when the vector holds the average of the round, before the trainer hears of it
        """
        self._running, trouble = asyncio.current_task(), Trouble()
        if not self._options.admission.is_open:  # all expected peers have shown a certificate
            limits_of(self._p2p).met(member.peer_id for member in order.members)
        timeout, future = order.timeout_seconds, order.future
        self._target = self._matchmaking.target = order.target
        self._matchmaking.knocker.left_out = order.left_out
        try:
            with self.groups.meeting():
                report = await asyncio.wait_for(self._meet_and_average(order, trouble), timeout)
            if len(report.group.peer_ids) > 1:  # the vector holds the average by now: this round cannot fail any more
                self._is_keeping = True
                try:
                    await keep(order.ticket, report.group)
                finally:
                    self._is_keeping = False
                report = replace(report, to_check=await self._to_check())
            future.set_result(report)
        except RoundEnded as ended:
            future.set_exception(trouble.told_by(ended))
        except TimeoutError:
            late = RoundFailed(f"it took longer than {timeout:.0f} s", trouble.kept_waiting)
            future.set_exception(trouble.told_by(late))
        except asyncio.CancelledError:
            future.set_exception(trouble.told_by(RoundFailed("it was given up")))
        except Exception as error:
            logger.debug("round failed", exc_info=True)
            future.set_exception(trouble.told_by(RoundFailed(f"{type(error).__name__}: {error}")))
        finally:
            if self._running is asyncio.current_task():  # else the next one has begun
                self._running = None

    async def _to_check(self) -> Assignment | None:
        """What this peer has to compute again; None if that goes wrong, since the round has its average."""
        try:
            return None if self._audits is None else await self._audits.work.assign()
        except asyncio.CancelledError:  # given up too late
            return None
        except Exception as error:
            logger.warning(f"What another member has computed cannot be checked: {error!r}")
            logger.debug("that audit", exc_info=True)
            return None

    async def _meet_and_average(self, order: RunRound, trouble: Trouble) -> RoundReport:
        started = time.perf_counter()
        ticket = self._prepare_ticket(order, trouble)
        closed = await self._meet(order, ticket, trouble)
        meeting_seconds = time.perf_counter() - started
        if closed.back_to is not None:
            await self._raise_went_back(closed, closed.back_to)
        bounded = self._accept_batch(closed, ticket)
        if len(bounded.peer_ids) == 1:
            return RoundReport.of(bounded, blamed=trouble.blamed, meeting_seconds=meeting_seconds, exchange_seconds=0.0)
        if bounded.samples == 0:
            raise RoundFailed("no member of the group had computed anything")
        stripes, exchange_seconds = await self._exchange(closed, bounded, order.compute_seconds, trouble)
        return RoundReport.of(
            bounded,
            stripes.runners,
            lost=frozenset(stripes.lost),
            blamed=trouble.blamed,
            judged=any(runner.parts_combined for runner in stripes.runners),
            outside=stripes.outside,
            codec=self._codec_name,
            local_steps=self._rule.local_steps,
            share=fractions_of(bounded)[self._p2p.peer_id],
            line_kbps=ticket.line_kbps,
            meeting_seconds=meeting_seconds,
            exchange_seconds=exchange_seconds,
        )

    def _prepare_ticket(self, order: RunRound, trouble: Trouble) -> Ticket:
        """The trainer's ticket, with what this process knows: its line, PowerSGD's memory, and other members' lies."""
        ticket = replace(order.ticket, line_kbps=self._line_meter.kbps)
        if self._low_rank is not None:
            ticket = replace(ticket, warm=self._low_rank.is_warm(ticket.lineage))
        if self._audits is not None:
            self._audits.work.take(order.work, ticket.step)
            self._blame(self._audits.found(), trouble)
            ticket = self._audits.annotate(ticket, order.sound)
        return ticket

    async def _meet(self, order: RunRound, ticket: Ticket, trouble: Trouble) -> Group:
        """The group as its leader has closed it."""
        faults.at("meeting", ticket.step)
        deadline = asyncio.get_running_loop().time() + order.timeout_seconds
        try:
            closed = await self._matchmaking.meet(ticket, order.members, order.patience_seconds, deadline)
        finally:
            self._blame(dict.fromkeys(self._matchmaking.knocker.stuck, Blame.STUCK), trouble)
        limits_of(self._p2p).met(closed.peer_ids)
        faults.at("met", ticket.step)
        return closed

    async def _raise_went_back(self, closed: Group, step: int) -> NoReturn:
        """End the round without an average: the group's members go back to the state of this step."""
        liars = frozenset() if self._audits is None else await self._audits.liars_since(step, closed)
        self._matchmaking.met(closed.peer_ids)
        raise WentBack(closed, step, liars)

    def _accept_batch(self, closed: Group, ticket: Ticket) -> Group:
        """Select the mode of this round; returns the group with no member counting for more than the target allows.

        Raises:
            ShortBatch: it has too few samples to end the step
        """
        if self._options.auto:
            self._average_in(closed.mode, ticket)
        bounded = closed.bounded(self._target)
        if not self._target.is_reached_by(bounded.samples):
            self._signals.waiting_step = -1  # the members that waited compute on, too
            self._matchmaking.lobby.reopen()  # its leader may have known another target than the group has
            raise ShortBatch(bounded)
        return bounded

    async def _exchange(
        self, closed: Group, bounded: Group, compute_seconds: float, trouble: Trouble
    ) -> tuple[StripedAllReduce, float]:
        """Replace the vector by the average of the group's vectors.

        Returns:
            the exchange that has ended, and how many seconds it took
        """
        self._come_to(bounded.step)
        trouble.group_id = bounded.group_id
        with self._audited(closed):
            self._line_meter.begin()
            started, stripes = time.perf_counter(), self._stripes(bounded)
            try:
                async with stripes:
                    await self._average(stripes, bounded)
            except BaseException as error:
                trouble.kept_waiting = stripes.kept_waiting | stripes.lost
                self._matchmaking.lobby.reopen()
                self._unsettled.failed(bounded.group_id, stripes.memories(self._low_rank))
                self._judge(stripes, bounded, time.perf_counter() - started, compute_seconds, trouble)
                if trouble.blamed and isinstance(error, Exception):
                    raise RoundFailed(str(error), frozenset(stripes.lost)) from error
                raise
            exchange_seconds = time.perf_counter() - started
        if not stripes.lost:
            self.detector.exchange_took(exchange_seconds, bounded.peer_ids)
        self._matchmaking.met(bounded.peer_ids)
        self._judge(stripes, bounded, exchange_seconds, compute_seconds, trouble)
        return stripes, exchange_seconds

    @contextlib.contextmanager
    def _audited(self, closed: Group) -> Iterator[None]:
        """Begin the audits of an exchange, and end them with it, where averages are checked."""
        has_average = False
        if self._audits is not None:
            self._audits.begin(closed)
        try:
            yield
            has_average = True
        finally:
            if self._audits is not None:
                self._audits.end(has_average)

    def _come_to(self, step: int) -> None:
        """Select the fragment that this step averages, and its error feedback."""
        self._unsettled.forget()
        fragments = self._options.fragments
        self._vector = self._options.averaged_at(step)
        self._feedback = self._feedbacks[step % fragments.number]
        self._feedback.come_to(fragments.turn_at(step))

    def _average_in(self, mode: Mode, ticket: Ticket) -> None:
        """Take the mode of this round from its group, whatever mode this peer's own ticket names."""
        self._target = self._target.in_mode(mode.local_steps, ticket.mode.local_steps)
        codec = Codec(mode.codec)
        self._codec, self._rule = codec.make(), replace(self._options.rule, local_steps=mode.local_steps)
        self._feedback.use(self._codec, codec.decay)
        self._codec_name = codec.name

    # ---- judging ----------------------------------------------------------------------------------------------------

    def _judge(
        self, stripes: StripedAllReduce, group: Group, exchange_seconds: float, compute_seconds: float, trouble: Trouble
    ) -> None:
        """Blame members that have spoilt this exchange or held it up, and measure this peer's own line."""
        others, num_members, shares = self._others(group), len(group.peer_ids), fractions_of(group)
        num_bytes = sum(runner.bytes_sent for runner in stripes.runners)
        # PowerSGD sends far fewer numbers than the vector has: a slow line would pass for a fast one.
        numbers = self._vector.numel() if self._low_rank is None else self._low_rank.numbers
        equal_bytes = bytes_of_member(numbers, self._codec, num_members, 1 / max(1, len(shares_of(group))))
        self._line_meter.end(num_bytes, exchange_seconds, num_members, equal_bytes, is_whole=not stripes.lost)
        to_send = {peer: bytes_of_member(numbers, self._codec, num_members, share) for peer, share in shares.items()}
        slow = self._slow_members.note(others, stripes.waited_seconds, exchange_seconds, compute_seconds, to_send)
        self._blame(dict.fromkeys(slow, Blame.TOO_SLOW) | stripes.blamed, trouble)

    def _blame(self, blamed: Mapping[PeerID, Blame], trouble: Trouble) -> None:
        """Leave these peers out for a while, and note why."""
        trouble.blamed |= blamed
        for peer_id, what in blamed.items():
            self._shunned.blame(peer_id, what)

    def _others(self, group: Group) -> list[PeerID]:
        return [peer_id for peer_id in group.peer_ids if peer_id != self._p2p.peer_id]

    # ---- averaging --------------------------------------------------------------------------------------------------

    def _stripes(self, group: Group) -> StripedAllReduce:
        counts = [count_stripes(group, self._vector, self._codec)] if self._low_rank is None else [1, 1]
        others = self._others(group)
        # How many parts may be on their way to each member; windows of other peers are forgotten.
        self._windows = {peer_id: self._windows.get(peer_id) or SendWindow() for peer_id in group.peer_ids}
        return StripedAllReduce(group, counts, others, self.detector, self.groups.registered, self._begin_all_reduce)

    def _begin_all_reduce(
        self, group: Group, part: torch.Tensor, num_buffers: int, feedback: ErrorFeedback, stripes: int
    ) -> AllReduce:
        all_reduce = AllReduce(
            me=self._p2p.peer_id,
            group=group,
            vector=part,
            num_buffers=num_buffers,
            feedback=feedback,
            codec=self._codec,
            rule=self._rule,
            stripes=stripes,
            detector=self.detector,
            windows=self._windows,
            stub_of=lambda peer_id: PeerService.get_stub(self._p2p, peer_id, namespace=self._options.namespace),
            line=self._options.line,
            stream_seconds=self._options.timeouts.stream_seconds,
            seals=self._audits and self._audits.seals_of(group),
            waits=self._line_meter.waits,
        )
        self.groups.begin(all_reduce)
        return all_reduce

    async def _average(self, stripes: StripedAllReduce, group: Group) -> None:
        """Replace the vector by the average of the group's vectors, with PowerSGD in two passes."""
        low_rank = self._low_rank
        if low_rank is None:
            return await stripes.average(self._vector, self._feedback, self._options.fragments.rest)
        samples = group.ticket_of(self._p2p.peer_id).samples
        first = await in_thread(low_rank.begin, self._vector, samples, group)
        await stripes.average(first, ErrorFeedback(self._codec, len(first)))
        second = await in_thread(low_rank.go_on, first)
        await stripes.average(second, ErrorFeedback(self._codec, len(second)))
        self._vector.copy_(await in_thread(low_rank.finish, second, group))


def schema_hash(vector: torch.Tensor) -> bytes:
    """A hash of a vector's type and shape: peers with different hashes cannot average with each other."""
    return hashlib.sha256(f"{vector.dtype} {tuple(vector.shape)}".encode()).digest()
