"""Whoever leaves lets the others read to the end what it has averaged for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any, AsyncIterator  # noqa: UP035 (hivemind does not recognise the one of collections.abc)

from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import P2PContext
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, get_logger

from swarm.protocol.messages import Group
from swarm.runtime.async_utils import SharedFuture

logger = get_logger(__name__)

LAST_READ_SECONDS = 2.0


class AveragerProcess(DecentralizedAverager):
    """An averager that knows whether somebody still reads from it."""

    def __init__(self, *args, **kwargs):
        self._readers, self._all_read = 0, asyncio.Event()
        super().__init__(*args, **kwargs)

    # ---- in the trainer process -----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave; whoever reads may go on for ``LAST_READ_SECONDS``: it needs our share of a round that we have."""
        if self.is_alive():
            future = MPFuture()
            with contextlib.suppress(TimeoutError, OSError):
                self._outer_pipe.send(("_finish", [future], {}))
                future.result(LAST_READ_SECONDS)
        super().shutdown()

    # ---- in the averager process ----------------------------------------------------------------------------------

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Another peer sends its part of a round, and reads the average until it hangs up."""
        self._readers += 1
        try:
            async for message in super().rpc_aggregate_part(stream, context):
                yield message
        finally:
            self._readers -= 1
            if not self._readers:
                self._all_read.set()

    @contextlib.contextmanager
    def _register_allreduce_group(self, group: Group) -> Iterator[None]:
        """Within this, whoever sends for the round of this group waits until it begins, or is given up."""
        with super()._register_allreduce_group(group):
            future = self._running_groups[group.group_id] = SharedFuture()
            try:
                yield
            finally:
                future.give_up()

    async def _finish(self, future: MPFuture) -> None:
        while self._readers:
            self._all_read.clear()
            await self._all_read.wait()
        future.set_result(None)


def tell_once(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """How a round ended is told by its future; of each stream that broke with it asyncio would print a traceback.

    Nor does anybody need to know that a process has ended while some of its tasks still waited for others.
    """
    is_unfinished = str(context.get("message", "")).startswith("Task was destroyed but it is pending")
    broke = isinstance(context.get("exception"), (AllreduceException, ConnectionError, asyncio.CancelledError))
    if broke or is_unfinished:
        logger.debug(context)
    else:
        loop.default_exception_handler(context)
