"""Imports large libraries without Python's garbage collector.

It would look through all modules again and again while they come in, and nobody ever throws one away: that took a fifth
of the time that a peer needs to import torch, Lightning and timm.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Within this, nothing is collected; and what is there at its end never is."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # no later collection looks through it, so forked processes go on sharing its memory
        if collects:
            gc.enable()
