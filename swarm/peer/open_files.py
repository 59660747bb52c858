"""Says when a process of this peer has nearly as many files open as it may. A stream, or a connection, is a file."""

from __future__ import annotations

from collections.abc import Mapping

import psutil

MOST = 0.8
"""Fraction of the limit at which the person is warned. A process at its limit refuses connections, also of members."""


class OpenFiles:
    """Watches how many files the processes of one peer have open."""

    def __init__(self) -> None:
        self._told: set[int] = set()

    def look(self, processes: Mapping[str, psutil.Process]) -> list[str]:
        """Return warnings for the person, at most one for each process.

        Args:
            processes: by name; one that has just ended is left out, and all of them where the system does not tell
        """
        sentences = []
        for name, process in processes.items():
            try:
                limit, found = process.rlimit(psutil.RLIMIT_NOFILE)[0], process.num_fds()
            except (psutil.Error, AttributeError):
                continue
            if 0 < MOST * limit <= found and process.pid not in self._told:
                self._told.add(process.pid)
                sentences.append(
                    f"{name} has {found:,} of {limit:,} files open: give a higher `ulimit -n` in this shell, and start "
                    "this peer again. Each network stream is an open file; a peer may be opening many."
                )
        return sentences
