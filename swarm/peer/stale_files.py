"""What a life of this peer leaves behind when all its processes are killed, and who takes it away.

- torch's files in shared memory. torch takes them away when a process ends, by a manager process of its own. Where that
  is killed as well, as service managers do, or a peer starts again in place, they would stay until the machine is
  switched off: the model's size in memory, each time.
- The folder with the sockets by which p2pd and its callers talk (`swarm.runtime.sockets`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import psutil

from recipe.run_folder import write_json
from swarm.runtime.sockets import TEMPORARY

SHARED_MEMORY = Path("/dev/shm")
MAX_FILES = 1000
_NAME = re.compile(r"torch_([0-9]{1,9})_[0-9]{1,12}_[0-9]{1,9}")
"""Its process, a random number, how many that process has made before."""
_FOLDER = re.compile(r"swarm_([0-9]{1,9})_[a-z0-9_]{8}")
"""Its process, and something random."""


def remember(note: Path, pids: Iterable[int]) -> None:
    """Note what these processes have made, should all be killed; without the note nothing is swept."""
    made = ([*SHARED_MEMORY.glob(f"torch_{pid}_*"), *TEMPORARY.glob(f"swarm_{pid}_*")] for pid in pids)
    names = sorted(path.name for paths in made for path in paths)
    with contextlib.suppress(OSError):
        write_json(note, names[:MAX_FILES])


def sweep_earlier(note: Path) -> None:
    """Remove what was noted, if those who made it are gone."""
    try:
        names = json.loads(note.read_text())
    except (OSError, ValueError, RecursionError):
        return
    for name in names[:MAX_FILES] if isinstance(names, list) else ():
        if not isinstance(name, str):
            continue
        if (file := _NAME.fullmatch(name)) and _is_gone(int(file[1])):
            with contextlib.suppress(OSError):
                (SHARED_MEMORY / name).unlink()
        elif (folder := _FOLDER.fullmatch(name)) and _is_gone(int(folder[1])):
            shutil.rmtree(TEMPORARY / name, ignore_errors=True)


def _is_gone(pid: int) -> bool:
    if pid == os.getpid():  # this program has begun anew, in place or in a container
        return True
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
