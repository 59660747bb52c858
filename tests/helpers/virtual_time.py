"""Time that passes only while all wait: a race in real time gets one outcome, also on a busy machine."""

import asyncio
import selectors
import time

import pytest

TURN_SECONDS = 1e-9
"""Least time that a turn of the loop takes. Without it, a wait shorter than the clock's resolution would never end."""


class Clock:
    """Monotonic seconds that start at the real clock, so that times from the real clock stay comparable."""

    def __init__(self):
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


class _Selector(selectors.DefaultSelector):
    """A wait for a timer ends at once. Messages within this process arrive before that."""

    def __init__(self, clock: Clock):
        super().__init__()
        self._clock, self.num_threads = clock, 0
        """`num_threads`: threads at work, for which it really waits."""

    def select(self, timeout: float | None = None) -> list:
        waits_really = timeout is None or (self.num_threads > 0 and timeout > 0)
        ready = super().select(None if waits_really else 0)
        if not ready and timeout is not None:
            self._clock.now += max(TURN_SECONDS, timeout)
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: Clock):
        self._clock, self._waiter = clock, _Selector(clock)
        super().__init__(self._waiter)

    def time(self) -> float:
        return self._clock()

    def run_in_executor(self, executor, function, *arguments) -> asyncio.Future:
        future = super().run_in_executor(executor, function, *arguments)
        self._waiter.num_threads += 1
        future.add_done_callback(lambda _: self._end_thread())
        return future

    def _end_thread(self) -> None:
        self._waiter.num_threads -= 1


def run_in_virtual_time(test, monkeypatch: pytest.MonkeyPatch, seconds: float = 60) -> None:
    """Run `test()` in one process, for at most so many virtual seconds."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    with asyncio.Runner(loop_factory=lambda: _Loop(clock)) as runner:
        runner.run(asyncio.wait_for(test(), seconds))
