"""Exact all-reduce: each share of the vector is averaged by one peer, encoded once, and decoded by everyone alike.

Hivemind's ``AllReduceRunner`` answers every sender with the difference to *its* tensor, so after a few updates no two
peers hold the same bits. Here a reducer encodes the average once and everyone, the reducer included, decodes that one
message: all peers hold the same bits after the round, with any codec, and no second round is needed to bring the
parameters back together.

Three more differences: weights come from the tickets that the whole group has seen, not from the sender's own messages;
parts that are not finite or have another shape ban their sender; and a reducer keeps its stream open until the sender
has read all results and hangs up (see :func:`until_caller_hangs_up`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import torch
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.partition import AllreduceException, BannedException
from hivemind.compression import deserialize_torch_tensor
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.asyncio import aiter_with_timeout, amap_in_executor

from swarm.rounds import Group

MIN_PART_BYTES, MAX_PART_BYTES = 2**14, 2**19
HANG_UP_SECONDS = 10.0


async def until_caller_hangs_up() -> None:
    """The last line of a streaming RPC: wait for the caller, who knows when it has everything, to close the stream.

    Hivemind closes a stream when its handler returns. While the caller's side is still open, p2pd turns that into a
    reset, and a reset throws away what the caller has not read yet: under load, now and then, the last message. When
    the caller hangs up, Hivemind cancels the handler.
    """
    await asyncio.sleep(HANG_UP_SECONDS)


def part_size_bytes(total_bytes: int, num_reducers: int) -> int:
    """Size of a part, in bytes: small vectors are still spread over all reducers, large ones stay in 512 KiB parts."""
    return max(MIN_PART_BYTES, min(MAX_PART_BYTES, total_bytes // (4 * max(1, num_reducers))))


class ExactAllReduceRunner(AllReduceRunner):
    """One peer's part in one round over one closed :class:`~swarm.rounds.Group`.

    :param group: the closed group; its tickets give the weights and say who can reduce
    :param tensor: this peer's contribution, shape [n], fp32, shared memory; iterating yields the average, shape [n]
    :param kwargs: see :class:`hivemind.averaging.allreduce.AllReduceRunner`
    """

    def __init__(self, *, group: Group, tensor: torch.Tensor, **kwargs):
        reducers = [not ticket.client_mode for ticket in group.tickets]
        super().__init__(
            tensors=[tensor],
            group_id=group.group_id,
            ordered_peer_ids=group.peer_ids,
            peer_fractions=tuple(can_reduce / sum(reducers) for can_reduce in reducers),
            weight=1.0,
            part_size_bytes=part_size_bytes(tensor.numel() * tensor.element_size(), sum(reducers)),
            **kwargs,
        )
        self.tensor_part_container.return_deltas = False
        self.weights = dict(zip(group.peer_ids, (float(t.samples) for t in group.tickets), strict=True))
        self.parts_received = 0
        self._encoded: dict[int, asyncio.Future] = {}
        self._part_infos = [
            info for _, info in self.tensor_part_container._input_parts_by_peer[group.peer_ids.index(self.peer_id)]
        ]

    @property
    def parts_expected(self) -> int:
        return sum(self.tensor_part_container.num_parts_by_peer)

    @property
    def inputs_expected(self) -> int:
        return self.tensor_part_reducer.num_parts * len(self.sender_peer_ids)

    @property
    def inputs_received(self) -> int:
        return sum(self.tensor_part_reducer.num_parts_received)

    def should_delay_results(self, peer_id: PeerID) -> bool:
        return False  # stock delays them for client-mode peers until the request stream ends; ours stays open

    async def _encode(self, part_index: int, average: torch.Tensor) -> runtime_pb2.Tensor:
        """The one message with the average of this part; the first who needs it encodes it."""
        if part_index not in self._encoded:
            container = self.tensor_part_container
            self._encoded[part_index] = asyncio.get_running_loop().run_in_executor(
                None, container.compression.compress, average, self._part_infos[part_index]
            )
        return await asyncio.shield(self._encoded[part_index])  # others wait for it, too

    async def _communicate_with_peer(self, peer_id: PeerID):
        if peer_id == self.peer_id:
            await self._reduce_own_parts()
        else:
            await self._send_and_receive(peer_id)

    async def _reduce_own_parts(self):
        sender_index = self.sender_peer_ids.index(self.peer_id)
        peer_index = self.ordered_peer_ids.index(self.peer_id)
        for part_index, part in enumerate(self.parts_for_local_averaging):
            average = await self.tensor_part_reducer.accumulate_part(
                sender_index, part_index, part, weight=self.weights[self.peer_id]
            )
            decoded = deserialize_torch_tensor(await self._encode(part_index, average))
            self.tensor_part_container.register_processed_part(peer_index, part_index, decoded)
            self.parts_received += 1

    async def _send_and_receive(self, peer_id: PeerID):
        peer_index = self.ordered_peer_ids.index(peer_id)
        num_parts = self.tensor_part_container.num_parts_by_peer[peer_index]
        results, part_index = None, 0
        try:
            inputs = self._generate_input_for_peer(peer_index)
            stream = await self._get_peer_stub(peer_id).rpc_aggregate_part(inputs)
            messages = aiter_with_timeout(stream, self.reducer_timeout)
            results = amap_in_executor(self._decode_result, messages, max_prefetch=1)
            async for part in results:
                self.tensor_part_container.register_processed_part(peer_index, part_index, part)
                self.parts_received += 1
                part_index += 1
                if part_index == num_parts:
                    break
            if part_index != num_parts:
                raise AllreduceException(f"{peer_id} sent {part_index} of {num_parts} parts")
        except BaseException:
            self.tensor_part_container.register_failed_reducer(peer_index)
            raise
        finally:
            if results is not None:
                await results.aclose()  # hangs up

    @staticmethod
    def _decode_result(message: averaging_pb2.AveragingData) -> torch.Tensor:
        if message.code != averaging_pb2.AVERAGED_PART:
            raise AllreduceException(f"a reducer answered {averaging_pb2.MessageCode.Name(message.code)}")
        part = deserialize_torch_tensor(message.tensor_part)
        if not torch.isfinite(part).all():
            raise AllreduceException("a reducer sent an average that is not finite")
        return part

    async def _accumulate_parts_streaming(self, stream: AsyncIterator, sender_index: int) -> AsyncIterator:
        reducer = self.tensor_part_reducer
        sender = self.sender_peer_ids[sender_index]
        part_index = 0
        try:
            async for part in amap_in_executor(
                lambda message: deserialize_torch_tensor(message.tensor_part), stream, max_prefetch=1
            ):
                if part.shape != reducer.part_shapes[part_index] or not torch.isfinite(part).all():
                    raise AllreduceException(f"{sender} sent a part that is not finite or has a wrong shape")
                try:  # all senders wait for one future; without the shield one that hangs up would cancel it for all
                    average = await asyncio.shield(
                        reducer.accumulate_part(sender_index, part_index, part, weight=self.weights[sender])
                    )
                except BannedException:
                    break
                encoded = await self._encode(part_index, average)
                part_index += 1
                yield averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART, tensor_part=encoded)
                if part_index == reducer.num_parts:
                    break
        finally:
            if part_index != reducer.num_parts:
                await self._ban_sender(sender)
        await until_caller_hangs_up()
