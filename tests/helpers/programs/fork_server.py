"""The process from which tests fork others: multiprocessing's fork server, with what is slow to import.

A test process has one, whoever asks for it first, so there is one list: the last of several would count.
"""

import multiprocessing

FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["tests.helpers.programs.preloaded"])
