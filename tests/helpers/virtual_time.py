"""Time that passes only while all wait: what is a race in real time has one outcome, also on a busy machine."""

import asyncio
import selectors
import time

import pytest

TURN_SECONDS = 1e-9
"""Of the loop, if it waits for nothing: who waits for less than a clock shows would else wait without end."""


class Clock:
    """Monotonic seconds, from now on: whoever has the real clock already is not years apart."""

    def __init__(self):
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


class _Selector(selectors.DefaultSelector):
    """Who would wait for a timer has waited at once. What is sent within this process is here before that."""

    def __init__(self, clock: Clock):
        super().__init__()
        self._clock, self.num_threads = clock, 0
        """At work: these are waited for."""

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
    """`test()` in one process, which may last so many virtual seconds."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    with asyncio.Runner(loop_factory=lambda: _Loop(clock)) as runner:
        runner.run(asyncio.wait_for(test(), seconds))
