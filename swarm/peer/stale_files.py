"""What a life of this peer leaves behind when all its processes are killed, and who takes it away.

That is the folder with the sockets by which p2pd and its callers talk (`swarm.runtime.sockets`). On Linux, shared
memory has no name (`swarm.network.hivemind_patches`) and goes with its last user.
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

MAX_FOLDERS = 100
_FOLDER = re.compile(r"swarm_([0-9]{1,9})_[a-z0-9_]{8}")
"""Its process, and something random."""


def remember(note: Path, pids: Iterable[int]) -> None:
    """Note what these processes have made, should all be killed; without the note nothing is swept."""
    names = sorted(folder.name for pid in pids for folder in TEMPORARY.glob(f"swarm_{pid}_*"))
    with contextlib.suppress(OSError):
        write_json(note, names[:MAX_FOLDERS])


def sweep_earlier(note: Path) -> None:
    """Remove what was noted, if those who made it are gone."""
    try:
        names = json.loads(note.read_text())
    except (OSError, ValueError, RecursionError):
        return
    for name in names[:MAX_FOLDERS] if isinstance(names, list) else ():
        folder = _FOLDER.fullmatch(name) if isinstance(name, str) else None
        if folder and _is_gone(int(folder[1])):
            shutil.rmtree(TEMPORARY / name, ignore_errors=True)


def _is_gone(pid: int) -> bool:
    if pid == os.getpid():  # this program has begun anew, in place or in a container
        return True
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
