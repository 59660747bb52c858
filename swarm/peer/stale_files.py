"""Removes what a peer leaves on the disk when all its processes are killed.

These are the folders with the sockets through which p2pd and its callers talk (`swarm.runtime.sockets`). On Linux,
shared memory has no name (`swarm.network.hivemind_patches`) and vanishes with the last process that uses it.
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
"""Name of such a folder: the id of the process that made it, and something random."""


def remember(note: Path, pids: Iterable[int]) -> None:
    """Note the folders of these processes, for the case that all are killed. If that fails, nothing is swept later."""
    names = sorted(folder.name for pid in pids for folder in TEMPORARY.glob(f"swarm_{pid}_*"))
    with contextlib.suppress(OSError):
        write_json(note, names[:MAX_FOLDERS])


def sweep_earlier(note: Path) -> None:
    """Remove the noted folders of processes that are gone."""
    try:
        names = json.loads(note.read_text())
    except (OSError, ValueError, RecursionError):
        return
    for name in names[:MAX_FOLDERS] if isinstance(names, list) else ():
        folder = _FOLDER.fullmatch(name) if isinstance(name, str) else None
        if folder and _is_gone(int(folder[1])):
            shutil.rmtree(TEMPORARY / name, ignore_errors=True)


def _is_gone(pid: int) -> bool:
    if pid == os.getpid():  # this program started again with the same id: in place, or in a container
        return True
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
