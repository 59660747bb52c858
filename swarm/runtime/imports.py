"""Imports large libraries without Python's garbage collector.

The collector would search all modules again and again during the import, although modules are never freed. That took a
fifth of the time that a peer needs to import torch, Lightning and timm.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Turn garbage collection off within this context. Objects that exist at its end are never collected."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # no later collection looks through it, so forked processes go on sharing its memory
        if collects:
            gc.enable()
