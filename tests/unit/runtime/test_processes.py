"""A forked process keeps only a part of the trainer's memory, and a lock has only one process."""

import fcntl
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch

from swarm.runtime.processes import claim, forget, is_alive

SIZE = 2**24  # numbers: 64 MiB


def hold(tensors, forgotten, line):
    """Drop some tensors and wait until the trainer has changed them.

    Send how much memory this process has for itself.
    """
    forget(forgotten)
    line.send("ready")
    line.recv()
    line.send(psutil.Process().memory_full_info().uss)
    line.send([float(tensor.double().sum()) for tensor in tensors])


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_fork_keeps_no_old_state_of_what_it_has_dropped(is_forgotten):
    dropped, kept, shared = torch.ones(SIZE), torch.ones(3), torch.ones(SIZE).share_memory_()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    fork = context.Process(target=hold, args=([kept, shared], [dropped, shared] * is_forgotten, theirs))
    fork.start()
    assert ours.recv() == "ready"
    dropped.fill_(2.0)
    shared.fill_(2.0)
    ours.send("go on")
    own_bytes, sums = ours.recv(), ours.recv()
    fork.join()
    assert sums == [3.0, 2.0 * SIZE], "what is shared stays shared"
    assert (own_bytes > 4 * SIZE) != is_forgotten
    assert float(dropped.double().sum()) == 2.0 * SIZE


def another_process_gets(lock: Path) -> bool:
    program = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'wb'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    return subprocess.run([sys.executable, "-c", program, lock], capture_output=True).returncode == 0


def test_threads_that_claim_a_lock_at_the_same_time_do_not_lose_it(tmp_path, monkeypatch):
    lock, open_file, take_lock = tmp_path / "lock", Path.open, fcntl.lockf
    is_opening, may_open, was_free = threading.Event(), threading.Event(), []

    def open_late(path: Path, mode: str):
        if threading.current_thread() is late:
            is_opening.set()
            may_open.wait(20.0)
        return open_file(path, mode)

    def take_late(*arguments) -> None:
        if threading.current_thread() is late:
            was_free.append(another_process_gets(lock))
        take_lock(*arguments)

    monkeypatch.setattr(Path, "open", open_late)
    monkeypatch.setattr(fcntl, "lockf", take_late)
    late = threading.Thread(target=claim, args=(lock,))
    late.start()
    assert is_opening.wait(20.0)
    assert claim(lock)
    may_open.set()
    late.join()
    assert was_free == [False]


def test_a_process_that_has_ended_does_not_live_also_before_it_is_reaped():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        process = psutil.Process(child.pid)
        assert is_alive(process)
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(process)
    assert not is_alive(process)
