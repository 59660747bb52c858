"""Small helpers for futures: waiting with a limit, and futures that several tasks can wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

POLL_SECONDS = 0.2
HANG_UP_SECONDS = 10.0


def wait_a_little(future: Future) -> None:
    """Wait until the future is done, or for `POLL_SECONDS`."""
    try:
        future.exception(timeout=POLL_SECONDS)
    except TimeoutError:
        pass


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a thread and return its result.

    A thread cannot be cancelled. So if this task is cancelled, it still waits for the end of the function.
    """
    running = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
    try:
        return await asyncio.shield(running)
    finally:
        await asyncio.wait([running])


async def unless(lost: asyncio.Future, coming: Awaitable, timeout_seconds: float) -> Any:
    """Wait for a result unless its sender is lost first.

    Args:
        lost: done when the sender is lost
        coming: gives the result
        timeout_seconds: time limit

    Raises:
        TimeoutError: the sender is lost, or the time is over
    """
    coming = asyncio.ensure_future(coming)
    try:
        await asyncio.wait([coming, lost], timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        if not coming.done():
            raise TimeoutError
        return coming.result()
    finally:
        coming.cancel()
        await asyncio.wait([coming])  # a task that still reads a stream would keep it from being closed


async def until_caller_hangs_up() -> None:
    """Wait until the caller of a streaming RPC closes the stream, at most 10 s. It is the last line of the handler.

    Hivemind closes a stream when its handler returns. If the caller's side is still open, p2pd turns that into a reset.
    A reset discards what the caller has not read yet: under load, now and then, the last message. When the caller hangs
    up, Hivemind cancels the handler.
    """
    await asyncio.sleep(HANG_UP_SECONDS)


class SharedFuture(asyncio.Future):
    """A future that several tasks wait for. It cannot be cancelled, so one cancelled task does not end it for all."""

    def cancel(self, msg: Any = None) -> bool:
        return False

    def give_up(self, error: Exception) -> None:
        """Set an exception if there is no result yet, so that no task waits in vain."""
        if not self.done():
            self.set_exception(error)
            self.exception()  # marks it as retrieved: asyncio does not complain if no task waits
