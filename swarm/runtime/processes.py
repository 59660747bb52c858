"""Helpers for processes: children that never outlive the trainer, kept signal handlers, and locks of one process."""

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
_CLAIMED: dict[Path, list[BinaryIO]] = {}
"""Open files of the locks of this process: more than one if threads claim a lock at the same time. They are never
closed, since closing any of them would give the lock up."""


def die_with_parent(signal_number: int = signal.SIGKILL, parent_pid: int | None = None) -> None:
    """Ask the kernel to send this process a signal as soon as its parent dies, even by kill -9. Linux only.

    Call it first thing in the child. The kernel watches the *thread* that forked it, so children have to be started
    by a thread that lives as long as the trainer: the main one.

    Args:
        signal_number: the signal
        parent_pid: needed only if multiprocessing did not start the child. It shows if the parent died before the call
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
    """Keep a forked process's memory shared with the trainer's, and free what it no longer uses. Call it first.

    Garbage collection would write to every object that the process has from the trainer, and so copy all of them.
    """
    gc.freeze()
    give_back_heap()


def forget(tensors: Iterable[torch.Tensor]) -> None:
    """Let a forked process drop the memory of tensors that it has inherited and never reads again.

    Otherwise it would keep an old copy of every page that the trainer changes, in all as much as these tensors take.
    The values of the tensors are undefined in this process from now on. Linux only.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type != "cpu" or storage.is_shared():
            continue
        # Whole pages only: the allocator's own data are around the tensor.
        begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            libc.madvise(begin, end - begin, mmap.MADV_DONTNEED)


def allow_many_files(most: int = 65_536) -> None:
    """Let this process, and its later children, open as many files as the system allows. A stream is a file, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def leave_terminal() -> None:
    """Move this process into a group of its own, so that a Ctrl-C in the terminal reaches the trainer alone."""
    with contextlib.suppress(PermissionError):  # a session leader has its own group already
        os.setpgid(0, 0)


def descendants(pid: int) -> list[psutil.Process]:
    """All living descendants of a process; empty if it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def is_alive(process: psutil.Process) -> bool:
    """Whether a process lives. One that has ended does not, even if its parent has not reaped it yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(processes: list[psutil.Process]) -> None:
    """Kill processes, which may be gone already (psutil remembers their start, so a reused pid is safe)."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def reap() -> None:
    """Reap children that have ended. Nothing else waits for children of an earlier program in this process."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def claim(lock: Path) -> bool:
    """Take a lock for this process until it ends, however it ends. Returns whether it has the lock.

    On one machine, only one process has the lock. No child that outlives the process holds it. If the file system has
    no locks, or the folder is read-only, every process gets it.

    Args:
        lock: an empty file; made if it is missing
    """
    try:
        files = _CLAIMED.setdefault(lock, [])
        if not files:
            files.append(lock.open("wb"))
    except OSError:
        return True
    try:
        fcntl.lockf(files[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError | PermissionError)
    return True


@contextlib.contextmanager
def keep_signal_handlers() -> Iterator[None]:
    """Put back the earlier handlers of SIGINT and SIGTERM afterwards: Hivemind sets SIGINT to ignored at places."""
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
    """Make fork the start method: Hivemind's averagers hold locks that spawn (macOS) and forkserver (3.14) refuse."""
    if multiprocessing.get_start_method() != "fork":
        multiprocessing.set_start_method("fork", force=True)
