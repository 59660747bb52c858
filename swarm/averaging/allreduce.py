"""Exact all-reduce: one member combines and encodes each share of the vector, and all decode the same message.

Hivemind's all-reduce answers every sender with the difference to *its* tensor, so after a few updates no two peers hold
the same bits. Here a reducer encodes the average once, and all members, the reducer included, decode that one message.
So all hold the same bits after the round, with any codec. No second round is needed to bring the parameters back
together.

With a codec that rounds, what rounding leaves out on the way to a reducer and on the way back is not lost. A sender
adds it to its contribution to the next round, a reducer to the next mean (`ErrorFeedback`).

Weights come from the tickets that the whole group has seen, not from the sender's own messages. A rule combines what
members send (`robust_mean`). A sender of parts that are not finite, are far too large or have another shape is banned
from the exchange. Senders of such parts or averages are named (`blamed`). Where averages are checked, members
sign what they send (`audit`). Only some parts are on their way at once (`send_window`). A member can be given up at any
time (`striped_allreduce`). A reducer keeps its stream open until the sender has read all results and hangs up
(`until_caller_hangs_up`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
from hivemind.compression import CompressionBase
from hivemind.p2p import P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.p2p.servicer import StubBase
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import get_logger
from hivemind.utils.asyncio import aiter_with_timeout, amap_in_executor, as_aiter

from swarm.averaging.audit.given_work import is_compared
from swarm.averaging.audit.judge import is_faithful
from swarm.averaging.audit.seals import Seals
from swarm.averaging.audit.statements import hash_of
from swarm.averaging.compression.error_feedback import ErrorFeedback
from swarm.averaging.lines.line_meter import Waits
from swarm.averaging.robust_mean import Combination
from swarm.averaging.send_window import PartsOnTheWay, SendWindow
from swarm.averaging.shares import Part, PartReducer, decode, partition
from swarm.membership.failure_detector import FailureDetector
from swarm.protocol.messages import Blame, ExchangeBroken, Group, RoundFailed
from swarm.runtime import fault_injection as faults
from swarm.runtime.async_utils import in_thread, until_caller_hangs_up
from swarm.runtime.line_use import LineUse

logger = get_logger(__name__)

DIAL_AGAIN_SECONDS = 0.2
"""Seconds between two attempts to open a stream to a reducer."""
LATE_SECONDS = 0.005
"""A part that comes no later than this, after it is awaited, counts as one that no member has waited for."""
MAX_HEADER_BYTES = 128
"""Most bytes of a message besides the encoded numbers; honest peers' messages have fewer than 64."""


@dataclass(frozen=True)
class ArrivedPart:
    """A part or an average that has come.

    Args:
        numbers: the decoded numbers; None if no honest peer sends them
        num_bytes: size of its message
        tensor: the encoded numbers
        hash: hash of `tensor`, where averages are checked
        waited: for an average, whether its reducer waited for this peer's part
    """

    numbers: torch.Tensor | None
    num_bytes: int
    tensor: runtime_pb2.Tensor
    hash: bytes = b""
    waited: bool = False


class AllReduce:
    """Runs one peer's side of one stripe of a round over one closed `Group`.

    Args:
        me: this peer
        group: the closed group; its tickets give the weights and say which members can reduce
        vector: this peer's contribution, shape [n], fp32
        num_buffers: numbers at the vector's end that are buffers of the model
        feedback: what earlier rounds have left out
        codec: how numbers travel
        rule: how a reducer combines the parts of all members
        stripes: how many stripes run side by side
        detector: is told which members were heard
        windows: for each reducer, how many parts may be on their way to it
        stub_of: gives the stub with the `rpc_aggregate_part` of another peer
        line: delays what this peer sends until its turn comes, and counts bytes
        stream_seconds: a member that sends nothing for so long is given up, a reducer after twice that
        seals: what this peer signs and checks; None where averages are not checked
        waits: counts how often reducers wait for each member's parts
    """

    def __init__(
        self,
        *,
        me: PeerID,
        group: Group,
        vector: torch.Tensor,
        num_buffers: int,
        feedback: ErrorFeedback,
        codec: CompressionBase,
        rule: Combination,
        stripes: int,
        detector: FailureDetector,
        windows: Mapping[PeerID, SendWindow],
        stub_of: Callable[[PeerID], StubBase],
        line: LineUse,
        stream_seconds: float,
        seals: Seals | None = None,
        waits: Waits | None = None,
    ):
        self.me, self.group = me, group
        samples = [float(ticket.samples) for ticket in group.tickets]
        self.weights = dict(zip(group.peer_ids, rule.weights(samples), strict=True))
        self.parts_received = self.inputs_received = self.bytes_sent = self.bytes_received = 0
        self.blamed: dict[PeerID, Blame] = {}
        """Members that have sent what no honest peer sends, and what that was."""
        self._feedback, self.codec, self._detector, self._seals = feedback, codec, detector, seals
        self.stub_of, self._line, self._stream_seconds = stub_of, line, stream_seconds
        self._waits = waits or Waits()
        self._on_the_way = {peer: PartsOnTheWay(window, stripes) for peer, window in windows.items()}
        self._parts = partition(vector, group, stripes, codec, seals is not None, num_buffers)
        self._average = torch.empty_like(vector)
        """Shape [n], fp32: the parts of the average that have come, each in its place."""
        self._num_averages: Counter[PeerID] = Counter()
        """How many averages have come from each reducer, in the order of its parts."""
        self._num_given: Counter[PeerID] = Counter()
        """How many parts of this peer have left for each other reducer."""
        self._own_parts = self._parts.get(me, [])
        parts = [part for parts in self._parts.values() for part in parts]
        self._largest_part = max((len(part.numbers) for part in parts), default=0)
        rules = [rule.for_buffers if part.is_of_buffers else rule for part in self._own_parts]
        self._reducer = PartReducer(rules, group.peer_ids, dict(zip(group.peer_ids, samples, strict=True)))
        self._encoded: dict[int, asyncio.Future[runtime_pb2.Tensor]] = {}
        self._left_out: dict[int, torch.Tensor] = {}
        self._lost: set[PeerID] = set()
        self._failed: set[PeerID] = set()
        """Reducers that have ended their streams: nothing more comes from them."""
        self._talks: dict[PeerID, asyncio.Task] = {}
        """The task for each reducer: it sends this peer's parts and takes the averages."""
        self._callers: dict[PeerID, asyncio.Task | None] = {}
        """The task in which each member sends to this reducer; None for a lost member that never called."""
        self._all_called = asyncio.Event()
        self.is_over = False
        """Whether this peer has all averages, or does not need them any more."""
        self.has_served = False
        """Whether some member has got all averages of this peer's share."""

    # ---- for its caller ---------------------------------------------------------------------------------------------

    @property
    def parts_expected(self) -> int:
        """Parts of the average that reducers have to send to this peer, itself included."""
        return sum(map(len, self._parts.values()))

    @property
    def inputs_expected(self) -> int:
        """Parts of members' contributions that this peer has to average, its own included."""
        return len(self._own_parts) * len(self.group.peer_ids)

    def add_left_out(self) -> None:
        """Add what earlier rounds left out of this peer's contributions; called before anything is sent.

        It adds nothing where reducers compare what this peer sends with what it says it has computed. There it would
        look like a lie, and what is left out is small.
        """
        own = self.group.ticket_of(self.me)
        if self._seals is not None and own.work and is_compared(self.codec):
            return
        for reducer, parts in self._parts.items():
            for part in parts if reducer != self.me else ():
                if not part.is_seal:
                    self._feedback.add_to(part.numbers, part.info, part.offset, self.weights[self.me])

    def keep_left_out(self) -> None:
        """Keep what averages left out for the next ones; called when the round has succeeded, here or elsewhere."""
        for part_index, left_out in self._left_out.items():
            self._feedback.keep(left_out, self._own_parts[part_index].offset, self._weight_of_all)

    @property
    def has_given(self) -> bool:
        """Whether all parts of this peer have left for the other reducers; some may not have arrived."""
        return all(self._num_given[peer] == len(parts) for peer, parts in self._parts.items() if peer != self.me)

    @property
    def _weight_of_all(self) -> float:
        return sum(self.weights.values())

    @property
    def parts_combined(self) -> int:
        """How many parts of this peer's share have a mean."""
        return self._reducer.parts_combined

    @property
    def outside(self) -> Mapping[PeerID, int]:
        """In how many of these parts each member was far from the others."""
        return self._reducer.outside

    async def run(self) -> torch.Tensor:
        """Send to all reducers, reduce for all senders, and return the average, shape [n].

        It goes on to its end even if a reducer fails: other members may need nothing but this peer's share of the rest.

        Raises:
            RoundFailed: a part of the average is missing
        """
        for reducer, parts in self._parts.items():
            if parts and reducer not in self._lost:
                talk = self._reduce_own_parts() if reducer == self.me else self._send_and_receive(reducer)
                self._talks[reducer] = asyncio.create_task(talk)
        waiting = asyncio.create_task(self._give_up_who_never_calls())
        try:
            outcomes = await asyncio.gather(*self._talks.values(), return_exceptions=True)
        finally:
            for task in (waiting, *self._talks.values()):
                task.cancel()
            self.close()
        for reducer, outcome in zip(self._talks, outcomes, strict=True):
            if reducer == self.me and isinstance(outcome, Exception):
                raise outcome
            if outcome is not None:
                logger.debug(f"the averages of {reducer} are missing: {outcome!r}")
        if missing := [reducer for reducer in self._parts if self._is_missing(reducer)]:
            names = ", ".join(sorted(peer.to_base58() for peer in missing))
            self._average = torch.empty(0)
            arrived = f"{self.parts_received} of {self.parts_expected} parts of the average arrived"
            raise RoundFailed(f"{arrived}, and some of {names} are missing", frozenset(self._lost))
        average, self._average = self._average, torch.empty(0)  # members that still read need only the messages
        return average

    def close(self) -> None:
        """End this all-reduce; members that send to it from now on are told that it is over."""
        if not self.is_over:
            self.is_over = True
            self._reducer.close()

    def awaited_input(self, peer_id: PeerID) -> int | None:
        """Number of the part that is reduced now, if it is missing from this member: all later parts wait for it."""
        return self._reducer.awaited_from(peer_id)

    def awaited_average(self, peer_id: PeerID) -> int | None:
        """Number of the next average that this member has to send, if there is one and it can still come."""
        return self._num_averages[peer_id] if self._is_missing(peer_id) and peer_id not in self._failed else None

    def _is_missing(self, peer_id: PeerID) -> bool:
        """Whether some averages of this reducer have not come."""
        return self._num_averages[peer_id] < len(self._parts.get(peer_id, ()))

    def lose(self, peer_id: PeerID) -> None:
        """Go on without this member: what it has not sent is not waited for, and nothing is sent to it."""
        self._lost.add(peer_id)
        self._reducer.lose(peer_id)
        self._note_called(peer_id, self._callers.get(peer_id))
        for task in (self._talks.get(peer_id), self._callers.get(peer_id)):
            if task is not None:
                task.cancel()

    # ---- as a sender ------------------------------------------------------------------------------------------------

    async def _send_and_receive(self, reducer: PeerID) -> None:
        """Send this peer's parts of a reducer's share, and take in the averages."""
        try:
            # Each is closed by itself: what reads ahead may be at any point, and only closing the stream hangs up.
            async with (
                aclosing(await self._stream_to(reducer)) as stream,
                aclosing(aiter_with_timeout(stream, 2 * self._stream_seconds)) as messages,
                aclosing(amap_in_executor(self._decode_average, messages, max_prefetch=1)) as results,
            ):
                await self._take_averages(reducer, results)
        except BaseException:
            self._failed.add(reducer)
            raise

    async def _take_averages(self, reducer: PeerID, results: AsyncIterator[ArrivedPart]) -> None:
        async for arrived in results:
            part, average = self._parts[reducer][self._num_averages[reducer]], arrived.numbers
            if average is None or average.shape != part.numbers.shape:
                self._accuse(reducer, Blame.SENT_A_BAD_AVERAGE)
            self._count_received(arrived.num_bytes)
            if part.is_seal:
                try:
                    self._seals.check_receipt(reducer, arrived.tensor)
                except ValueError as error:
                    logger.debug(f"the receipt of {reducer} is refused: {error}")
                    self._accuse(reducer, Blame.SENT_A_BAD_RECEIPT)
            elif self._seals is not None:
                self._seals.received(reducer, arrived.hash)
            self._detector.heard(reducer)
            self._on_the_way[reducer].answered()
            self._waits.told(reducer, arrived.waited)
            self._take_average(reducer, average)
            if not self._is_missing(reducer):
                return
        raise ExchangeBroken(f"{reducer} sent {self._num_averages[reducer]} averages only")

    def _accuse(self, peer_id: PeerID, what: Blame) -> NoReturn:
        """Blame a member for what no honest peer does, and end its stream."""
        self.blamed[peer_id] = what
        raise ExchangeBroken(f"{peer_id} {what}")

    def _take_average(self, reducer: PeerID, average: torch.Tensor) -> None:
        part = self._parts[reducer][self._num_averages[reducer]]
        self._average[part.offset : part.offset + len(average)] = average
        self._num_averages[reducer] += 1
        self.parts_received += 1

    async def _stream_to(self, reducer: PeerID) -> AsyncGenerator[averaging_pb2.AveragingData]:
        """Open a stream to a reducer, as soon as there is a connection.

        For some seconds after a dial has failed, p2pd does not dial again. A reducer that has come back meanwhile calls
        this peer to send its own parts. It would then wait long for this peer's parts, since it hears from this peer.
        """
        give_up_at = asyncio.get_running_loop().time() + self._stream_seconds
        inputs = self.inputs_for(reducer)
        while True:
            try:
                return await self.stub_of(reducer).rpc_aggregate_part(inputs)
            except P2PDaemonError:
                if asyncio.get_running_loop().time() > give_up_at:
                    raise
                await asyncio.sleep(DIAL_AGAIN_SECONDS)

    async def inputs_for(self, reducer: PeerID) -> AsyncIterator[averaging_pb2.AveragingData]:
        """The messages with this peer's parts of a reducer's share, as fast as the window lets them go.

        A member without samples sends empty ones: they only say that it is ready for the next average.
        """
        encode = partial(self._encode_input, reducer)
        encoded = amap_in_executor(encode, as_aiter(*self._parts[reducer]), max_prefetch=1)
        message = averaging_pb2.AveragingData(code=averaging_pb2.PART_FOR_AVERAGING, group_id=self.group.group_id)
        try:
            async for tensor_part in encoded:
                await self._on_the_way[reducer].may_send()
                if tensor_part is None:
                    tensor_part = self._seals.commitment(reducer)
                message.tensor_part.CopyFrom(tensor_part)
                await self._may_send(message)
                self._num_given[reducer] += 1
                yield message
                faults.at("exchanging", self.group.step)
                message = averaging_pb2.AveragingData()
        finally:
            await encoded.aclose()

    def _encode_input(self, reducer: PeerID, part: Part) -> runtime_pb2.Tensor | None:
        """The encoded part; None for the seal, which is made when all parts are encoded."""
        if not self.weights[self.me]:
            return runtime_pb2.Tensor()  # it would count for nothing
        if part.is_seal:
            return None
        tensor = self.codec.compress(part.numbers, part.info)
        if self._seals is not None:
            self._seals.sent(reducer, part.offset, tensor)
        return tensor

    # ---- as a reducer -----------------------------------------------------------------------------------------------

    async def _reduce_own_parts(self) -> None:
        weight = self.weights[self.me]
        for part_index, part in enumerate(self._own_parts):
            numbers = part.numbers if weight else torch.zeros_like(part.numbers)
            if self._seals is not None and weight and not part.is_seal:
                await in_thread(self._seals.given_by_me, numbers)
            mean = await self._reducer.mean_with(self.me, numbers, weight)
            self.inputs_received += 1
            message = await self._encode_once(part_index, mean)
            self._take_average(self.me, mean if part.is_seal else await in_thread(self.codec.extract, message))

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Answer a member's parts with the averages. A member can call once for each stripe."""
        sender = context.remote_id
        if sender not in self.weights or self._callers.get(sender) is not None:
            yield averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
            await until_caller_hangs_up()
            return
        self._note_called(sender, asyncio.current_task())
        self._detector.called(sender)
        num_answers = 0
        try:
            if self.is_over or sender in self._lost:
                raise ExchangeBroken("it is over for this member")
            async for answer in self._answers(sender, aiter_with_timeout(stream, self._stream_seconds)):
                num_answers += 1
                yield answer
        except Exception as error:
            logger.debug(f"{sender} cannot take part any more: {error!r}")
            self._reducer.lose(sender)  # before it is told, which may take a while
            yield averaging_pb2.AveragingData(code=averaging_pb2.INTERNAL_ERROR)
        finally:
            if num_answers < len(self._own_parts):
                self._reducer.lose(sender)
            else:
                self.has_served = True
        await until_caller_hangs_up()

    async def _answers(
        self, sender: PeerID, stream: AsyncIterator[averaging_pb2.AveragingData]
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """The averages of this peer's share, one for each part that the sender gives."""
        weight = self.weights[sender]
        decode = self._decode_part if weight else self._without_content
        inputs = amap_in_executor(decode, stream, max_prefetch=1)
        try:
            for part_index in range(len(self._own_parts)):
                asked_at = time.monotonic()
                arrived = await anext(inputs)
                came_late = time.monotonic() - asked_at > LATE_SECONDS
                numbers = self._take_part(sender, part_index, arrived)
                mean = await self._reducer.mean_with(sender, numbers, weight)
                self.inputs_received += 1
                message = await self._encode_once(part_index, mean)
                waited = came_late and self._reducer.last_to_give[part_index] == sender
                self._waits.saw(sender, waited)
                answer = averaging_pb2.AveragingData(
                    code=averaging_pb2.AVERAGED_PART, tensor_part=message, weight=float(waited)
                )
                await self._may_send(answer)
                yield answer
        except StopAsyncIteration:
            raise ExchangeBroken(f"{sender} has not sent all its parts") from None
        finally:
            await inputs.aclose()

    def _take_part(self, sender: PeerID, part_index: int, arrived: ArrivedPart) -> torch.Tensor:
        """The numbers of a part as it has come, shape [n]; zeros from a member without samples.

        Raises:
            ExchangeBroken: no honest peer sends that
        """
        part, weight = self._own_parts[part_index], self.weights[sender]
        numbers = arrived.numbers if weight else torch.zeros_like(part.numbers)
        self._count_received(arrived.num_bytes)
        self._detector.heard(sender)
        if numbers is None:
            self._accuse(sender, Blame.SENT_NONSENSE)
        if numbers.shape != part.numbers.shape:
            self._accuse(sender, Blame.SENT_ANOTHER_SHAPE)
        if self._seals is not None and weight:
            self._keep_given(sender, arrived, part.is_seal)
        return numbers

    def _keep_given(self, sender: PeerID, arrived: ArrivedPart, is_seal: bool) -> None:
        """Keep a part that auditors may ask for, or the sender's commitment to its parts."""
        if not is_seal:
            return self._seals.given(sender, arrived.hash, arrived.tensor)
        try:
            self._seals.take_commitment(sender, arrived.tensor)
        except ValueError:
            self._accuse(sender, Blame.SENT_A_BAD_COMMITMENT)

    async def _encode_once(self, part_index: int, mean: torch.Tensor) -> runtime_pb2.Tensor:
        """The one message with the average of this part, encoded when it is first needed."""
        if part_index not in self._encoded:
            loop = asyncio.get_running_loop()
            self._encoded[part_index] = loop.run_in_executor(None, self.encode_average, part_index, mean)
        return await asyncio.shield(self._encoded[part_index])  # other members wait for it, too

    def encode_average(self, part_index: int, mean: torch.Tensor) -> runtime_pb2.Tensor:
        """The message with a mean, and with what earlier ones have left out; what it leaves out itself is noted."""
        part = self._own_parts[part_index]
        if part.is_seal:
            return self._seals.receipt(self._reducer.counted)
        whole = self._feedback.with_left_out(mean, part.offset, self._weight_of_all)
        message = self.codec.compress(whole, part.info)
        if self._feedback.left_out is not None:
            average = self.codec.extract(message)
            if self._seals is not None and not is_faithful(average, mean, self.codec, part.info):
                message = self.codec.compress(mean, part.info)  # the sum is honest, but auditors would call it false
                average = self.codec.extract(message)
            self._left_out[part_index] = whole - average
        if self._seals is not None:
            self._seals.answered(part_index, message)
        return message

    def _note_called(self, sender: PeerID, task: asyncio.Task | None) -> None:
        self._callers[sender] = task
        if self._callers.keys() >= self.weights.keys() - {self.me}:
            self._all_called.set()

    async def _give_up_who_never_calls(self) -> None:
        """Give up senders that do not call. One that did not call in its last round either has less time.

        Such a sender may have no way to reach this peer.
        """
        if not self._own_parts:
            return
        loop = asyncio.get_running_loop()
        begun, silent_seconds = loop.time(), self._detector.timeouts.silence_seconds
        for seconds in sorted({min(silent_seconds, self._stream_seconds), self._stream_seconds}):
            try:
                return await asyncio.wait_for(self._all_called.wait(), begun + seconds - loop.time())
            except TimeoutError:
                for sender in self.weights.keys() - self._callers.keys() - {self.me}:
                    if seconds == self._stream_seconds or self._detector.never_calls(sender):
                        self._detector.did_not_call(sender)
                        self._reducer.lose(sender)

    # ---- the line ---------------------------------------------------------------------------------------------------

    async def _may_send(self, message: averaging_pb2.AveragingData) -> None:
        """Wait until a message may go out, and count it."""
        num_bytes = message.ByteSize()
        await self._line.send(num_bytes)
        self.bytes_sent += num_bytes

    def _count_received(self, num_bytes: int) -> None:
        self.bytes_received += num_bytes
        self._line.receive(num_bytes)

    # ---- what arrives -----------------------------------------------------------------------------------------------

    def _decode_average(self, message: averaging_pb2.AveragingData) -> ArrivedPart:
        if message.code != averaging_pb2.AVERAGED_PART:
            raise ExchangeBroken(f"a reducer answered {averaging_pb2.MessageCode.Name(message.code)}")
        return self._decode_part(message)

    def _decode_part(self, message: averaging_pb2.AveragingData) -> ArrivedPart:
        tensor, num_bytes = message.tensor_part, message.ByteSize()
        # No hash covers fields that no peer reads. A reducer would keep them, and show more than auditors take.
        is_padded = num_bytes > len(tensor.buffer) + MAX_HEADER_BYTES
        numbers = None if is_padded else decode(tensor, self.codec, self._largest_part)
        tensor_hash = hash_of(tensor) if self._seals is not None else b""
        return ArrivedPart(numbers, num_bytes, tensor, tensor_hash, bool(message.weight))

    @staticmethod
    def _without_content(message: averaging_pb2.AveragingData) -> ArrivedPart:
        """A message of a member without samples, unread: it only says that the member is ready for the next average."""
        return ArrivedPart(None, message.ByteSize(), message.tensor_part)
