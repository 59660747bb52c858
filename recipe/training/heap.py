"""Settings of glibc's allocator for freed memory; other C libraries and systems are left as they are."""

from __future__ import annotations

import ctypes
import sys

_ARENA_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD = -8, -3, -1  # malloc.h


def keep_heap() -> None:
    """Let a training process keep memory that a micro-batch freed for the next, up to 256 MB at the heap's end.

    By default glibc returns it whenever nothing lies above it, and the kernel has to clear every page again. In the
    swarm, gradients live in buffers that stay, so nothing lies above it: 6,600 page faults per micro-batch, not 500.
    """
    _set(mmap_threshold_bytes=2**25, trim_threshold_bytes=2**28)


def give_back_heap() -> None:
    """Let a process return unused memory: large buffers come from the kernel directly, and there is one heap."""
    _set(mmap_threshold_bytes=2**18, trim_threshold_bytes=2**20)
    _mallopt(_ARENA_MAX, 1)


def _set(mmap_threshold_bytes: int, trim_threshold_bytes: int) -> None:
    _mallopt(_MMAP_THRESHOLD, mmap_threshold_bytes)
    _mallopt(_TRIM_THRESHOLD, trim_threshold_bytes)


def _mallopt(option: int, value: int) -> None:
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(option, value)
