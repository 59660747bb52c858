"""The process from which tests fork others: multiprocessing's fork server, which has everything from `importer.py`.

A test process has one, whoever asks for it first, so there is one list: the last of several would count.
"""

import multiprocessing

from hivemind.utils.asyncio import _AsyncContextWrapper
from hivemind.utils.mpfuture import MPFuture

FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["tests.helpers.programs.give_way"])


def have_own_locks() -> None:
    """Of a forked process: siblings inherit the locks that Hivemind makes when it is imported, and one that is killed
    would keep the others out."""
    MPFuture.reset_backend()
    _AsyncContextWrapper.EXECUTOR_LOCK = multiprocessing.Lock()
