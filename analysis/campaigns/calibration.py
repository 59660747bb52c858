"""How fast the machine itself is at the moment: on shared hardware it drifts by more than the effects under study."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_SIZE, _BATCH = 64, 128
"""Matrices this small fit a core's own cache, and no BLAS gives them several threads."""
_SECONDS = 1.0


def machine_gflops() -> float:
    """Floating-point operations per second, in 10⁹, of a fixed matrix product on all cores for a second."""
    cores = sorted(os.sched_getaffinity(0))
    with ThreadPoolExecutor(len(cores)) as pool:
        return sum(pool.map(_core_gflops, cores))


def _core_gflops(core: int) -> float:
    os.sched_setaffinity(0, {core})  # of this thread alone
    left = np.ones((_BATCH, _SIZE, _SIZE), np.float32)
    right, out = left.copy(), np.empty_like(left)
    began, rounds = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < _SECONDS:
        np.matmul(left, right, out=out)
        rounds += 1
    return rounds * 2 * _BATCH * _SIZE**3 / elapsed / 1e9
