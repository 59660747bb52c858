"""The main memory that this process may take: what the machine has, or less in a container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

OWN_GROUPS = Path("/proc/self/cgroup")
"""Names the control groups that this process is in. Linux limits a container's memory by them."""
GROUPS = Path("/sys/fs/cgroup")
"""The folder of all control groups."""
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file")
VERSION_2 = ("memory.max", "memory.current", "active_file", "inactive_file")
"""Files with the limit and the use of a group, and the names of what it uses to cache files."""


class MainMemory(NamedTuple):
    """Bytes of main memory.

    Args:
        total: bytes that this process and the others beside it may take in all
        available: bytes that they may still take
    """

    total: int
    available: int


def main_memory() -> MainMemory:
    """The main memory of this machine, or of the control group that has least, if that is less."""
    machine = psutil.virtual_memory()
    found = [MainMemory(machine.total, machine.available), *_limits()]
    return MainMemory(min(one.total for one in found), min(one.available for one in found))


def _limits() -> Iterator[MainMemory]:
    """The memory of each control group that this process is in and that has a limit."""
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return  # not Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, names = GROUPS / "memory", VERSION_1
        elif not controllers:
            root, names = GROUPS, VERSION_2
        else:
            continue
        # The limit of a group also holds for those below it. In a container with version 1, the path is that of the
        # host, and the container's own group is the root.
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            yield from _limit_of(group, *names)
            if group == root:
                break


def _limit_of(group: Path, limit: str, use: str, *caches: str) -> Iterator[MainMemory]:
    try:
        total, used = (int((group / name).read_text()) for name in (limit, use))
        statistics = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
        cached = sum(int(value) for name, value in statistics if name in caches)
    except (OSError, ValueError):  # no such group, or no limit
        return
    yield MainMemory(total, max(0, total - max(0, used - cached)))  # Linux empties caches before a limit is reached
