"""What an earlier life of this peer has left in shared memory: torch's files in /dev/shm.

torch takes them away when a process ends, by a manager process of its own. Where that is killed as well, as service
managers do, or a peer starts again in place, they would stay until the machine is switched off: the model's size in
memory, each time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

import psutil

from recipe.run_folder import write_json

SHARED_MEMORY = Path("/dev/shm")
MAX_FILES = 1000
_NAME = re.compile(r"torch_([0-9]{1,9})_[0-9]{1,12}_[0-9]{1,9}")
"""Its process, a random number, how many that process has made before."""


def remember(note: Path, pids: Iterable[int]) -> None:
    """Note the files of these processes, should all be killed; without the note nothing is swept."""
    names = sorted(file.name for pid in pids for file in SHARED_MEMORY.glob(f"torch_{pid}_*"))
    with contextlib.suppress(OSError):
        write_json(note, names[:MAX_FILES])


def sweep_earlier(note: Path) -> None:
    """Remove the files that were noted, if those who made them are gone."""
    try:
        names = json.loads(note.read_text())
    except (OSError, ValueError, RecursionError):
        return
    for name in names[:MAX_FILES] if isinstance(names, list) else ():
        if isinstance(name, str) and (found := _NAME.fullmatch(name)) and _is_gone(int(found[1])):
            with contextlib.suppress(OSError):
                (SHARED_MEMORY / name).unlink()


def _is_gone(pid: int) -> bool:
    return pid == os.getpid() or not psutil.pid_exists(pid)  # this program has begun anew, in place or in a container
