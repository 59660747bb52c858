"""Small helpers around futures: waiting with a limit, and waiting that nobody else's end cuts short."""

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
    """Its result; a thread cannot be cancelled, so its end is waited for even then."""
    running = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
    try:
        return await asyncio.shield(running)
    finally:
        await asyncio.wait([running])


async def unless(lost: asyncio.Future, coming: Awaitable, timeout_seconds: float) -> Any:
    """What comes; a TimeoutError if its sender is lost first, or time is over."""
    coming = asyncio.ensure_future(coming)
    try:
        await asyncio.wait([coming, lost], timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        if not coming.done():
            raise TimeoutError
        return coming.result()
    finally:
        coming.cancel()
        await asyncio.wait([coming])  # who still reads a stream keeps it from being closed


async def until_caller_hangs_up() -> None:
    """The last line of a streaming RPC: wait for the caller, who knows when it has everything, to close the stream.

    Hivemind closes a stream when its handler returns. While the caller's side is still open, p2pd turns that into a
    reset, and a reset throws away what the caller has not read yet: under load, now and then, the last message. When
    the caller hangs up, Hivemind cancels the handler.
    """
    await asyncio.sleep(HANG_UP_SECONDS)


class SharedFuture(asyncio.Future):
    """Many wait for it; who is cancelled meanwhile takes it from nobody."""

    def cancel(self, msg: Any = None) -> bool:
        return False

    def give_up(self, error: Exception) -> None:
        """Nobody waits in vain."""
        if not self.done():
            self.set_exception(error)
            self.exception()
