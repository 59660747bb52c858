"""The groups that this peer takes part in now: each sender is led to its all-reduce, which may not have begun yet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import AsyncIterator  # noqa: UP035 (hivemind does not recognise the one of collections.abc)

from hivemind.p2p import P2PContext
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import achain, as_aiter

from swarm.averaging.allreduce import AllReduce
from swarm.protocol.messages import ExchangeBroken, Group
from swarm.runtime.async_utils import SharedFuture

SETTLE_SECONDS = 30.0
"""Seconds for which a sender waits if this peer does not know its group yet: this peer hears of it a moment later."""


class RunningGroups:
    """The groups, stripe by stripe, in which this peer takes part now, each with its all-reduce."""

    def __init__(self) -> None:
        self._all_reduces: dict[bytes, SharedFuture] = {}
        self._is_settled = asyncio.Event()
        """Not set while this peer meets other peers: they may hear that a group has closed before this peer does."""
        self._is_settled.set()
        self._num_meetings = 0
        self._readers, self._all_read = 0, asyncio.Event()

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """While this context lasts, a sender for an unknown group waits until this peer knows one."""
        self._is_settled.clear()
        self._num_meetings += 1  # counted: a round that was given up ends a moment after the next one begins
        try:
            yield
        finally:
            self._num_meetings -= 1
            if not self._num_meetings:
                self._is_settled.set()

    @contextlib.contextmanager
    def registered(self, group: Group) -> Iterator[None]:
        """While this context lasts, a sender for this group waits until its all-reduce begins or is given up."""
        future = self._all_reduces[group.group_id] = SharedFuture()
        self._is_settled.set()
        try:
            yield
        finally:
            del self._all_reduces[group.group_id]
            future.give_up(ExchangeBroken("this round was given up"))

    def begin(self, all_reduce: AllReduce) -> None:
        """Let the senders that wait for this all-reduce's group send to it."""
        self._all_reduces[all_reduce.group.group_id].set_result(all_reduce)

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Serve another peer, which sends its parts of a round and reads the averages until it hangs up."""
        self._readers += 1
        try:
            first = await anext(stream, None)
            if first is None:  # the sender has hung up before it sent anything
                return
            if first.group_id not in self._all_reduces:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._is_settled.wait(), SETTLE_SECONDS)
            future = self._all_reduces.get(first.group_id)
            if future is None:
                yield averaging_pb2.AveragingData(code=averaging_pb2.BAD_GROUP_ID)
                return
            all_reduce = await future
            answers = all_reduce.rpc_aggregate_part(achain(as_aiter(first), stream), context)
            async with contextlib.aclosing(answers):
                async for message in answers:
                    yield message
        finally:
            self._readers -= 1
            if not self._readers:
                self._all_read.set()

    async def until_all_read(self) -> None:
        """Wait until no peer reads from this one any more."""
        while self._readers:
            self._all_read.clear()
            await self._all_read.wait()
