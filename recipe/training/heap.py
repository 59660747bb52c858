"""What glibc does with memory that is free again; other C libraries, and other systems, are left as they are."""

from __future__ import annotations

import ctypes
import sys

_ARENA_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD = -8, -3, -1  # malloc.h


def keep_heap() -> None:
    """Let a process that trains keep what one micro-batch has freed for the next, up to 256 MB at the heap's end.

    By default glibc gives it back whenever nothing lies above it, and the kernel has to clear every page of it again.
    With gradients in buffers that live on, as in the swarm, nothing does: 6,600 page faults per micro-batch, not 500.
    """
    _set(mmap_threshold_bytes=2**25, trim_threshold_bytes=2**28)


def give_back_heap() -> None:
    """Let a process give back what it no longer uses: large buffers come from the kernel, and there is one heap."""
    _set(mmap_threshold_bytes=2**18, trim_threshold_bytes=2**20)
    _mallopt(_ARENA_MAX, 1)


def _set(mmap_threshold_bytes: int, trim_threshold_bytes: int) -> None:
    _mallopt(_MMAP_THRESHOLD, mmap_threshold_bytes)
    _mallopt(_TRIM_THRESHOLD, trim_threshold_bytes)


def _mallopt(option: int, value: int) -> None:
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(option, value)
