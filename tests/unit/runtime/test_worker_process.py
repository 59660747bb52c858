"""Commands that a process beside the trainer cannot carry out."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
import time
from functools import partial
from threading import Thread

import pytest

from recipe.errors import InputError
from swarm.runtime.worker_process import WorkerProcess


def test_a_process_that_has_died_holds_up_no_sender():
    """No process reads its pipe any more, so it fills up."""
    process = WorkerProcess(None, None, None, partial(os._exit, 1))
    process.start()
    process.join()
    sending = Thread(target=lambda: [process.send(bytes(1_000)) for _ in range(2_000)], daemon=True)
    sending.start()
    sending.join(10.0)
    assert not sending.is_alive()
    process.stop()


class LooksAlive(WorkerProcess):
    """It dies just after the trainer has looked at it."""

    def is_alive(self) -> bool:
        return True


def test_a_command_to_a_process_that_has_just_died_is_no_error():
    process = LooksAlive(None, None, None, partial(os._exit, 1))
    process.start()
    process.join()
    process.send(b"a command")
    process.stop()


class Network:
    async def replicate_p2p(self):
        return None


class LooksLate(WorkerProcess):
    """When the trainer looks at it, it has always ended."""

    def is_alive(self) -> bool:
        self.join()
        return super().is_alive()


def test_a_process_that_ends_while_it_starts_says_why():
    def fail(*_):
        raise InputError("this port is in use")

    process = LooksLate(Network(), fail, None, bool)
    with pytest.raises(InputError, match="this port is in use"):
        process.start_and_wait()


def answering_threads(before: set[threading.Thread]) -> set[threading.Thread]:
    threads = set(threading.enumerate()) - before
    for thread in threads:
        thread.join(10.0)
    return {thread for thread in threads if thread.is_alive()}


def test_a_process_that_dies_while_it_starts_leaves_no_thread():
    before = set(threading.enumerate())
    process = WorkerProcess(None, None, None, partial(os._exit, 1))
    with pytest.raises(InputError, match="enough memory"):
        process.start_and_wait()
    assert not answering_threads(before)


def test_a_process_that_is_killed_leaves_no_thread():
    """Its trainer may go on for a while, or start another one, without stopping it."""
    before = set(threading.enumerate())
    process = WorkerProcess(None, None, None, partial(time.sleep, 600.0))
    process.start()
    process.kill()
    assert not answering_threads(before)


def ignore_sigterm(ignores) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ignores.set()
    time.sleep(600.0)


def test_a_process_that_is_stuck_does_not_outlive_its_trainer(monkeypatch):
    """It is forked from the trainer, whose handlers of signals it inherits."""
    monkeypatch.setattr("swarm.runtime.worker_process.STOP_SECONDS", 1.0)
    ignores = multiprocessing.Event()
    process = WorkerProcess(None, None, None, partial(ignore_sigterm, ignores))
    process.start()
    assert ignores.wait(20.0)
    process.stop()
    assert process.exitcode == -signal.SIGKILL


class Impatient:
    """Asks for the state three times, and waits only for the last one."""

    def __init__(self, has_asked, has_it, _p2p, ask_for_state):
        self.has_asked, self.has_it, self.ask_for_state = has_asked, has_it, ask_for_state

    async def start(self) -> None:
        pass

    async def do(self, _command) -> None:
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ask_for_state(), 0.1)
        self.has_asked.set()
        await self.ask_for_state()
        self.has_it.set()

    async def stop(self) -> None:
        pass


def test_a_state_that_is_not_waited_for_any_more_is_not_copied(caplog):
    copies, may_copy = [], threading.Event()
    has_asked, has_it = multiprocessing.Event(), multiprocessing.Event()

    def copy() -> None:
        may_copy.wait(20.0)
        copies.append(True)

    process = WorkerProcess(Network(), partial(Impatient, has_asked, has_it), copy, bool)
    process.start_and_wait()
    process.send("ask")
    assert has_asked.wait(20.0)
    may_copy.set()
    assert has_it.wait(20.0)
    process.stop()
    assert len(copies) == 2, "the first one had begun, and the last one is waited for"
    assert not caplog.records
