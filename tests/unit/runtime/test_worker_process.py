"""What becomes of commands that a process beside the trainer cannot carry out."""

import os
import threading
from functools import partial
from threading import Thread

import pytest

from recipe.errors import InputError
from swarm.runtime.worker_process import WorkerProcess


def test_a_process_that_has_died_holds_up_nobody_who_sends_to_it():
    """Nobody reads its pipe, which is full at some time."""
    process = WorkerProcess(None, None, None, partial(os._exit, 1))
    process.start()
    process.join()
    sending = Thread(target=lambda: [process.send(bytes(1_000)) for _ in range(2_000)], daemon=True)
    sending.start()
    sending.join(10.0)
    assert not sending.is_alive()
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


def test_a_process_that_dies_while_it_starts_leaves_no_thread():
    before = set(threading.enumerate())
    process = WorkerProcess(None, None, None, partial(os._exit, 1))
    with pytest.raises(InputError, match="enough memory"):
        process.start_and_wait()
    for thread in set(threading.enumerate()) - before:
        thread.join(10.0)
        assert not thread.is_alive(), thread
