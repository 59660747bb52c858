"""Seeds what is drawn on the CPU, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded_on_cpu(seed: int) -> Iterator[None]:
    """Inside this block, random numbers on the CPU follow from the seed; after it they go on as before.

    Those on GPUs go on all the time. `torch.manual_seed` would seed them as well, and all processes of a DDP run would
    draw the same dropout.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
