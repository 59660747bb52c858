"""The process from which tests fork others: multiprocessing's fork server, which has everything from `importer.py`.

A test process has one fork server for all its modules, so there is one preload list: a second list would replace it.
"""

import multiprocessing

from hivemind.utils.asyncio import _AsyncContextWrapper
from hivemind.utils.mpfuture import MPFuture

FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["tests.helpers.programs.give_way"])


def have_own_locks() -> None:
    """Give a forked process its own locks.

    Siblings inherit the locks that Hivemind makes when it is imported. A killed sibling would never release them."""
    MPFuture.reset_backend()
    _AsyncContextWrapper.EXECUTOR_LOCK = multiprocessing.Lock()
