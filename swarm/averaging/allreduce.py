"""Exact all-reduce: each share of the vector is averaged by one peer, encoded once, and decoded by everyone alike.

Hivemind's ``AllReduceRunner`` answers every sender with the difference to *its* tensor, so after a few updates no two
peers hold the same bits. Here a reducer encodes the average once and everyone, the reducer included, decodes that one
message: all peers hold the same bits after the round, with any codec, and no second round is needed to bring the
parameters back together.

With a codec that rounds, what rounding leaves out on the way to a reducer and on the way back is not lost: the peer
that encoded adds it to its contribution to the next round (:class:`~swarm.averaging.compression.ErrorFeedback`).

More differences: weights come from the tickets that the whole group has seen, not from the sender's own messages;
parts that are not finite, are far too large or have another shape ban their sender, and whoever sends such parts or
such averages is named (``blamed``); only some parts are on their way at once (``send_window``); a member can
be given up at any time (``striped_allreduce``); and a reducer keeps its stream open until the sender has read all
results and hangs up (see :func:`until_caller_hangs_up`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import torch
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.partition import AllreduceException, BannedException
from hivemind.compression import CompressionInfo
from hivemind.p2p import P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.asyncio import aiter_with_timeout, amap_in_executor

from swarm.averaging.compression import ErrorFeedback
from swarm.averaging.send_window import PartsOnTheWay, SendWindow
from swarm.membership.failure_detector import FailureDetector
from swarm.protocol.messages import Blame, Group
from swarm.runtime import fault_injection as faults
from swarm.runtime.async_utils import until_caller_hangs_up

MIN_PART_BYTES, MAX_PART_BYTES = 2**14, 2**19
LARGEST_NUMBER = 1e24
"""No gradient has a larger one. Times the samples of a whole group it still fits into fp32: no sum can overflow."""
DIAL_AGAIN_SECONDS = 0.2


def part_size_bytes(total_bytes: int, num_reducers: int, stripes: int) -> int:
    """Size of a part, in bytes: small vectors are still spread over all reducers.

    One part of every stream is 512 KiB together. They share a line, on which a record or an answer has to get through
    between them: at 10 Mbit/s that is less than half a second.
    """
    streams = stripes * max(1, num_reducers - 1)
    return max(MIN_PART_BYTES, min(MAX_PART_BYTES // streams, total_bytes // (4 * max(1, num_reducers))))


def is_sound(part: torch.Tensor) -> bool:
    """Whether all numbers are finite and of a size that gradients and weights can have."""
    return bool((part.abs() <= LARGEST_NUMBER).all())  # also false for NaN


class ExactAllReduceRunner(AllReduceRunner):
    """One peer's part in one stripe of a round over one closed :class:`~swarm.protocol.messages.Group`.

    :param group: the closed group; its tickets give the weights and say who can reduce
    :param tensor: this peer's contribution, shape [n], fp32, shared memory; iterating yields the average, shape [n]
    :param feedback: what earlier rounds have left out
    :param stripes: how many run side by side
    :param detector: is told who was heard
    :param windows: of each reducer: how many parts may be on their way to it
    :param kwargs: see :class:`hivemind.averaging.allreduce.AllReduceRunner`
    """

    def __init__(
        self,
        *,
        group: Group,
        tensor: torch.Tensor,
        feedback: ErrorFeedback,
        stripes: int,
        detector: FailureDetector,
        windows: Mapping[PeerID, SendWindow],
        **kwargs,
    ):
        reducers = [not ticket.client_mode for ticket in group.tickets]
        super().__init__(
            tensors=[tensor],
            group_id=group.group_id,
            ordered_peer_ids=group.peer_ids,
            peer_fractions=tuple(can_reduce / sum(reducers) for can_reduce in reducers),
            weight=1.0,
            part_size_bytes=part_size_bytes(tensor.numel() * tensor.element_size(), sum(reducers), stripes),
            **kwargs,
        )
        self.tensor_part_container.return_deltas = False
        self.weights = dict(zip(group.peer_ids, (float(t.samples) for t in group.tickets), strict=True))
        self.parts_received = self.inputs_received = self.bytes_sent = self.bytes_received = 0
        self.blamed: dict[PeerID, Blame] = {}
        """Who has sent what no honest peer sends, and what that was."""
        self.failed_reducers: set[PeerID] = set()
        """Whose averages have not all come."""
        self._on_the_way = {peer: PartsOnTheWay(window, stripes) for peer, window in windows.items()}
        self._lost: set[PeerID] = set()
        self._callers: dict[PeerID, asyncio.Task] = {}
        self._group, self._feedback, self._detector = group, feedback, detector
        self._talks: dict[PeerID, asyncio.Task] = {}
        self._codec = self.tensor_part_container.compression
        self._encoded: dict[int, asyncio.Future] = {}
        self._left_out: dict[int, torch.Tensor] = {}
        self._own_parts = self._with_offsets()[self.peer_id]

    def _with_offsets(self) -> dict[PeerID, list[tuple[torch.Tensor, CompressionInfo, int]]]:
        """Of each reducer's parts: this peer's numbers, what Hivemind says of them, and their offset in the vector."""
        found, offset = {}, 0
        parts_by_peer = self.tensor_part_container._input_parts_by_peer
        for reducer, parts in zip(self._group.peer_ids, parts_by_peer, strict=True):
            found[reducer] = []
            for part, info in parts:
                found[reducer].append((part, info, offset))
                offset += len(part)
        return found

    def add_left_out(self) -> None:
        """Before anything is sent: what earlier rounds left out of this peer's contributions goes with this one."""
        for reducer, parts in self._with_offsets().items():
            for part, info, offset in parts:
                self._feedback.add_to(part, info, offset, self.weights[self.peer_id], reducer != self.peer_id)

    def keep_left_out(self) -> None:
        """After the round has succeeded: what its encoded averages left out goes with the next contribution."""
        for part_index, left_out in self._left_out.items():
            self._feedback.keep(left_out, self._own_parts[part_index][2], self._group.samples)

    @property
    def parts_expected(self) -> int:
        return sum(self.tensor_part_container.num_parts_by_peer)

    @property
    def inputs_expected(self) -> int:
        return self.tensor_part_reducer.num_parts * len(self.sender_peer_ids)

    def finalize(self, *, cancel: bool = False, exception: BaseException | None = None) -> None:
        """As Hivemind's, but who runs it learns of an exception by itself: nobody would ask the future for it."""
        super().finalize(cancel=cancel or exception is not None)

    def awaited_input(self, peer_id: PeerID) -> int | None:
        """Number of the part that is reduced now, if it is this member's that is missing: what follows waits for it."""
        reducer, sender_index = self.tensor_part_reducer, self.sender_peer_ids.index(peer_id)
        missing = reducer.num_parts_received[sender_index] <= reducer.current_part_index
        return reducer.current_part_index if missing and peer_id not in self.banned_senders else None

    def awaited_average(self, peer_id: PeerID) -> int | None:
        """Number of the next average that this member has to send, if there is one."""
        container, index = self.tensor_part_container, self.ordered_peer_ids.index(peer_id)
        received = container._outputs_registered_by_peer[index]
        return received if received < container.num_parts_by_peer[index] else None

    async def lose(self, peer_id: PeerID) -> None:
        """This member is not there any more: what it has not sent is not waited for, and nothing is sent to it."""
        self._lost.add(peer_id)
        await self._ban_sender(peer_id)
        self.active_senders.add(peer_id)  # or Hivemind would still wait for its first part
        if len(self.active_senders) == len(self.sender_peer_ids):
            self.all_senders_started.set()
        for talks in (self._talks, self._callers):
            if peer_id in talks:
                talks[peer_id].cancel()

    def should_delay_results(self, peer_id: PeerID) -> bool:
        return False  # stock delays them for client-mode peers until the request stream ends; ours stays open

    async def _encode(self, part_index: int, average: torch.Tensor) -> runtime_pb2.Tensor:
        """The one message with the average of this part; the first who needs it encodes it."""
        if part_index not in self._encoded:
            self._encoded[part_index] = asyncio.get_running_loop().run_in_executor(
                None, self._encode_now, part_index, average
            )
        return await asyncio.shield(self._encoded[part_index])  # others wait for it, too

    def _encode_now(self, part_index: int, average: torch.Tensor) -> runtime_pb2.Tensor:
        _, info, _ = self._own_parts[part_index]
        message = self._codec.compress(average, info)
        if self._feedback.left_out is not None:
            self._left_out[part_index] = average - self._codec.extract(message)
        return message

    async def _communicate_with_peer(self, peer_id: PeerID):
        if peer_id == self.peer_id:
            await self._reduce_own_parts()
        else:
            self._talks[peer_id] = asyncio.current_task()
            if peer_id in self._lost:
                self._talks[peer_id].cancel()
            await self._send_and_receive(peer_id)

    async def _reduce_own_parts(self):
        sender_index = self.sender_peer_ids.index(self.peer_id)
        peer_index = self.ordered_peer_ids.index(self.peer_id)
        for part_index, part in enumerate(self.parts_for_local_averaging):
            if not self.weights[self.peer_id]:
                part = torch.zeros_like(part)
            average = await self.tensor_part_reducer.accumulate_part(
                sender_index, part_index, part, weight=self.weights[self.peer_id]
            )
            self.inputs_received += 1
            decoded = self._codec.extract(await self._encode(part_index, average))
            self.tensor_part_container.register_processed_part(peer_index, part_index, decoded)
            self.parts_received += 1

    async def _generate_input_for_peer(self, peer_index: int) -> AsyncIterator[averaging_pb2.AveragingData]:
        messages = super()._generate_input_for_peer(peer_index)
        try:
            on_the_way = self._on_the_way[self.ordered_peer_ids[peer_index]]
            async for message in messages:
                await on_the_way.may_send()
                if not self.weights[self.peer_id]:
                    message.tensor_part.CopyFrom(runtime_pb2.Tensor())  # it would count for nothing
                self.bytes_sent += message.ByteSize()
                yield message
                faults.at("exchanging", self._group.tickets[0].step)
        finally:
            await messages.aclose()

    async def _send_and_receive(self, peer_id: PeerID):
        peer_index = self.ordered_peer_ids.index(peer_id)
        num_parts = self.tensor_part_container.num_parts_by_peer[peer_index]
        results, part_index = None, 0
        try:
            messages = aiter_with_timeout(await self._stream_to(peer_id), self.reducer_timeout)
            results = amap_in_executor(self._decode_result, messages, max_prefetch=1)
            async for part, num_bytes in results:
                if part is None:
                    self.blamed[peer_id] = Blame.SENT_A_BAD_AVERAGE
                    raise AllreduceException(f"{peer_id} {Blame.SENT_A_BAD_AVERAGE}")
                self.bytes_received += num_bytes
                self._detector.heard(peer_id)
                self._on_the_way[peer_id].answered()
                self.tensor_part_container.register_processed_part(peer_index, part_index, part)
                self.parts_received += 1
                part_index += 1
                if part_index == num_parts:
                    break
            if part_index != num_parts:
                raise AllreduceException(f"{peer_id} sent {part_index} of {num_parts} parts")
        except BaseException:
            self.failed_reducers.add(peer_id)
            self.tensor_part_container.register_failed_reducer(peer_index)
            raise
        finally:
            if results is not None:
                await results.aclose()  # hangs up

    async def _stream_to(self, peer_id: PeerID) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Open a stream, as soon as there is a connection.

        For seconds after a call has failed p2pd does not try again. Who has come back meanwhile calls us, to send its
        own parts; and it would wait for ours as long as Hivemind does, because it hears that we are there.
        """
        inputs = self._generate_input_for_peer(self.ordered_peer_ids.index(peer_id))
        give_up_at = asyncio.get_running_loop().time() + self.sender_timeout
        while True:
            try:
                return await self._get_peer_stub(peer_id).rpc_aggregate_part(inputs)
            except P2PDaemonError:
                if asyncio.get_running_loop().time() > give_up_at:
                    raise
                await asyncio.sleep(DIAL_AGAIN_SECONDS)

    def _decode_result(self, message: averaging_pb2.AveragingData) -> tuple[torch.Tensor | None, int]:
        """An average and its bytes; None if no honest reducer sends it."""
        if message.code != averaging_pb2.AVERAGED_PART:
            raise AllreduceException(f"a reducer answered {averaging_pb2.MessageCode.Name(message.code)}")
        return self._decode_part(message)

    def _decode(self, message: averaging_pb2.AveragingData) -> tuple[torch.Tensor, int]:
        """The numbers in a message, and its bytes."""
        if message.tensor_part.dtype != "float32":  # the name of a numpy type, which could be as large as it likes
            raise AllreduceException("a part that is not float32")
        return self._codec.extract(message.tensor_part).detach(), message.ByteSize()

    def _decode_part(self, message: averaging_pb2.AveragingData) -> tuple[torch.Tensor | None, int]:
        """The numbers in a message, and its bytes; None if no honest peer sends them."""
        try:
            part, num_bytes = self._decode(message)
        except Exception:  # a stranger's bytes
            return None, 0
        return (part if is_sound(part) else None), num_bytes

    @staticmethod
    def _without_content(message: averaging_pb2.AveragingData) -> tuple[None, int]:
        """Of who has no samples nothing is read: its messages say only that it is ready for the next average."""
        return None, message.ByteSize()

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """A member's part in this stripe, which it can have once: Hivemind would count a second stream as another's."""
        if context.remote_id in self._callers:
            yield averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
            await until_caller_hangs_up()
            return
        self._callers[context.remote_id] = asyncio.current_task()
        async for message in super().rpc_aggregate_part(stream, context):
            yield message

    async def _accumulate_parts_streaming(self, stream: AsyncIterator, sender_index: int) -> AsyncIterator:
        reducer = self.tensor_part_reducer
        sender = self.sender_peer_ids[sender_index]
        part_index = 0
        gives = self.weights[sender] > 0
        decode = self._decode_part if gives else self._without_content
        try:
            async for part, num_bytes in amap_in_executor(decode, stream, max_prefetch=1):
                self.bytes_received += num_bytes
                self._detector.heard(sender)
                if not gives:
                    part = torch.zeros(reducer.part_shapes[part_index])
                if part is None or part.shape != reducer.part_shapes[part_index]:
                    self.blamed[sender] = Blame.SENT_NONSENSE if part is None else Blame.SENT_ANOTHER_SHAPE
                    raise AllreduceException(f"{sender} {self.blamed[sender]}")
                try:  # all senders wait for one future; without the shield one that hangs up would cancel it for all
                    average = await asyncio.shield(
                        reducer.accumulate_part(sender_index, part_index, part, weight=self.weights[sender])
                    )
                except BannedException:
                    break
                self.inputs_received += 1
                encoded = await self._encode(part_index, average)
                part_index += 1
                answer = averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART, tensor_part=encoded)
                self.bytes_sent += answer.ByteSize()
                yield answer
                if part_index == reducer.num_parts:
                    break
        finally:
            if part_index != reducer.num_parts:
                await self._ban_sender(sender)
        await until_caller_hangs_up()
