"""Notices within a second or two that a process which a peer needs has died, and starts the peer again.

It also warns when one of these processes runs out of open files.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import lightning as L
import psutil
from hivemind.utils import get_logger

from swarm.enrolment.organiser_key import hand_over_typed
from swarm.peer.open_files import OpenFiles
from swarm.peer.stale_files import remember, sweep_earlier
from swarm.peer.startup_timer import STARTED
from swarm.runtime.processes import descendants, is_alive, kill

logger = get_logger(__name__)

LOOK_SECONDS = 1.0
FILES_SECONDS = 10.0
"""Pause between two looks at the number of open files."""
MAX_RESTARTS = 5
LONG_SECONDS = 600.0
"""A peer that has trained for this long may start again `MAX_RESTARTS` more times."""
_RESTARTS = "SWARM_RESTARTS"


class Supervisor(L.Callback):
    """Watches a peer's processes while it waits for company and trains.

    Args:
        processes: returns the processes of this moment by name, without this one
        on_death: called once, from a thread, with the name of the first process that was found dead
        note: file that lists what the last life of this peer may have left on the disk, then what this one may leave
        leaves: set when this peer is asked to leave: its processes then end on purpose
    """

    def __init__(
        self,
        processes: Callable[[], dict[str, psutil.Process]],
        on_death: Callable[[str], None],
        note: Path,
        leaves: threading.Event,
    ):
        self._processes, self._on_death, self._note, self._leaves = processes, on_death, note, leaves
        sweep_earlier(note)
        self._closing = threading.Event()
        self._files = OpenFiles()
        self.found: str | None = None
        """Name of the process that has died; None as long as all live."""

    def setup(self, trainer, pl_module, stage) -> None:
        self._closing.clear()
        self._remember()
        threading.Thread(target=self._watch, name="supervisor", daemon=True).start()

    def on_train_start(self, trainer, pl_module) -> None:
        self._remember()

    def _remember(self) -> None:
        remember(self._note, [os.getpid(), *(process.pid for process in self._processes().values())])

    def on_train_end(self, trainer, pl_module) -> None:
        self._closing.set()  # from now on processes end on purpose

    def teardown(self, trainer, pl_module, stage) -> None:
        self._closing.set()  # also if the training never began

    def on_exception(self, trainer, pl_module, exception: BaseException) -> None:
        if not self._leaves.is_set():
            self.look()  # a dead process may be the cause; processes that end after this look are ended on purpose
        self._closing.set()

    def look(self) -> str | None:
        """Return the name of a process that has died; None if all live."""
        if self.found is None:
            self.found = self._dead()
        return self.found

    def _dead(self) -> str | None:
        dead = (name for name, process in self._processes().items() if not is_alive(process))
        return next(dead, None)

    def _watch(self) -> None:
        count_files_at = 0.0
        while not (self._closing.wait(LOOK_SECONDS) or self._leaves.is_set()):
            dead = self._dead()
            if self._closing.is_set() or self._leaves.is_set():
                return  # set since the look began: the process may have ended on purpose
            if dead is not None:
                self.found = self.found or dead
                self._remember()
                return self._on_death(self.found)
            if time.monotonic() >= count_files_at:
                count_files_at = time.monotonic() + FILES_SECONDS
                for sentence in self._files.look({"The trainer process": psutil.Process(), **self._processes()}):
                    logger.warning(sentence)


def _give_up_files() -> None:
    """Keep the next program from inheriting open files, also shared memory that came from another process."""
    if sys.platform != "linux":
        return
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2:  # standard input, output and errors
            with contextlib.suppress(OSError):
                os.set_inheritable(descriptor, False)


def start_again(options: Sequence[str], trained_seconds: float) -> None:
    """Replace this process by a new one with the same command line; returns only if that has been done too often.

    Args:
        options: appended to the command line, where the later of two equal options counts
        trained_seconds: since the last start
    """
    restarts = 0 if trained_seconds > LONG_SECONDS else int(os.environ.get(_RESTARTS, 0))
    if restarts >= MAX_RESTARTS:
        return
    children = descendants(os.getpid())
    kill(children)
    psutil.wait_procs(children, timeout=2)
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ[_RESTARTS] = str(restarts + 1)
    os.environ[STARTED] = str(time.time())
    _give_up_files()
    hand_over_typed()  # after the files are given up: its pipe has to be inherited
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *options])
