"""Measures the machine's present speed: on shared hardware it drifts by more than the effects under study."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_SIZE, _BATCH = 64, 128
"""Side and number of the matrices. They are so small that they fit a core's own cache and BLAS uses one thread for
each."""
_SECONDS = 1.0


def machine_gflops() -> float:
    """10⁹ floating-point operations per second that all cores make, over about a second of matrix products."""
    cores = sorted(os.sched_getaffinity(0))
    with ThreadPoolExecutor(len(cores)) as pool:
        return sum(pool.map(_core_gflops, cores))


def _core_gflops(core: int) -> float:
    os.sched_setaffinity(0, {core})  # of this thread only
    left = np.ones((_BATCH, _SIZE, _SIZE), np.float32)
    right, out = left.copy(), np.empty_like(left)
    began, rounds = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < _SECONDS:
        np.matmul(left, right, out=out)
        rounds += 1
    return rounds * 2 * _BATCH * _SIZE**3 / elapsed / 1e9
