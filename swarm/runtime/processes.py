"""Children that never outlive the trainer, signal handlers that survive hivemind, and locks of one process."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import mmap
import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import psutil

from recipe.training.heap import give_back_heap

if TYPE_CHECKING:
    import torch  # takes seconds to import

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CLAIMED: dict[Path, BinaryIO] = {}
"""Locks of this process; never closed, since closing any file of that name would give the lock up."""


def die_with_parent(signal_number: int = signal.SIGKILL, parent_pid: int | None = None) -> None:
    """Ask the kernel to send this process a signal as soon as its parent dies, even by kill -9. Linux only.

    Call it first thing in the child. The kernel watches the *thread* that forked it, so children have to be started
    by a thread that lives as long as the trainer: the main one. `parent_pid` is needed only where multiprocessing
    did not start the child; a parent that died before the call is noticed by it.
    """
    if not sys.platform.startswith("linux"):
        return
    if parent_pid is None and (parent := multiprocessing.parent_process()) is not None:
        parent_pid = parent.pid
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal_number)


def stay_small() -> None:
    """Let a forked process share memory with the trainer for good, and give back what it no longer uses. Call it first.

    Collecting garbage would write to every object that it has from the trainer, and so copy all of them.
    """
    gc.freeze()
    give_back_heap()


def forget(tensors: Iterable[torch.Tensor]) -> None:
    """Let a forked process drop what it has inherited of these: it never reads them again.

    It would keep every page that the trainer changes in its old state, in all as much as these tensors take. Their
    values are undefined here from now on. Linux only.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type != "cpu" or storage.is_shared():
            continue
        # Whole pages: the allocator's own words lie around them.
        begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            libc.madvise(begin, end - begin, mmap.MADV_DONTNEED)


def allow_many_files(most: int = 65_536) -> None:
    """Let this process, and those that it will start, open as many files as the system lets it; a stream is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has a further limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def leave_terminal() -> None:
    """Move this process into a group of its own, so that a Ctrl-C in the terminal reaches the trainer alone."""
    with contextlib.suppress(PermissionError):  # a session leader has its own group already
        os.setpgid(0, 0)


def descendants(pid: int) -> list[psutil.Process]:
    """Every living child of a process, and theirs; empty if it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill(processes: list[psutil.Process]) -> None:
    """Kill processes that may be gone already (psutil remembers their start, so a reused pid is safe)."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def reap() -> None:
    """Take note of children that have ended: those of an earlier program in this process nobody else waits for."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def claim(lock: Path) -> bool:
    """Whether this process alone has this lock on this machine from now on, until it ends, however it ends.

    It is the process's own: no child that outlives it holds it. Where a file system knows no locks, or the folder may
    only be read, everybody has it.

    Args:
        lock: an empty file; made if it is missing
    """
    try:
        file = _CLAIMED.get(lock) or _CLAIMED.setdefault(lock, lock.open("wb"))
    except OSError:
        return True
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError | PermissionError)
    return True


@contextlib.contextmanager
def keep_signal_handlers() -> Iterator[None]:
    """Put back the handlers of SIGINT and SIGTERM that were there before; hivemind sets SIGINT to ignored at places."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: set by C code, Python cannot name it
                signal.signal(number, handler)


def use_fork() -> None:
    """Make fork the start method: hivemind's averagers hold locks that spawn (macOS) and forkserver (3.14) refuse."""
    if multiprocessing.get_start_method() != "fork":
        multiprocessing.set_start_method("fork", force=True)
