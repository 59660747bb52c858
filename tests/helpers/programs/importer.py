"""The one process that imports what peers import, for all tests; processes that need the imports are forked from it.

A peer imports for five seconds, and the suite starts hundreds. This process begins with the tests, and imports at the
first request. It forks two other processes for each test process: one from which its programs are forked (`forked.py`),
and one in place of multiprocessing's fork server (`fork_server.py`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from swarm.runtime.processes import die_with_parent
from tests.helpers.paths import ROOT

ADDRESS = "SWARM_TEST_IMPORTER"
"""Environment variable: the path of its socket."""
PROGRAMS, FORK_SERVER = b"programs", b"fork server"
REQUEST_BYTES = 1 << 17
_AS_IN_PEERS = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "HIVEMIND_LOGLEVEL": "WARNING"}
"""Variables that an interpreter reads when it starts, or a library when it is imported."""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Run the importer for this process and all that come from it."""
    folder = Path(tempfile.mkdtemp(prefix="swarm-tests-"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(folder / "importer"))
        listener.listen(64)
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(listener.fileno()), str(os.getpid())],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            env=os.environ | _AS_IN_PEERS,
            start_new_session=True,
        )
    os.environ[ADDRESS] = str(folder / "importer")
    try:
        yield
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder)


def ask(for_what: bytes) -> socket.socket:
    """Connect to a process that the importer forks for this one: `PROGRAMS` or `FORK_SERVER`."""
    asker = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asker.connect(os.environ[ADDRESS])
    asker.send(for_what)
    return asker


def limit_open_files(number: int | None) -> None:
    """Limit this process to so many open files until it asks for more, as systems usually do."""
    if number is not None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, most))


# ---- in the importer, and in the processes that it forks -------------------------------------------------------------


def _asker(listener: socket.socket) -> socket.socket:
    """Fork a process for each request; returns the connection to the asking test process, in the new process."""
    importer = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the forked processes are never waited for
    while True:
        asker, _ = listener.accept()
        import tests.helpers.programs.preloaded  # noqa: F401

        if os.fork():
            asker.close()
            continue
        listener.close()
        die_with_parent(signal.SIGTERM, importer)
        return asker


def _be_fork_server(asker: socket.socket) -> None:
    """Serve as multiprocessing's fork server, with the files and the environment of the asking process."""
    from multiprocessing.forkserver import main

    request, files, *_ = socket.recv_fds(asker, REQUEST_BYTES, 5)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.register_at_fork(after_in_child=asker.close)  # so it closes with this process, even if a child lives on
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
        os.close(file)
    _change_environment(json.loads(request))
    logging.getLogger("hivemind").setLevel(os.environ.get("HIVEMIND_LOGLEVEL", "INFO"))
    try:
        main(*files[3:], [])
    finally:
        os._exit(0)


def _asked(control: socket.socket) -> tuple[dict, int]:
    """Wait for requests to run a program. Returns a request and its log, in a process that has forked twice."""
    server = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are never waited for
    while True:
        request, files, *_ = socket.recv_fds(control, REQUEST_BYTES, 2)
        if not request:
            os._exit(0)
        if os.fork():
            for file in files:
                os.close(file)
            continue
        control.close()
        die_with_parent(signal.SIGTERM, server)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        tester, keeper = socket.socket(fileno=files[0]), os.getpid()
        if program := os.fork():
            _keep(program, tester)
        os.setsid()
        die_with_parent(signal.SIGTERM, keeper)
        tester.send(str(os.getpid()).encode())
        tester.close()
        return json.loads(request), files[1]


def _keep(program: int, tester: socket.socket) -> None:
    """Send the program's exit status. WNOWAIT keeps its process id from being reused until the test has read that."""
    end = os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT)
    status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
    with contextlib.suppress(OSError):  # the test is over
        tester.send(str(status).encode())
        tester.recv(1)
    os._exit(0)


def _become(request: dict, log: int) -> None:
    """Give this process all that a new process would find."""
    import numpy as np

    from tests.helpers.programs.fork_server import have_own_locks

    os.nice(request["nice"])
    limit_open_files(request["open_files"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    for file, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(file, number)
    os.close(nothing)
    os.close(log)
    os.chdir(request["cwd"])
    _change_environment(request["environment"])
    np.random.seed()
    have_own_locks()
    sys.argv[1:] = request["arguments"]
    sys.orig_argv = [sys.executable, "-m", request["module"], *request["arguments"]]


def _change_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


if __name__ == "__main__":
    die_with_parent(signal.SIGTERM, int(sys.argv[2]))
    its_asker = _asker(socket.socket(fileno=int(sys.argv[1])))
    if its_asker.recv(64) == FORK_SERVER:
        _be_fork_server(its_asker)
    asked, its_log = _asked(its_asker)
    _become(asked, its_log)
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
